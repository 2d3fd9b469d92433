#include "engine/communicator/turns.h"

#include <algorithm>

#include "engine/communicator/cores.h"

namespace dcoll {
namespace {

constexpr double kWatchSeconds = 0.02;  // between two looks at deadlines and peers, while a wait does not sleep yet

// How long a wait looks again and again before it sleeps. On a shared core it yields between looks: where ranks
// outnumber cores, a yield hands the core to a rank that is awake and costs one context switch, while sleeping costs
// two, a system call of the waker and, on a core gone idle, an interrupt (measured on 2 cores: a barrier of 4 takes 4
// us by yielding, 25 to 40 us by sleeping). But yielding keeps a core looking busy, so a rank that computes longer than
// this gets all of the core.
constexpr double kSpinUs = 2000;
constexpr double kYieldUs = 1000;
// Where looking takes the core from somebody who needs it: from the kernel that brings the message
// (Transport::sleeps_well), from another thread of this rank (Spin::kBriefly), from another program (Interruptions).
constexpr double kBriefSpinS = 50e-6;

// A rank that waits for so long wakes those peers that have left things to their background threads, and again whenever
// it has waited twice as long as then. They may just be about to wait themselves, which is cheaper than being woken.
constexpr double kNudgeSeconds = 30e-6;

double spin_seconds(const Setup& setup, bool has_levels) {
  if (setup.settings.spin_us >= 0) return static_cast<double>(setup.settings.spin_us) * 1e-6;
  if (setup.members.own_core) return kSpinUs * 1e-6;
  // On shared cores a rank of two levels that waits sleeps at once, not for long (router.cc). It is woken on a core
  // that is free; ranks that yield make a core look as busy as one full of ranks that work, and those are not moved to
  // it.
  return has_levels ? 0 : kYieldUs * 1e-6;
}

}  // namespace

Turns::Turns(const Setup& setup, Progress& progress, Watchdog& watchdog)
    : setup_(setup),
      progress_(progress),
      watchdog_(watchdog),
      spin_s_(spin_seconds(setup, progress.as_made().hierarchy != nullptr)) {}

// ---- Waiting ----

bool Turns::wait_for(const Operation& operation, double timeout_s, Spin spin) {
  struct Waiter {  // tells the background thread to stand back, and gives it its work back
    // It is not woken for that: should it be asleep in the middle of an operation, it sees it when that moves.
    explicit Waiter(Turns& turns) : all(turns) {
      all.progress_.waiters.fetch_add(1);
      all.stand_back();
    }
    ~Waiter() {
      if (all.progress_.waiters.fetch_sub(1) == 1 && all.progress_.has_work()) all.begin_here();
    }
    Turns& all;
  } waiter(*this);
  const auto deadline = timeout_s < 0 ? Clock::time_point::max() : Clock::now() + duration_of(timeout_s);
  drive(operation.done, spin, deadline);
  return operation.done.load(std::memory_order_acquire);
}

double Turns::longest_spin_s(Spin spin) const {
  const bool brief = spin == Spin::kBriefly || (setup_.settings.spin_us < 0 && setup_.transport().sleeps_well());
  return brief ? std::min(spin_s_, kBriefSpinS) : spin_s_;
}

// Polls until `done` is set or the deadline passes; sleeps when spinning brought nothing.
void Turns::drive(const std::atomic<bool>& done, Spin spin, Clock::time_point deadline) {
  double spin_s = longest_spin_s(spin);
  Clock::time_point idle_since = Clock::now();  // while it is not idle: when the clock was read last
  double next_nudge_s = 0, next_watch_s = 0;
  bool idle = false;
  while (!done.load(std::memory_order_acquire)) {
    const auto now = idle ? Clock::now() : idle_since;
    if (idle && now >= deadline) return;
    const double idle_s = idle ? seconds_between(idle_since, now) : 0;
    // Ranks that share a core yield it between looks, which counts as an interruption and takes nothing from anybody.
    if (idle_s >= kBriefSpinS && idle_s < spin_s && setup_.settings.spin_us < 0 && setup_.members.own_core &&
        Interruptions::are_frequent(now)) {
      spin_s = kBriefSpinS;
    }
    const bool sleepy = idle && idle_s >= spin_s;
    const bool watches = sleepy || idle_s >= next_watch_s;  // however long it looks before it sleeps
    if (idle && (sleepy || idle_s >= next_nudge_s)) {
      setup_.transport().nudge();
      next_nudge_s = 2 * idle_s;
    }
    // The ticket is drawn before the last look, so whatever happens after that look ends the sleep at once.
    const uint32_t ticket = sleepy ? setup_.transport().prepare_wait() : 0;
    bool moved = false, copying = false;
    {
      const MutexLock lock(progress_.drive_mutex);
      progress_.step(moved);
      watchdog_.looked(now);
      copying = sleepy && progress_.under_way.awaits_copies();
      if (idle && watches && !moved) {
        watchdog_.watch(now);
        next_watch_s = idle_s + kWatchSeconds;
      }
    }
    if (moved || done.load(std::memory_order_acquire)) {
      idle = false;
      idle_since = now;
      continue;
    }
    if (!idle) {
      idle = true;
      idle_since = Clock::now();
      next_nudge_s = kNudgeSeconds;
      next_watch_s = kWatchSeconds;
    }
    if (!sleepy) {
      pause_between_looks();
      continue;
    }
    const auto limit = std::min<Clock::duration>(copying ? kCopySleep : kLongestSleep, deadline - now);
    setup_.transport().wait(
        ticket, std::chrono::duration_cast<std::chrono::microseconds>(limit) + std::chrono::microseconds(1));
  }
}

// ---- The background thread, and what is left to it ----

bool Turns::try_step(bool& moved) {
  if (!progress_.drive_mutex.try_lock()) return false;
  progress_.step(moved);
  progress_.drive_mutex.unlock();
  return true;
}

void Turns::begin_here() {
  bool moved = false;
  if (!try_step(moved)) return hand_over(Wake::kNow);  // whoever drives may not have seen it
  if (!progress_.has_work() || progress_.waiters.load() > 0) return;
  hand_over(Wake::kByPeers);
}

void Turns::hand_over(Wake wake) {
  bool moved = false;
  if (!setup_.members.driver->start() && wake == Wake::kNow) try_step(moved);  // nobody else begins it
  set_alert(true);
  if (wake == Wake::kByPeers && peers_wake_) return;
  turn_wanted_.store(true);
  setup_.members.driver->wake();
  if (progress_.waiters.load() > 0) setup_.transport().wake();  // who drives now
}

bool Turns::poll(const Operation& operation) {
  bool moved = false;
  if (!alert_.load() || progress_.waiters.load() > 0 || !try_step(moved)) return false;
  if (operation.done.load(std::memory_order_acquire)) return true;
  if (!moved) setup_.transport().nudge();
  return false;
}

// Somebody else drives from now on.
void Turns::stand_back() {
  drivers_turn_.store(false);
  set_alert(false);
}

void Turns::set_alert(bool on) {
  if (alert_.load() == on) return;
  const MutexLock lock(alert_mutex_);
  if (alert_.load() == on) return;
  peers_wake_ = setup_.transport().alert(on);
  alert_.store(on);
}

bool Turns::take_turn(bool in_turn, bool in_any_case) {
  const bool wanted = turn_wanted_.load(std::memory_order_relaxed) && turn_wanted_.exchange(false);
  const bool nudged = setup_.transport().take_nudge();
  if (in_turn && drivers_turn_.load() && progress_.waiters.load() == 0 && progress_.has_work()) {
    if (!progress_.only_leaves.load() || progress_.has_messages()) return true;
    set_alert(true);
    if (!peers_wake_) return true;
    drivers_turn_.store(false);  // looked at when a peer asks, and now and then
  }
  if (!wanted && !nudged && !in_any_case) return false;
  if (!progress_.has_work()) {
    stand_back();                                         // nothing to be nudged for
    if (progress_.has_work()) hand_over(Wake::kByPeers);  // whoever submitted just now may have been alert before that
    return false;
  }
  if (progress_.waiters.load() > 0) return false;
  stand_back();
  drivers_turn_.store(true);
  driver_is_idle_ = false;
  return true;
}

Driven::Look Turns::look() {
  const bool patient = progress_.only_leaves.load() && !progress_.has_messages();
  if (driver_is_idle_ && !patient) setup_.transport().nudge();
  const bool was_idle = driver_is_idle_;
  bool moved = false, copying = false;
  const auto now = Clock::now();
  {
    const MutexLock lock(progress_.drive_mutex);
    progress_.step(moved);
    watchdog_.looked(now);
    copying = was_idle && progress_.under_way.awaits_copies();
    if (was_idle && !moved) watchdog_.watch(now);
  }
  driver_is_idle_ = !moved;
  return {.again = moved || !was_idle, .copying = copying, .patient = patient};
}

}  // namespace dcoll
