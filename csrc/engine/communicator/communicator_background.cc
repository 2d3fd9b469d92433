// The background thread of a communicator, and when it is woken: as rarely as can be, for it shares its core with the
// thread that submits and computes. Waking it and being interrupted by it costs that thread 40 us and more, which most
// asynchronous operations are finished in.
//
// So a small operation is entered by the thread that submits it: its peers need nothing more of this rank for now, and
// what is left to do comes with what they do. If the caller waits meanwhile, as it mostly does, it drives. If not, the
// operation lies there until somebody needs it: a peer that waits in vain wakes the background thread
// (Transport::nudge). What peers do wakes nobody, for a caller that is about to wait would be interrupted by it.
#include <cstdio>
#include <utility>

#include "base/thread.h"
#include "engine/communicator/communicator.h"
#include "engine/communicator/cores.h"

namespace dcoll {
namespace {

constexpr auto kIdleSleep = std::chrono::seconds(1);  // after this, what is pending is looked at in any case

}  // namespace

// Begins what is pending on this thread, and leaves the rest to the background thread, unless somebody waits.
void Communicator::begin_here() {
  if (!drive_mutex_.try_lock()) return hand_over(Wake::kNow);  // whoever drives may not have seen it
  bool moved = false;
  step(moved);
  drive_mutex_.unlock();
  if (!has_work() || waiters_.load() > 0) return;
  hand_over(Wake::kByPeers);
}

void Communicator::hand_over(Wake wake) {
  if (!has_thread_ && !make_thread() && wake == Wake::kNow && drive_mutex_.try_lock()) {
    bool moved = false;  // nobody else begins it
    step(moved);
    drive_mutex_.unlock();
  }
  set_alert(true);
  if (wake == Wake::kByPeers && peers_wake_) return;
  background_wanted_.store(true);
  members_.transport->wake();
}

// False where the system gives no thread; then whoever waits or polls drives, as ever, and it is tried again with the
// next operation that nobody waits for.
bool Communicator::make_thread() noexcept {
  const std::lock_guard lock(inbox_mutex_);
  if (has_thread_) return true;
  try {
    thread_ = std::thread([this] { background(); });
    has_thread_ = true;
  } catch (const std::exception& e) {
    if (std::exchange(told_of_no_thread_, true)) return false;
    std::fprintf(stderr, "[dcoll warning rank %d] %s (%s). %s Operations go on only while this rank waits for one.\n",
                 members_.job_rank(members_.rank), kNoThread, e.what(), kMoreThreads);
  }
  return has_thread_;
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
  background_turn_.store(false);
  set_alert(false);
}

void Communicator::set_alert(bool on) {
  if (alert_.load() == on) return;
  const std::lock_guard lock(alert_mutex_);
  if (alert_.load() == on) return;
  peers_wake_ = members_.transport->alert(on);
  alert_.store(on);
}

// DCOLL_THREAD_AFFINITY. Where the system does not let it, the thread stays where it is.
void Communicator::bind_background_thread() const {
  if (settings_.thread_affinity.empty()) return;
  const int core = settings_.thread_affinity.front();
  if (const std::string error = bind_this_thread(core); !error.empty()) {
    log_(LogLevel::kWarning, "DCOLL_THREAD_AFFINITY: the background thread cannot be bound to core " +
                                 std::to_string(core) + " (" + error + "); it may run on the cores of the rank");
  }
}

void Communicator::background() {
  bind_background_thread();
  while (!stop_) {
    const uint32_t ticket = members_.transport->prepare_wait();
    if (!background_wanted_.exchange(false) && !stop_) members_.transport->doze(ticket, kIdleSleep);
    if (has_work() && waiters_.load() == 0) {
      stand_back();
      background_turn_.store(true);
      drive(stop_, Spin::kNever, Clock::time_point::max());
    } else if (!has_work()) {
      stand_back();                               // nothing to be nudged for
      if (has_work()) hand_over(Wake::kByPeers);  // whoever submitted just now may have been alert before that
    }
  }
}

void Communicator::stop_background() {
  stop_ = true;
  members_.transport->wake();
  if (thread_.joinable()) thread_.join();
}

}  // namespace dcoll
