// Operations that some ranks have not submitted for long: told to the user (diagnosis.h), and ended if so configured.
#include <algorithm>
#include <system_error>

#include "base/error.h"
#include "base/hash.h"
#include "base/ranks_text.h"
#include "base/thread.h"
#include "engine/communicator/communicator.h"
#include "engine/watch/failure.h"

namespace dcoll {
namespace {

// The rank that makes the report ends the job with it; the others leave it this long.
constexpr double kReporterSeconds = 2;
// What others get to answer. They wait a second for Python's lock.
constexpr double kLeastPatienceSeconds = 1.5, kMostPatienceSeconds = 5;
constexpr size_t kMostReportBytes = 850;  // of an error, which has to reach all ranks in one piece

// All that stall by name are told of in one report.
std::string told_along(const std::vector<std::shared_ptr<Operation>>& names) {
  constexpr size_t kMostNames = 5;
  if (names.empty()) return "";
  std::string text = " (and " + std::to_string(names.size()) + " more by name:";
  for (size_t i = 0; i < names.size(); ++i) {
    if (i < kMostNames) text += " '" + names[i]->request.name + "'";
    names[i]->stall_told.store(true);
  }
  return text + (names.size() > kMostNames ? " ...)" : ")");
}

int64_t whole_seconds(double seconds) { return static_cast<int64_t>(seconds); }

}  // namespace

std::string Communicator::unfinished_text(const Operation& operation, double timeout_s) {
  std::vector<int> missing;
  {
    const MutexLock lock(drive_mutex_);
    // What has not begun waits for what is before it.
    for (const auto& one : queue_) {
      if (missing.empty() && one->started && !one->done.load()) missing = one->task.waiting_for();
    }
    if (operation.started && !operation.done.load()) missing = operation.task.waiting_for();
  }
  for (int& rank : missing) rank = members_.job_rank(rank);
  return operation.request.describe() + " is not finished after " + std::to_string(timeout_s) + " s" +
         (missing.empty() ? "" : ", waiting for " + ranks_text(missing) + " of " + std::to_string(members_.size)) +
         ". It goes on: wait again, or raise the timeout.";
}

void Communicator::watch_stall(Operation& operation, double idle, const std::vector<int>& missing) {
  if (settings_.stall_check_disable || idle <= settings_.stall_check_time_s || missing.empty()) return;
  const bool waits_for_the_end = operation.request.kind == Kind::kJoin || operation.request.kind == Kind::kShutdown;
  if (!operation.stalled.exchange(true)) {
    if (members_.diagnosis != nullptr) {
      members_.diagnosis->stalls();
    } else if (!waits_for_the_end) {
      log_(LogLevel::kWarning, wait_text(operation, idle, missing));
    }
  }
  if (waits_for_the_end) return;  // of the others, however long they go on alone
  const double limit = settings_.stall_shutdown_time_s;
  if (limit <= 0 || idle <= limit || (operation.report.empty() && idle <= limit + kReporterSeconds)) return;
  const std::string what = operation.report.empty() ? wait_text(operation, idle, missing) : operation.report;
  throw_stall(what);
}

void Communicator::throw_stall(const std::string& what) const {
  throw StallError(shortened(what, kMostReportBytes) + " DCOLL_STALL_SHUTDOWN_TIME (seconds, now " +
                   std::to_string(whole_seconds(settings_.stall_shutdown_time_s)) + ") ends the job.");
}

void Communicator::listen_for_stalls() {
  const bool of_a_set = !members_.job_ranks.empty();
  if (members_.diagnosis == nullptr &&
      (settings_.stall_check_disable || members_.size == 1 || !members_.may_listen || of_a_set))
    return;
  if (members_.diagnosis == nullptr) {
    const double patience = std::clamp(settings_.stall_check_time_s, kLeastPatienceSeconds, kMostPatienceSeconds);
    try {
      members_.diagnosis = std::make_shared<Diagnosis>(*this, members_.rank, patience);
    } catch (const std::system_error& e) {
      return log_(LogLevel::kWarning,
                  no_thread_text(e) + " Operations that stall are reported without what the other ranks do.");
    }
  }
  members_.diagnosis->add(*this);
}

void Communicator::stop_listening() {
  if (members_.diagnosis == nullptr) return;
  if (members_.job_ranks.empty()) members_.diagnosis->stop();
  members_.diagnosis->remove(*this);
}

// The other ranks gave up on an operation that this rank has not begun: it must not finish it alone.
bool Communicator::given_up() {
  if (members_.size == 1 || (failure_flag_ != nullptr && !heard_of_failure())) return false;
  return is_stall(members_.transport->poll_failure());
}

uint64_t Communicator::id() const {
  if (members_.job_ranks.empty()) return 0;
  Fingerprint print;
  for (const int rank : members_.job_ranks) print.add(static_cast<uint64_t>(rank));
  return print.value();
}

std::vector<int> Communicator::job_ranks() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < members_.size; ++rank) ranks.push_back(members_.job_rank(rank));
  return ranks;
}

bool Communicator::take_notes(std::vector<Note>& notes) {
  if (!drive_mutex_.try_lock()) return false;
  const MutexLock lock(drive_mutex_, std::adopt_lock);
  if (failed_.load()) return true;
  try {
    notes = members_.transport->take_notes();
  } catch (...) {
    fail_with(std::current_exception(), /*tell_peers=*/true);
  }
  return true;
}

void Communicator::post_note(int peer, const std::string& text) {
  const MutexLock lock(drive_mutex_);
  try {
    if (!failed_.load()) members_.transport->post_note(peer, text);
  } catch (...) {
    fail_with(std::current_exception(), /*tell_peers=*/true);
  }
}

// What this rank has begun and not finished of either sequence, as far as it is what `question` is
// about.
std::shared_ptr<Operation> Communicator::find(const Question& question) const {
  if (!question.by_name) {
    const bool same = !queue_.empty() && queue_.front()->request.fingerprint() == question.operation;
    return same ? queue_.front() : nullptr;
  }
  for (const auto& operation : named_queue_) {
    if (NamedLane::id_of(operation->request) == question.operation) return operation;
  }
  if (names_ == nullptr) return nullptr;
  const auto found = names_->waiting().find(question.operation);
  return found != names_->waiting().end() ? found->second : nullptr;
}

uint64_t Communicator::answer(const Question& question, int asker, Answer& answer) {
  const MutexLock lock(drive_mutex_);
  const bool joined = !queue_.empty() && queue_.front()->request.kind == Kind::kJoin;
  if (const auto own = find(question)) {
    const bool told = own->stall_told.load(), own_report = own->stalled.load() && asker > members_.job_rank(rank());
    answer.state = Answer::State::kWaits;
    answer.tells = told || own_report;
    if (!answer.tells) own->stall_told.store(true);
    return own->waiter.load(std::memory_order_relaxed);
  }
  const uint64_t begun = question.by_name ? named_started_ : started_;
  if (joined || (question.number > 0 && begun >= question.number)) {
    answer.state = Answer::State::kPassed;
    return 0;
  }
  answer.state = Answer::State::kBusy;
  const std::string before = last_operation(), none = members_.job_ranks.empty() ? "" : " of this process set";
  answer.operation = before.empty() ? "has finished no operation" + none + " yet" : "finished " + before;
  return 0;
}

// Empty: none so far.
std::string Communicator::last_operation() const {
  if (!last_.any()) return "";
  Request last = last_.request();
  last.root_in_job = members_.job_rank(last.root);
  return last.describe();
}

std::optional<uint64_t> Communicator::waits_here(std::string& text) {
  const MutexLock lock(drive_mutex_);
  const Operation* running = !queue_.empty() ? queue_.front().get() : nullptr;
  if (running == nullptr && !named_queue_.empty()) running = named_queue_.front().get();
  if (running == nullptr && names_ != nullptr && !names_->waiting().empty()) {
    running = names_->waiting().begin()->second.get();
  }
  if (running == nullptr && points_ != nullptr) {
    points_->for_each([&](const Operation& operation) {
      if (operation.waiter.load(std::memory_order_relaxed) != 0) running = &operation;
    });
  }
  // Not waiters_: a thread that waits leaves now and then to look for Ctrl-C.
  const uint64_t waiter = running != nullptr ? running->waiter.load(std::memory_order_relaxed) : 0;
  if (waiter == 0) return std::nullopt;
  text = running->request.describe() + " for " +
         std::to_string(whole_seconds(seconds_between(running->last_moved, Clock::now()))) + " s";
  return waiter;
}

std::optional<Stall> Communicator::find_stall(double stagger, bool& later) {
  const MutexLock lock(drive_mutex_);
  if (failed_.load()) return std::nullopt;
  const auto due = [&](const Operation& operation) {
    if (!operation.stalled.load() || operation.stall_told.load() || operation.done.load()) return false;
    const double idle = seconds_between(operation.last_moved, Clock::now());
    const bool now = idle >= settings_.stall_check_time_s + stagger;
    later |= !now && idle >= settings_.stall_check_time_s;
    return now;
  };
  const auto describe = [&](std::shared_ptr<Operation> operation, uint64_t number) {
    const uint64_t what = operation->by_name ? NamedLane::id_of(operation->request) : operation->request.fingerprint();
    return Stall{.operation = operation,
                 .question = {.set = id(), .operation = what, .number = number, .by_name = operation->by_name},
                 .text = operation->request.describe()};
  };
  if (!queue_.empty() && due(*queue_.front())) return describe(queue_.front(), started_ + queue_.front()->rounds);
  if (!named_queue_.empty() && due(*named_queue_.front())) return describe(named_queue_.front(), named_started_);
  if (names_ == nullptr) return std::nullopt;
  const auto& waiting = names_->waiting();
  if (std::none_of(waiting.begin(), waiting.end(), [&](const auto& entry) { return due(*entry.second); }))
    return std::nullopt;
  auto names = untold_names();
  Stall first = describe(names.front(), 0);
  names.erase(names.begin());
  first.text += told_along(names);
  return first;
}

// Once one is due, those submitted soon after it are told of with it.
std::vector<std::shared_ptr<Operation>> Communicator::untold_names() const {
  std::vector<std::shared_ptr<Operation>> names;
  for (const auto& [id, operation] : names_->waiting()) {
    const double idle = seconds_between(operation->last_moved, Clock::now());
    if (idle >= settings_.stall_check_time_s / 2 && !operation->stall_told.load()) names.push_back(operation);
  }
  std::sort(names.begin(), names.end(), [](const auto& a, const auto& b) { return a->last_moved < b->last_moved; });
  return names;
}

void Communicator::report_stall(Operation& operation, const std::string& text, const std::map<int, Answer>& answers,
                                const std::vector<int>& silent) {
  const MutexLock lock(drive_mutex_);
  if (operation.done.load()) return;
  // Nothing is finished here that the others did not take part in.
  const double seconds = seconds_between(operation.last_moved, Clock::now());
  operation.report = stall_report(text, seconds, answers, silent, last_operation());
  // A rank that is done waits for the others to be, however long they compute.
  log_(operation.request.kind == Kind::kShutdown ? LogLevel::kDebug : LogLevel::kWarning, operation.report);
}

}  // namespace dcoll
