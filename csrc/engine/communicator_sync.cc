// The synchronous calls of Communicator: what can be finished at once is finished on the caller's thread, without a
// queue, a coroutine or another thread; the ordinary way takes over from whatever was reached.
#include <sched.h>

#include "base/clock.h"
#include "base/error.h"
#include "engine/communicator.h"

namespace dcoll {

// Drive lock held.
bool Communicator::may_run_on_the_spot() {
  free_last_name();
  if (alert_.load(std::memory_order_relaxed) && !pending_.load()) stand_back();
  return spin_s_ > 0 && !pending_.load() && !failed_.load() && !closing_.load() && !heard_of_failure();
}

// What follows once peers have this rank's part, drive lock held: whatever keeps it from taking theirs fails the
// communicator, or the next call would meet what is left of this one.
template <typename Rest>
auto Communicator::entered(Rest&& rest) {
  try {
    return rest();
  } catch (...) {
    fail_with(std::current_exception(), /*tell_peers=*/true);
    throw;
  }
}

std::shared_ptr<Operation> Communicator::run_or_submit(Request request) {
  if (request.kind == Kind::kAllReduce) return run_or_submit(request.reduce_call());
  check_process();
  {
    const std::lock_guard lock(drive_mutex_);
    if (may_run_on_the_spot() && pulls_now(fabric_, request.kind)) {
      accept(request);
      auto operation = std::make_shared<Operation>(std::move(request));
      operation->phases.on = timeline_->on();
      operation->phases.number = ++started_;
      operation->phases.enter(Phase::kAgree);
      PullNow& pull = *fabric_.pull_now;
      pull.enter(PullCall::of(operation->request));
      return entered([&] {
        if (finish_now(pull, operation.get())) {
          last_.note(operation->request);
          if (operation->phases.on) [[unlikely]]
            timeline_->record(number_, *operation);
          operation->done.store(true, std::memory_order_release);
        } else {
          go_on(operation, {.ticket = pull.ticket(), .taken = pull.taken()});
          advance_briefly(*operation);
        }
        return operation;
      });
    }
  }
  return submit(std::move(request), Start::kByWaiter);
}

std::shared_ptr<Operation> Communicator::run_or_submit(const PullCall& call) {
  check_process();
  if (!timeline_->on() && call.plainly_valid(members_.size)) {  // else there is an operation to note the time in
    const std::lock_guard lock(drive_mutex_);
    if (may_run_on_the_spot() && pulls_now(fabric_, call.kind)) {
      ++started_;
      PullNow& pull = *fabric_.pull_now;
      pull.enter(call);
      return entered([&]() -> std::shared_ptr<Operation> {
        if (finish_now(pull, nullptr)) {
          last_.note(call);
          return nullptr;
        }
        Request request = call.request(members_.size);
        accept(request);
        auto operation = std::make_shared<Operation>(std::move(request));
        operation->phases.number = started_;
        go_on(operation, {.ticket = pull.ticket(), .taken = pull.taken()});
        advance_briefly(*operation);
        return operation;
      });
    }
  }
  return run_or_submit(call.request(members_.size));
}

std::shared_ptr<Operation> Communicator::run_or_submit(const ReduceCall& call) {
  check_process();
  {
    Phases phases(timeline_->on());
    const std::lock_guard lock(drive_mutex_);
    if (may_run_on_the_spot() && call.plainly_valid() && enter_all_reduce(fabric_, call, phases)) {
      phases.number = ++started_;
      return entered([&]() -> std::shared_ptr<Operation> {
        if (poll_briefly(*fabric_.all_reduce)) {
          last_.note(call);
          if (phases.on) [[unlikely]] {
            note_agreement(*fabric_.all_reduce, phases);
            timeline_->record(number_, call, phases);
          }
          return nullptr;
        }
        // Not everybody came at once: the ordinary way from here.
        auto operation = std::make_shared<Operation>(Request::of(call));
        if (phases.on) operation->phases = phases;
        operation->phases.number = started_;
        go_on(operation, {.all_reduce = true});
        return operation;
      });
    }
  }
  return submit(Request::of(call), Start::kByWaiter);
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

// Drive lock held: not for longer than the all-reduce takes, and some 10 us of waiting for a peer.
bool Communicator::poll_briefly(NodeAllReduce& all_reduce) const {
  for (int in_vain = 0; in_vain < polls_on_the_spot();) {
    bool moved = false;
    if (all_reduce.poll(moved)) return all_reduce.outcome() == NodeAllReduce::Outcome::kDone;
    if (moved) {
      in_vain = 0;
    } else {
      ++in_vain;
      pause_between_looks();
    }
  }
  return false;
}

// Drive lock held, as in poll_briefly.
bool Communicator::finish_now(PullNow& pull, Operation* operation) const {
  for (int in_vain = 0; in_vain < polls_on_the_spot();) {
    bool moved = false;
    if (pull.poll(operation, moved)) return pull.done();
    if (moved) {
      in_vain = 0;
    } else {
      ++in_vain;
      pause_between_looks();
    }
  }
  return false;
}

// Drive lock held, and the operation is all there is: as poll_briefly.
void Communicator::advance_briefly(const Operation& operation) {
  for (int in_vain = 0; in_vain < polls_on_the_spot() && !operation.done.load(std::memory_order_relaxed);) {
    bool moved = false;
    advance_front(queue_, fabric_, moved);
    if (moved) {
      in_vain = 0;
    } else {
      ++in_vain;
      pause_between_looks();
    }
  }
}

// Takes over an operation that has entered and could not be finished on the spot. Drive lock held, nothing queued.
void Communicator::go_on(const std::shared_ptr<Operation>& operation, Entry entry) {
  operation->task = run_collective(fabric_, *operation, entry);
  operation->started = true;
  operation->last_moved = Clock::now();
  queue_.push_back(operation);
  pending_.store(true, std::memory_order_release);
}

}  // namespace dcoll
