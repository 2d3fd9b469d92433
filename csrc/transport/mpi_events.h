// Sleeping until MPI has something to do, though MPI offers no call for it. An MPI that talks over sockets watches them
// with an epoll descriptor of its own, and a descriptor that is watched can itself be waited on: poll() on it returns
// when a socket has news, without taking the news away from MPI. So a waiting rank leaves its core to the rank it waits
// for and is back as fast as the kernel can wake it.
//
// This rests on no promise of any MPI: where there is no such descriptor, or where messages come another way (shared
// memory, RDMA), the wait ends after a short time anyway. EventTrust learns which of the two it is.
#pragma once

#include <poll.h>

#include <array>
#include <atomic>
#include <chrono>
#include <vector>

namespace dcoll {

// Whether news is announced by the descriptors. Believed until a message is found that nobody announced, or
// announcements go on and on without a message; believed again after some announced messages.
class EventTrust {
 public:
  void waited(bool announced) {
    announced_.store(announced, std::memory_order_relaxed);
    if (announced) futile_.fetch_add(1, std::memory_order_relaxed);
  }
  void message_found() {
    futile_.store(0, std::memory_order_relaxed);
    // What is found until the next wait came with this one.
    if (!announced_.exchange(true, std::memory_order_relaxed)) {
      trust_.store(0, std::memory_order_relaxed);
    } else if (const int trust = trust_.load(std::memory_order_relaxed); trust < kEnough) {
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
  std::atomic<bool> announced_{true};
};

class MpiEvents {
 public:
  // Once MPI is initialised: finds its descriptors among those this process has open.
  MpiEvents();
  ~MpiEvents();
  MpiEvents(const MpiEvents&) = delete;
  MpiEvents& operator=(const MpiEvents&) = delete;

  // Until MPI has news, wake() was called, or `limit` has passed. True for news. Any thread.
  bool wait(std::chrono::microseconds limit) const;
  void wake() const;
  // Whether there is anything to wait on.
  bool any() const { return count_ > 1; }
  // The descriptors that MPI's are watching at this moment: its sockets, among others.
  std::vector<int> watched() const;

 private:
  static constexpr size_t kMostDescriptors = 16;
  std::array<pollfd, kMostDescriptors> descriptors_{};  // an eventfd to wake with, then MPI's
  size_t count_ = 0;                                    // fixed once constructed, so that threads may share them
};

}  // namespace dcoll
