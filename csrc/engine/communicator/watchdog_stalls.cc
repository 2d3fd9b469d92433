// Operations that some ranks have not submitted for long: told to the user (diagnosis.h), and ended if so configured.
#include <algorithm>
#include <system_error>

#include "base/error.h"
#include "base/hash.h"
#include "base/number.h"
#include "base/ranks_text.h"
#include "base/thread.h"
#include "engine/communicator/watchdog.h"

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

std::string Watchdog::unfinished_text(const Operation& operation, double timeout_s) {
  std::vector<int> missing;
  {
    const MutexLock lock(progress_.drive_mutex);
    // What has not begun waits for what is before it.
    for (const auto& one : all().ordered) {
      if (missing.empty() && one->started && !one->done.load()) missing = one->task.waiting_for();
    }
    if (operation.started && !operation.done.load()) missing = operation.task.waiting_for();
  }
  for (int& rank : missing) rank = setup_.members.job_rank(rank);
  return operation.request.describe() + " is not finished after " + text_of(timeout_s, 10) + " s" +
         (missing.empty() ? ""
                          : ", waiting for " + ranks_text(missing) + " of " + std::to_string(setup_.members.size)) +
         ". It goes on: wait again, or raise the timeout.";
}

void Watchdog::watch_stall(Operation& operation, double idle, const std::vector<int>& missing) const {
  if (setup_.settings.stall_check_disable || idle <= setup_.settings.stall_check_time_s || missing.empty()) return;
  const bool waits_for_the_end = operation.request.kind == Kind::kJoin || operation.request.kind == Kind::kShutdown;
  if (!operation.stalled.exchange(true)) {
    if (setup_.members.diagnosis != nullptr) {
      setup_.members.diagnosis->stalls();
    } else if (!waits_for_the_end) {
      setup_.log(LogLevel::kWarning, wait_text(operation, idle, missing));
    }
  }
  if (waits_for_the_end) return;  // of the others, however long they go on alone
  const double limit = setup_.settings.stall_shutdown_time_s;
  if (limit <= 0 || idle <= limit || (operation.report.empty() && idle <= limit + kReporterSeconds)) return;
  const std::string what = operation.report.empty() ? wait_text(operation, idle, missing) : operation.report;
  throw_stall(what);
}

void Watchdog::throw_stall(const std::string& what) const {
  throw StallError(shortened(what, kMostReportBytes) + " DCOLL_STALL_SHUTDOWN_TIME (seconds, now " +
                   std::to_string(whole_seconds(setup_.settings.stall_shutdown_time_s)) + ") ends the job.");
}

void Watchdog::begin_listening(std::shared_ptr<Diagnosis>& of_the_process) {
  const Members& members = setup_.members;
  if (of_the_process == nullptr) {
    const bool of_a_set = !members.job_ranks.empty();
    if (setup_.settings.stall_check_disable || members.size == 1 || !members.may_listen || of_a_set) return;
    const double patience = std::clamp(setup_.settings.stall_check_time_s, kLeastPatienceSeconds, kMostPatienceSeconds);
    try {
      of_the_process = std::make_shared<Diagnosis>(*this, members.rank, patience);
    } catch (const std::system_error& e) {
      return setup_.log(LogLevel::kWarning,
                        no_thread_text(e) + " Operations that stall are reported without what the other ranks do.");
    }
  }
  of_the_process->add(*this);
}

void Watchdog::stop_listening() {
  if (setup_.members.diagnosis == nullptr) return;
  if (setup_.members.job_ranks.empty()) setup_.members.diagnosis->stop();
  setup_.members.diagnosis->remove(*this);
}

uint64_t Watchdog::id() const {
  if (setup_.members.job_ranks.empty()) return 0;
  return Fingerprint().add(std::span<const int>(setup_.members.job_ranks)).value();
}

bool Watchdog::take_notes(std::vector<Note>& notes) {
  if (!progress_.drive_mutex.try_lock()) return false;
  const MutexLock lock(progress_.drive_mutex, std::adopt_lock);
  if (progress_.has_failed()) return true;
  try {
    notes = setup_.transport().take_notes();
  } catch (...) {
    progress_.fail_with(std::current_exception(), /*tell_peers=*/true);
  }
  return true;
}

void Watchdog::post_note(int peer, const std::string& text) {
  const MutexLock lock(progress_.drive_mutex);
  try {
    if (!progress_.has_failed()) setup_.transport().post_note(peer, text);
  } catch (...) {
    progress_.fail_with(std::current_exception(), /*tell_peers=*/true);
  }
}

// What this rank has begun and not finished of either sequence, as far as it is what `question` is about.
std::shared_ptr<Operation> Watchdog::find(const Question& question) const {
  if (!question.by_name) {
    const bool same = !all().ordered.empty() && all().ordered.front()->request.fingerprint() == question.operation;
    return same ? all().ordered.front() : nullptr;
  }
  for (const auto& operation : all().named) {
    if (NamedLane::id_of(operation->request) == question.operation) return operation;
  }
  if (all().names == nullptr) return nullptr;
  const auto found = all().names->waiting().find(question.operation);
  return found != all().names->waiting().end() ? found->second : nullptr;
}

uint64_t Watchdog::answer(const Question& question, int asker, Answer& answer) {
  const MutexLock lock(progress_.drive_mutex);
  const bool joined = !all().ordered.empty() && all().ordered.front()->request.kind == Kind::kJoin;
  if (const auto own = find(question)) {
    const bool told = own->stall_told.load(),
               own_report = own->stalled.load() && asker > setup_.members.job_rank(rank());
    answer.state = Answer::State::kWaits;
    answer.tells = told || own_report;
    if (!answer.tells) own->stall_told.store(true);
    return own->waiter.load(std::memory_order_relaxed);
  }
  const uint64_t begun = question.by_name ? all().named_started : all().started;
  if (joined || (question.number > 0 && begun >= question.number)) {
    answer.state = Answer::State::kPassed;
    return 0;
  }
  answer.state = Answer::State::kBusy;
  const std::string before = last_operation(), none = setup_.members.job_ranks.empty() ? "" : " of this process set";
  answer.operation = before.empty() ? "has finished no operation" + none + " yet" : "finished " + before;
  return 0;
}

// Empty: none so far.
std::string Watchdog::last_operation() const {
  if (!all().last.any()) return "";
  Request last = all().last.request();
  last.root_in_job = setup_.members.job_rank(last.root);
  return last.describe();
}

std::optional<uint64_t> Watchdog::waits_here(std::string& text) {
  const MutexLock lock(progress_.drive_mutex);
  const Operation* running = !all().ordered.empty() ? all().ordered.front().get() : nullptr;
  if (running == nullptr && !all().named.empty()) running = all().named.front().get();
  if (running == nullptr && all().names != nullptr && !all().names->waiting().empty()) {
    running = all().names->waiting().begin()->second.get();
  }
  if (running == nullptr && all().points != nullptr) {
    all().points->for_each([&](const Operation& operation) {
      if (operation.waiter.load(std::memory_order_relaxed) != 0) running = &operation;
    });
  }
  // Not Progress::waiters: a thread that waits leaves now and then to look for Ctrl-C.
  const uint64_t waiter = running != nullptr ? running->waiter.load(std::memory_order_relaxed) : 0;
  if (waiter == 0) return std::nullopt;
  text = running->request.describe() + " for " +
         std::to_string(whole_seconds(seconds_between(running->last_moved, Clock::now()))) + " s";
  return waiter;
}

std::optional<Stall> Watchdog::find_stall(double stagger, bool& later) {
  const MutexLock lock(progress_.drive_mutex);
  if (progress_.has_failed()) return std::nullopt;
  const auto due = [&](const Operation& operation) {
    if (!operation.stalled.load() || operation.stall_told.load() || operation.done.load()) return false;
    const double idle = seconds_between(operation.last_moved, Clock::now());
    const bool now = idle >= setup_.settings.stall_check_time_s + stagger;
    later |= !now && idle >= setup_.settings.stall_check_time_s;
    return now;
  };
  const auto describe = [&](std::shared_ptr<Operation> operation, uint64_t number) {
    const uint64_t what = operation->by_name ? NamedLane::id_of(operation->request) : operation->request.fingerprint();
    return Stall{.operation = operation,
                 .question = {.set = id(), .operation = what, .number = number, .by_name = operation->by_name},
                 .text = operation->request.describe()};
  };
  if (!all().ordered.empty() && due(*all().ordered.front()))
    return describe(all().ordered.front(), all().started + all().ordered.front()->rounds);
  if (!all().named.empty() && due(*all().named.front())) return describe(all().named.front(), all().named_started);
  if (all().names == nullptr) return std::nullopt;
  const auto& waiting = all().names->waiting();
  if (std::none_of(waiting.begin(), waiting.end(), [&](const auto& entry) { return due(*entry.second); }))
    return std::nullopt;
  auto names = untold_names();
  Stall first = describe(names.front(), 0);
  names.erase(names.begin());
  first.text += told_along(names);
  return first;
}

// Once one is due, those submitted soon after it are told of with it.
std::vector<std::shared_ptr<Operation>> Watchdog::untold_names() const {
  std::vector<std::shared_ptr<Operation>> names;
  for (const auto& [id, operation] : all().names->waiting()) {
    const double idle = seconds_between(operation->last_moved, Clock::now());
    if (idle >= setup_.settings.stall_check_time_s / 2 && !operation->stall_told.load()) names.push_back(operation);
  }
  std::sort(names.begin(), names.end(), [](const auto& a, const auto& b) { return a->last_moved < b->last_moved; });
  return names;
}

void Watchdog::report_stall(Operation& operation, const std::string& text, const std::map<int, Answer>& answers,
                            const std::vector<int>& silent) {
  const MutexLock lock(progress_.drive_mutex);
  if (operation.done.load()) return;
  // Nothing is finished here that the others did not take part in.
  const double seconds = seconds_between(operation.last_moved, Clock::now());
  operation.report = stall_report(text, seconds, answers, silent, last_operation());
  // A rank that is done waits for the others to be, however long they compute.
  setup_.log(operation.request.kind == Kind::kShutdown ? LogLevel::kDebug : LogLevel::kWarning, operation.report);
}

}  // namespace dcoll
