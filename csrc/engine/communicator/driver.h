// The background thread of a process: one for a communicator and all groups made of it, however many. It brings on what
// nobody waits for, communicator by communicator, and is woken as rarely as can be, for it shares its core with the
// thread that submits and computes.
//
//                 wanted, or a peer nudges, or kIdleSleep has passed            (Driven::take_turn)
//        not in turn  ------------------------------------------------>  in turn: looked at in every round
//                     <------------------------------------------------
//                    somebody waits there (and drives), or nothing is left to do
//
// A round draws a ticket, takes turns, looks at all that are in turn, and sleeps if nothing moved: as a wait() of one
// of them while any is in turn, else as a doze(), which only nudges and wake() end. Transports over mapped memory of
// one node have one doorbell, and whatever rings it ends the sleep. What one sleep cannot hear of (several message
// transports at once) is looked at again after a nap.
//
// Locks: round_ is held through a round, never while asleep; sleep_ guards what is slept on; thread_lock_ the thread
// itself. They are taken in the order thread_lock_, round_, a communicator's own (in Driven's functions), sleep_.
#pragma once

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "base/log.h"
#include "base/thread_safety.h"
#include "transport/transport.h"

namespace dcoll {

// What the driver sees of a communicator. Its functions are called by the driver's thread alone.
class Driven {
 public:
  // Between two looks of whoever drives it.
  static constexpr std::chrono::microseconds kLongestSleep = std::chrono::milliseconds(20);
  static constexpr std::chrono::microseconds kCopySleep{50};  // while a device copies: nobody wakes us for that

  virtual ~Driven() = default;
  virtual Transport& sleeps_on() = 0;
  // Whether it is this thread's turn to bring it on. in_turn: it was, in the last round. in_any_case: although nobody
  // asked for it.
  virtual bool take_turn(bool in_turn, bool in_any_case) = 0;
  // One look at all that is under way.
  struct Look {
    bool again = false;    // something moved, or this was the first look in vain
    bool copying = false;  // a device copies, which wakes nobody
    bool patient = false;  // nobody waits for what is under way
  };
  virtual Look look() = 0;
};

class Driver {
 public:
  // core: the thread is bound to it; < 0: it is not.
  Driver(int core, Log log) : core_(core), log_(std::move(log)) {}
  ~Driver() {
    const MutexLock lock(thread_lock_);
    stop();
  }
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  void attach(Driven& driven) DCOLL_EXCLUDES(thread_lock_, round_);
  // From then on nothing of it is touched. With the last one the thread ends. Not from the driver's thread.
  void detach(Driven& driven) DCOLL_EXCLUDES(thread_lock_, round_, sleep_);
  // Sees to it that there is a thread. False where the system gives none, which is said once; the next call tries
  // again.
  bool start() noexcept { return has_thread_.load(std::memory_order_acquire) || make_thread(); }
  // Somebody has asked for a turn.
  void wake() DCOLL_EXCLUDES(sleep_);

 private:
  struct Entry {
    Driven* driven;
    bool in_turn = false;
  };
  // What a round ends with.
  struct Rest {
    Driven* on = nullptr;  // null: nobody is there
    uint32_t ticket = 0;
    bool dozes = false;
    std::chrono::microseconds limit{0};  // 0: no rest
  };

  bool make_thread() noexcept;
  bool is_idle() DCOLL_EXCLUDES(round_);
  void stop() DCOLL_REQUIRES(thread_lock_) DCOLL_EXCLUDES(sleep_);
  void run();
  void bind() const;
  Rest round(bool in_any_case) DCOLL_EXCLUDES(round_, sleep_);
  Driven* place() const DCOLL_REQUIRES(round_);
  bool hears_of_all(Driven& place) const DCOLL_REQUIRES(round_);
  // Whether it rested for all of the limit.
  bool rest(const Rest& rest) DCOLL_EXCLUDES(sleep_);

  const int core_;
  const Log log_;

  Mutex thread_lock_;
  std::thread thread_ DCOLL_GUARDED_BY(thread_lock_);
  bool told_of_no_thread_ DCOLL_GUARDED_BY(thread_lock_) = false;
  std::atomic<bool> has_thread_{false};
  std::atomic<bool> stop_{false};

  Mutex round_;
  std::vector<Entry> entries_ DCOLL_GUARDED_BY(round_);
  std::chrono::microseconds nap_ DCOLL_GUARDED_BY(round_){0};

  Mutex sleep_;
  Condition woke_;                                // it no longer sleeps on sleeps_on_, or wanted_ was set
  bool wanted_ DCOLL_GUARDED_BY(sleep_) = false;  // since the last round began
  Driven* sleeps_on_ DCOLL_GUARDED_BY(sleep_) = nullptr;
};

}  // namespace dcoll
