#include "engine/watch/diagnosis.h"

#include <algorithm>
#include <iterator>
#include <new>

#include "engine/core/operation.h"

namespace dcoll {
namespace {

using std::chrono::milliseconds;

constexpr double kStaggerSeconds = 0.05;
constexpr int kMostStaggers = 20;
constexpr milliseconds kLockLimit{1000};  // for Python's lock
constexpr milliseconds kBusyLook{10};     // while there is an inquiry
constexpr milliseconds kFarLook{500};     // where notes end no sleep
constexpr auto kSleep = std::chrono::hours(1);

}  // namespace

Diagnosis::Diagnosis(Notes& job, int rank, double patience_s)
    : job_(job), rank_(rank), patience_s_(patience_s), thread_([this] { run(); }) {}

Diagnosis::~Diagnosis() { stop(); }

// A process set may hold this longer than its job lives, which is woken by the first call alone.
void Diagnosis::stop() {
  if (!thread_.joinable()) return;
  stop_.store(true);
  job_.listens_on().wake_listener();
  thread_.join();
}

void Diagnosis::add(Watched& communicator) {
  const MutexLock lock(mutex_);
  communicators_.push_back(&communicator);
}

void Diagnosis::remove(Watched& communicator) {
  const MutexLock lock(mutex_);
  std::erase(communicators_, &communicator);
  if (inquiry_ != nullptr && inquiry_->communicator == &communicator) inquiry_.reset();
}

void Diagnosis::set_program(Program program) {
  const MutexLock lock(mutex_);
  program_ = std::move(program);
}

void Diagnosis::stalls() {
  stalls_.store(true);
  if (!stop_.load()) job_.listens_on().wake_listener();
}

void Diagnosis::run() {
  Transport& transport = job_.listens_on();
  while (!stop_) {
    const uint32_t ticket = transport.prepare_listen();
    bool busy = false;
    try {
      busy = look();
    } catch (const std::bad_alloc&) {  // no memory for a report: the operation's error says what it waits for
    }
    const std::chrono::microseconds sleep = busy ? kBusyLook : transport.announces_notes() ? kSleep : kFarLook;
    if (!stop_) transport.listen(ticket, sleep);
  }
}

// Whether there is more to come soon.
bool Diagnosis::look() {
  std::vector<Note> notes;
  const bool heard = job_.take_notes(notes);  // not while the driver is at it
  const MutexLock lock(mutex_);
  for (const Note& note : notes) {
    if (const auto question = decode_question(note.text)) answer(note.from, *question);
    if (auto answer = decode_answer(note.text)) take(note.from, std::move(*answer));
  }
  if (inquiry_ != nullptr) {
    const bool complete = inquiry_->answers.size() == inquiry_->others.size();
    if (complete || Clock::now() >= inquiry_->deadline) end_inquiry();
  }
  if (inquiry_ == nullptr && stalls_.load() && !begin_inquiry()) stalls_.store(false);
  return !heard || stalls_.load();
}

void Diagnosis::ask_the_program(Answer& answer, uint64_t thread) {
  const std::string lines = program_ ? program_(thread, kLockLimit) : "";
  if (!lines.empty()) {
    take_stack(answer, lines);
  } else {
    answer.silence = program_ ? "busy without releasing Python's lock (a call into C?)" : "its program is not known";
  }
}

void Diagnosis::answer(int asker, const Question& question) {
  Answer answer;
  answer.question = question.id;
  uint64_t thread = 0;
  for (Watched* communicator : communicators_) {
    if (communicator->id() != question.set) continue;
    const bool asking = inquiry_ != nullptr && inquiry_->communicator == communicator;
    thread = communicator->answer(question, asker, answer);
    if (asking && !answer.tells) inquiry_.reset();  // the asker makes the report
    break;
  }
  if (answer.state == Answer::State::kBusy) thread = look_elsewhere(answer);
  ask_the_program(answer, thread);
  job_.post_note(asker, encode(answer));
}

// What this rank does instead of what it is asked about: the thread that waits, 0 where none does.
uint64_t Diagnosis::look_elsewhere(Answer& answer) {
  for (Watched* communicator : communicators_) {
    if (const auto thread = communicator->waits_here(answer.operation)) {
      answer.state = Answer::State::kElsewhere;
      return *thread;
    }
  }
  return 0;
}

void Diagnosis::take(int rank, Answer answer) {
  if (inquiry_ == nullptr || answer.question != inquiry_->question.id) return;
  if (answer.tells) {  // one report is enough
    inquiry_->operation->stall_told.store(true);
    return inquiry_.reset();
  }
  inquiry_->answers[rank] = std::move(answer);
}

// Whether anything is being asked, or will be.
bool Diagnosis::begin_inquiry() {
  bool later = false;
  for (Watched* communicator : communicators_) {
    const double stagger = kStaggerSeconds * std::min(communicator->rank(), kMostStaggers);
    auto stall = communicator->find_stall(stagger, later);
    if (!stall) continue;
    inquiry_ = std::make_unique<Inquiry>();
    inquiry_->communicator = communicator;
    inquiry_->operation = std::move(stall->operation);
    inquiry_->question = stall->question;
    inquiry_->question.id = ++questions_;
    inquiry_->text = std::move(stall->text);
    inquiry_->deadline = Clock::now() + duration_of(patience_s_);
    for (const int rank : communicator->job_ranks()) {
      if (rank == rank_) continue;
      inquiry_->others.push_back(rank);
      job_.post_note(rank, encode(inquiry_->question));
    }
    return true;
  }
  return later;
}

void Diagnosis::end_inquiry() {
  const std::unique_ptr<Inquiry> inquiry = std::move(inquiry_);
  Operation& operation = *inquiry->operation;
  if (operation.done.load() || operation.stall_told.exchange(true)) return;
  std::vector<int> silent;
  std::copy_if(inquiry->others.begin(), inquiry->others.end(), std::back_inserter(silent),
               [&](int rank) { return !inquiry->answers.contains(rank); });
  Answer own;
  own.state = Answer::State::kWaits;
  ask_the_program(own, operation.waiter.load(std::memory_order_relaxed));
  inquiry->answers[rank_] = std::move(own);
  inquiry->communicator->report_stall(operation, inquiry->text, inquiry->answers, silent);
}

}  // namespace dcoll
