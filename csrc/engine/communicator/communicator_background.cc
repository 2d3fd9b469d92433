// What a communicator leaves to the background thread (driver.h), and when that is woken: as rarely as can be. Waking
// it and being interrupted by it costs the thread that computes 40 us and more, which most asynchronous operations are
// finished in.
//
// So a small operation is entered by the thread that submits it: its peers need nothing more of this rank for now, and
// what is left to do comes with what they do. If the caller waits meanwhile, as it mostly does, it drives. If not, the
// operation lies there until somebody needs it: a peer that waits in vain wakes the background thread
// (Transport::nudge). What peers do wakes nobody, for a caller that is about to wait would be interrupted by it.
#include "engine/communicator/communicator.h"

namespace dcoll {

// Begins what is pending on this thread, and leaves the rest to the driver, unless somebody waits.
void Communicator::begin_here() {
  if (!drive_mutex_.try_lock()) return hand_over(Wake::kNow);  // whoever drives may not have seen it
  bool moved = false;
  step(moved);
  drive_mutex_.unlock();
  if (!has_work() || waiters_.load() > 0) return;
  hand_over(Wake::kByPeers);
}

// Without a thread, waits and poll() bring on everything.
void Communicator::hand_over(Wake wake) {
  if (!members_.driver->start() && wake == Wake::kNow && drive_mutex_.try_lock()) {
    bool moved = false;  // nobody else begins it
    step(moved);
    drive_mutex_.unlock();
  }
  set_alert(true);
  if (wake == Wake::kByPeers && peers_wake_) return;
  turn_wanted_.store(true);
  members_.driver->wake();
  if (waiters_.load() > 0) members_.transport->wake();  // who drives now
}

// Whether it is done. Asking again and again brings it on, if nobody else does.
bool Communicator::poll(Operation& operation) {
  if (operation.done.load(std::memory_order_acquire)) {
    free_last_name();
    return true;
  }
  if (fork_.in_child()) return true;  // and a wait throws at once
  if (!alert_.load() || waiters_.load() > 0 || !drive_mutex_.try_lock()) return false;
  bool moved = false;
  step(moved);
  drive_mutex_.unlock();
  if (operation.done.load(std::memory_order_acquire)) {
    free_last_name();
    return true;
  }
  if (!moved) members_.transport->nudge();
  return false;
}

// Somebody else drives from now on.
void Communicator::stand_back() {
  drivers_turn_.store(false);
  set_alert(false);
}

void Communicator::set_alert(bool on) {
  if (alert_.load() == on) return;
  const MutexLock lock(alert_mutex_);
  if (alert_.load() == on) return;
  peers_wake_ = members_.transport->alert(on);
  alert_.store(on);
}

bool Communicator::take_turn(bool in_turn, bool in_any_case) {
  const bool wanted = turn_wanted_.load(std::memory_order_relaxed) && turn_wanted_.exchange(false);
  const bool nudged = members_.transport->take_nudge();
  if (in_turn && drivers_turn_.load() && waiters_.load() == 0 && has_work()) return true;
  if (!wanted && !nudged && !in_any_case) return false;
  if (!has_work()) {
    stand_back();                               // nothing to be nudged for
    if (has_work()) hand_over(Wake::kByPeers);  // whoever submitted just now may have been alert before that
    return false;
  }
  if (waiters_.load() > 0) return false;
  stand_back();
  drivers_turn_.store(true);
  driver_is_idle_ = false;
  return true;
}

Driven::Look Communicator::look() {
  if (driver_is_idle_) members_.transport->nudge();
  const bool was_idle = driver_is_idle_;
  bool moved = false, copying = false;
  {
    const MutexLock lock(drive_mutex_);
    step(moved);
    copying = was_idle && awaits_copies();
    if (was_idle && !moved) watch(Clock::now());
  }
  driver_is_idle_ = !moved;
  return {.again = moved || !was_idle, .copying = copying};
}

}  // namespace dcoll
