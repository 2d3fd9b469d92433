// Who drives a communicator, and when. Whoever waits does: a thread inside wait() polls the operations itself (spinning
// while its core is its own, yielding it between looks while other ranks need it), and the background thread
// (driver.h) stands back; while nobody waits, that one drives and sleeps on a futex whenever there is nothing to do, so
// that it takes no time from the thread that computes. It is woken as rarely as can be: waking it and being interrupted
// by it costs the thread that computes 40 us and more, which most asynchronous operations are finished in.
//
// So a small operation is entered by the thread that submits it: its peers need nothing more of this rank for now, and
// what is left to do comes with what they do. If the caller waits meanwhile, as it mostly does, it drives. If not, the
// operation lies there until somebody needs it: a peer that waits in vain wakes the background thread
// (Transport::nudge). What peers do wakes nobody, for a caller that is about to wait would be interrupted by it.
#pragma once

#include <sched.h>

#include <atomic>

#include "base/clock.h"
#include "engine/communicator/driver.h"
#include "engine/communicator/progress.h"
#include "engine/communicator/watchdog.h"

namespace dcoll {

// How a thread that drives waits: kBriefly is for one that is on the core of another thread, which computes.
enum class Spin { kAllowed, kBriefly };

class Turns final : public Driven {
 public:
  Turns(const Setup& setup, Progress& progress, Watchdog& watchdog);

  // ---- For the thread of the process's Driver ----
  Transport& sleeps_on() override { return setup_.transport(); }
  bool take_turn(bool in_turn, bool in_any_case) override;
  Look look() override;

  // ---- For a thread of the program ----
  // Drives until it is done or so many seconds have passed; < 0: no limit. Whether it is done.
  bool wait_for(const Operation& operation, double timeout_s, Spin spin);
  // Whether it is done. Asking again and again brings it on, if nobody else does.
  bool poll(const Operation& operation);
  // Begins what is pending on this thread, and leaves the rest to the driver, unless somebody waits.
  void begin_here();
  // Whether the background thread goes on at once, or when a peer waits for it.
  enum class Wake { kNow, kByPeers };
  // Without a thread, waits and poll() bring on everything.
  void hand_over(Wake wake);

  // ---- For a thread that does things on the spot, with the drive lock held ----
  bool spins() const { return spin_s_ > 0; }
  // The driver is to sleep through what is done now.
  void go_first() {
    if (!alert_.load(std::memory_order_relaxed)) return;
    if (progress_.is_pending() || progress_.has_messages()) {
      drivers_turn_.store(false);  // peers may wake it, for what is pending
    } else {
      stand_back();
    }
  }
  // Looks again and again, not for longer than a collective takes and some 10 us of waiting for a peer. True once
  // `poll` is.
  template <typename Poll>
  bool look_briefly(Poll&& poll) const {
    for (int in_vain = 0; in_vain < polls_on_the_spot();) {
      bool moved = false;
      if (poll(moved)) return true;
      if (moved) {
        in_vain = 0;
      } else {
        ++in_vain;
        pause_between_looks();
      }
    }
    return false;
  }

 private:
  // One look, unless somebody else has the lock: false then.
  bool try_step(bool& moved);
  void stand_back();
  void set_alert(bool on);
  void drive(const std::atomic<bool>& done, Spin spin, Clock::time_point deadline);
  double longest_spin_s(Spin spin) const;
  // How often a synchronous call looks for its peers in vain before the ordinary way. A yield runs whoever else is on
  // the core.
  int polls_on_the_spot() const { return setup_.members.own_core ? 1000 : 64; }
  // To the hardware thread beside us, or to the ranks that need this core.
  void pause_between_looks() const {
    if (setup_.members.own_core) {
      cpu_relax();
    } else {
      sched_yield();
    }
  }

  const Setup& setup_;
  Progress& progress_;
  Watchdog& watchdog_;
  const double spin_s_;
  // Peers that wait in vain wake the driver: something is pending and nobody waits. See hand_over().
  std::atomic<bool> alert_{false};
  Mutex alert_mutex_;                    // held while alert_ and the transport's change together
  std::atomic<bool> peers_wake_{false};  // as alert() said
  std::atomic<bool> turn_wanted_{false};
  // The driver's, from when it takes it until somebody waits. Otherwise a driver woken in the middle of things would
  // take the next operation from the thread that is about to wait for it, and sleep on it, again and again.
  std::atomic<bool> drivers_turn_{false};
  bool driver_is_idle_ = false;  // its last look of this turn was in vain; the driver's own
};

}  // namespace dcoll
