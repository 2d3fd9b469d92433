// Sleeping until MPI has something to do, though MPI offers no call for it. An MPI that talks over sockets watches them
// with an epoll descriptor of its own, and a descriptor that is watched can itself be waited on: poll() on it returns
// when a socket has news, without taking the news away from MPI. So a waiting rank leaves its core to the rank it waits
// for and is back as fast as the kernel can wake it.
//
// This rests on no promise of any MPI: where there is no such descriptor, or where messages come another way (shared
// memory, RDMA), the wait ends after a short time anyway. EventTrust learns which of the two it is.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <vector>

#include "transport/bell.h"

namespace dcoll {

// What ended a wait: MPI's descriptors, somebody who woke it, or the limit.
enum class Ended { kNews, kWoken, kTooLong };

// Whether news is announced by the descriptors. Believed until a message is found that nobody announced, or
// announcements go on and on without a message; believed again after some announced messages.
class EventTrust {
 public:
  void waited(Ended how) {
    last_.store(how, std::memory_order_relaxed);
    if (how == Ended::kNews) futile_.fetch_add(1, std::memory_order_relaxed);
  }
  void message_found() {
    futile_.store(0, std::memory_order_relaxed);
    // After a wait that was woken a message tells nothing: it may have come at any moment since. So do those that are
    // found together with one that was not announced.
    Ended unannounced = Ended::kTooLong;
    if (last_.compare_exchange_strong(unannounced, Ended::kWoken, std::memory_order_relaxed)) {
      trust_.store(0, std::memory_order_relaxed);
    } else if (const int trust = trust_.load(std::memory_order_relaxed);
               trust < kEnough && last_.load(std::memory_order_relaxed) == Ended::kNews) {
      trust_.store(trust + 1, std::memory_order_relaxed);
    }
  }
  bool earned() const {
    return trust_.load(std::memory_order_relaxed) >= kEnough && futile_.load(std::memory_order_relaxed) < kMostFutile;
  }

 private:
  static constexpr int kEnough = 4;
  static constexpr int kMostFutile = 1000;  // a long message is announced many times before it is whole

  // Hints, read and written by whoever waits and whoever polls: relaxed, an old value costs one nap.
  std::atomic<int> trust_{kEnough};
  std::atomic<int> futile_{0};
  std::atomic<Ended> last_{Ended::kWoken};
};

class MpiEvents {
 public:
  // Once MPI is initialised: finds its descriptors among those this process has open.
  MpiEvents();

  // Until MPI has news, wake() was called, `bell` was rung (-1: there is none) or `limit` has passed. Any thread.
  Ended wait(std::chrono::microseconds limit, int bell = -1) const;
  void wake() const { ring_bell(wake_.get()); }
  // Whether there is anything to wait on.
  bool any() const { return count_ > 0; }
  // The descriptors that MPI's are watching at this moment: its sockets, among others.
  std::vector<int> watched() const;

 private:
  static constexpr size_t kMostDescriptors = 16;
  const Fd wake_ = make_bell();
  std::array<int, kMostDescriptors> descriptors_{};  // MPI's
  size_t count_ = 0;                                 // fixed once constructed, so that threads may share them
};

}  // namespace dcoll
