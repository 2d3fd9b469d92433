// The synchronous calls of Communicator: what can be finished at once is finished on the caller's thread, without a
// queue, a coroutine or another thread; the ordinary way takes over from whatever was reached.
#include <sched.h>

#include "base/clock.h"
#include "base/error.h"
#include "engine/communicator/communicator.h"

namespace dcoll {

bool Communicator::may_run_on_the_spot() {
  free_last_name();
  if (alert_.load(std::memory_order_relaxed) && !pending_.load()) {
    if (!points_busy_.load()) {
      stand_back();
    } else {
      drivers_turn_.store(false);  // a peer may wake it for a message; it sleeps through what is done here
    }
  }
  return spin_s_ > 0 && !pending_.load() && !failed_.load() && !closing_.load() && !heard_of_failure();
}

std::shared_ptr<Operation> Communicator::run_or_submit(const Call& call) {
  check_process();
  if (call.plainly_valid(members_.size)) {
    const MutexLock lock(drive_mutex_);
    if (may_run_on_the_spot() && enters_inline(fabric_, call)) {
      return call.kind == Kind::kAllReduce ? reduce_on_the_spot(call) : pull_on_the_spot(call);
    }
  }
  return submit(Request::of(call, members_.size), Start::kByWaiter);
}

std::shared_ptr<Operation> Communicator::run_or_submit(Request request) {
  if (request.kind == Kind::kAllReduce) return run_or_submit(request.call());
  check_process();
  {
    const MutexLock lock(drive_mutex_);
    if (may_run_on_the_spot() && enters_inline(fabric_, request.call())) {
      accept(request);
      return pull_on_the_spot(std::make_shared<Operation>(std::move(request)));
    }
  }
  return submit(std::move(request), Start::kByWaiter);
}

std::shared_ptr<Operation> Communicator::reduce_on_the_spot(const Call& call) {
  Phases phases(timeline_->on());
  enter_all_reduce(fabric_, call, phases);
  phases.number = ++started_;
  return entered([&]() DCOLL_REQUIRES(drive_mutex_) -> std::shared_ptr<Operation> {
    NodeAllReduce& all_reduce = *fabric_.all_reduce;
    const auto done = [&](bool& moved) { return all_reduce.poll(moved); };
    if (look_briefly(done) && all_reduce.outcome() == NodeAllReduce::Outcome::kDone) {
      last_.note(call);
      if (phases.on) [[unlikely]] {
        note_agreement(all_reduce, phases);
        timeline_->record(number_, call, phases);
      }
      return nullptr;
    }
    // Not everybody came at once: the ordinary way from here.
    auto operation = std::make_shared<Operation>(Request::of(call, members_.size));
    if (phases.on) operation->phases = phases;
    operation->phases.number = started_;
    go_on(operation, {.all_reduce = true});
    return operation;
  });
}

std::shared_ptr<Operation> Communicator::pull_on_the_spot(const Call& call) {
  if (timeline_->on()) {  // which notes the time in the operation
    Request request = Request::of(call, members_.size);
    accept(request);
    return pull_on_the_spot(std::make_shared<Operation>(std::move(request)));
  }
  ++started_;
  PullNow& pull = *fabric_.pull_now;
  pull.enter(call);
  return entered([&]() DCOLL_REQUIRES(drive_mutex_) -> std::shared_ptr<Operation> {
    if (look_briefly([&](bool& moved) { return pull.poll(nullptr, moved); }) && pull.done()) {
      last_.note(call);
      return nullptr;
    }
    Request request = Request::of(call, members_.size);
    accept(request);
    auto operation = std::make_shared<Operation>(std::move(request));
    operation->phases.number = started_;
    go_on_briefly(operation, pull);
    return operation;
  });
}

std::shared_ptr<Operation> Communicator::pull_on_the_spot(std::shared_ptr<Operation> operation) {
  operation->phases.on = timeline_->on();
  operation->phases.number = ++started_;
  operation->phases.enter(Phase::kAgree);
  PullNow& pull = *fabric_.pull_now;
  pull.enter(operation->request.call());
  return entered([&]() DCOLL_REQUIRES(drive_mutex_) {
    if (look_briefly([&](bool& moved) { return pull.poll(operation.get(), moved); }) && pull.done()) {
      last_.note(operation->request);
      if (operation->phases.on) [[unlikely]]
        timeline_->record(number_, *operation);
      operation->done.store(true, std::memory_order_release);
    } else {
      go_on_briefly(operation, pull);
    }
    return operation;
  });
}

// To the hardware thread beside us, or to the ranks that need this core.
void Communicator::pause_between_looks() const {
  if (members_.own_core) {
    cpu_relax();
  } else {
    sched_yield();
  }
}

// How often a synchronous call looks for its peers in vain before the ordinary way. A yield runs whoever else is on the
// core.
int Communicator::polls_on_the_spot() const { return members_.own_core ? 1000 : 64; }

// Nothing else is queued.
void Communicator::go_on_briefly(const std::shared_ptr<Operation>& operation, const PullNow& pull) {
  go_on(operation, {.ticket = pull.ticket(), .taken = pull.taken()});
  look_briefly([&](bool& moved) DCOLL_REQUIRES(drive_mutex_) {
    advance_front(queue_, fabric_, moved);
    return operation->done.load(std::memory_order_relaxed);
  });
}

// Takes over an operation that has entered and could not be finished on the spot. Nothing is queued.
void Communicator::go_on(const std::shared_ptr<Operation>& operation, Entry entry) {
  operation->task = run_collective(fabric_, *operation, entry);
  operation->started = true;
  operation->last_moved = Clock::now();
  queue_.push_back(operation);
  pending_.store(true, std::memory_order_release);
}

}  // namespace dcoll
