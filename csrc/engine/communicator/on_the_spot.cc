#include "engine/communicator/on_the_spot.h"

#include <utility>

#include "engine/collective/handshake.h"

namespace dcoll {

bool OnTheSpot::run(const Call& call, std::shared_ptr<Operation>& rest) {
  const MutexLock lock(progress_.drive_mutex);
  if (!takes(call)) return false;
  rest = call.kind == Kind::kAllReduce ? reduce(call) : pull(call);
  return true;
}

bool OnTheSpot::run(Request& request, std::shared_ptr<Operation>& operation) {
  const MutexLock lock(progress_.drive_mutex);
  if (!takes(request.call())) return false;
  operation = setup_.operation_of(std::move(request));
  pull(operation);
  return true;
}

bool OnTheSpot::takes(const Call& call) {
  progress_.free_last_name();
  turns_.go_first();
  return turns_.spins() && !progress_.is_pending() && progress_.is_sound() && enters_inline(progress_.fabric, call);
}

std::shared_ptr<Operation> OnTheSpot::reduce(const Call& call) {
  if (call.encoding) progress_.fabric.tell_uncompressed();
  Phases phases(setup_.timeline().on());
  enter_all_reduce(progress_.fabric, call, call.fingerprint(), phases);
  phases.number = ++progress_.under_way.started;
  return progress_.entered([&]() -> std::shared_ptr<Operation> {
    progress_.drive_mutex.is_held();
    NodeAllReduce& all_reduce = *progress_.fabric.all_reduce;
    const auto done = [&](bool& moved) { return all_reduce.poll(moved); };
    if (turns_.look_briefly(done) && all_reduce.outcome() == NodeAllReduce::Outcome::kDone) {
      progress_.under_way.last.note(call);
      if (phases.on) [[unlikely]] {
        note_agreement(all_reduce, phases);
        setup_.timeline().record(setup_.number, call, phases);
      }
      return nullptr;
    }
    // Not everybody came at once: the ordinary way from here.
    auto operation = std::make_shared<Operation>(Request::of(call, setup_.members.size));
    if (phases.on) operation->phases = phases;
    operation->phases.number = progress_.under_way.started;
    progress_.go_on(operation, {.all_reduce = true});
    return operation;
  });
}

std::shared_ptr<Operation> OnTheSpot::pull(const Call& call) {
  if (setup_.timeline().on()) {  // which notes the time in the operation
    auto operation = setup_.operation_of(Request::of(call, setup_.members.size));
    pull(operation);
    return operation;
  }
  ++progress_.under_way.started;
  PullNow& pull = *progress_.fabric.pull_now;
  pull.enter(call);
  return progress_.entered([&]() -> std::shared_ptr<Operation> {
    progress_.drive_mutex.is_held();
    if (turns_.look_briefly([&](bool& moved) { return pull.poll(nullptr, moved); }) && pull.done()) {
      progress_.under_way.last.note(call);
      return nullptr;
    }
    auto operation = setup_.operation_of(Request::of(call, setup_.members.size));
    operation->phases.number = progress_.under_way.started;
    go_on_briefly(operation, pull);
    return operation;
  });
}

void OnTheSpot::pull(const std::shared_ptr<Operation>& operation) {
  operation->phases.number = ++progress_.under_way.started;
  operation->phases.enter(Phase::kAgree);
  PullNow& pull = *progress_.fabric.pull_now;
  pull.enter(operation->request.call());
  progress_.entered([&] {
    progress_.drive_mutex.is_held();
    if (turns_.look_briefly([&](bool& moved) { return pull.poll(operation.get(), moved); }) && pull.done()) {
      progress_.under_way.last.note(operation->request);
      if (operation->phases.on) [[unlikely]]
        setup_.timeline().record(setup_.number, *operation);
      operation->done.store(true, std::memory_order_release);
    } else {
      go_on_briefly(operation, pull);
    }
  });
}

// Nothing else is queued.
void OnTheSpot::go_on_briefly(const std::shared_ptr<Operation>& operation, const PullNow& pull) {
  progress_.go_on(operation, {.ticket = pull.ticket(), .taken = pull.taken()});
  turns_.look_briefly([&](bool& moved) {
    progress_.drive_mutex.is_held();
    progress_.advance_front(progress_.under_way.ordered, progress_.fabric, moved);
    return operation->done.load(std::memory_order_relaxed);
  });
}

}  // namespace dcoll
