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
#include "transport/os/fd.h"

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

// The numbers of the epoll descriptors that this process has open.
std::vector<int> epoll_descriptors();
// After MPI_Init_thread: of those open now, the ones that were not open `before` it are MPI's. For the whole process.
void note_mpi_descriptors(const std::vector<int>& before);

class MpiEvents {
 public:
  // MPI's descriptors, as noted; or, where the program initialised MPI itself, all that are open now: then some may be
  // other libraries'.
  MpiEvents();
  MpiEvents(const std::vector<int>& epolls, bool certainly_of_mpi);

  // Until MPI has news, wake() was called, `bell` was rung (-1: there is none) or `limit` has passed. Any thread.
  // A descriptor that has news at a thousand waits in a row brings none: it is not looked at until it was quiet once.
  Ended wait(std::chrono::microseconds limit, int bell = -1) const;
  void wake() const { ring_bell(wake_.get()); }
  // Whether there is anything to wait on.
  bool any() const { return count_ > 0; }
  // Whether some descriptor is not looked at now, so that a wait may miss news.
  bool deaf() const { return deaf_.load(std::memory_order_relaxed); }
  // The descriptors that MPI's are watching at this moment: its sockets, among others. None where it is not certain
  // that they are MPI's.
  std::vector<int> watched() const;

 private:
  static constexpr size_t kMostDescriptors = 16;
  static constexpr int kMostInARow = 1000;
  struct Epoll {
    Fd descriptor;  // a duplicate: the number of the original may be closed and mean something else
    // Waits in a row that it ended; as many as a wait can count: it reported an error. Hints: relaxed.
    mutable std::atomic<int> in_a_row{0};
  };
  bool worth_a_look(const Epoll& epoll) const;

  const Fd wake_ = make_bell();
  bool certain_ = true;
  std::array<Epoll, kMostDescriptors> epolls_;
  size_t count_ = 0;  // fixed once constructed, so that threads may share them
  mutable std::atomic<bool> deaf_{false};
};

}  // namespace dcoll
