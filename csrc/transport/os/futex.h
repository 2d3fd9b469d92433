// Sleeping on a 32-bit word that lies in memory shared between processes. The futexes are not FUTEX_PRIVATE: the
// sleeper and the one who wakes it may live in different address spaces.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>

namespace dcoll {

static_assert(std::atomic<uint32_t>::is_always_lock_free, "shared memory needs atomics without hidden locks");
static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t), "the kernel looks at the word itself");

// Sleeps while word == expected, at most `limit`. Returns early when woken, on a signal, or for no reason.
inline void futex_wait(std::atomic<uint32_t>& word, uint32_t expected, std::chrono::microseconds limit) {
  const auto us = limit.count();
  if (us <= 0) return;
  const timespec relative{static_cast<time_t>(us / 1'000'000), static_cast<long>(us % 1'000'000) * 1000};
  // EAGAIN (the word changed), EINTR and ETIMEDOUT all mean "look again", which the caller does in any case.
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, expected, &relative, nullptr, 0);
}

// The same, and futex_wake_waiters() does not end it.
inline void futex_doze(std::atomic<uint32_t>& word, uint32_t expected, std::chrono::microseconds limit) {
  constexpr uint32_t kDozers = 2;
  if (limit.count() <= 0) return;
  timespec until{};
  clock_gettime(CLOCK_MONOTONIC, &until);
  const auto ns = until.tv_nsec + limit.count() % 1'000'000 * 1000;
  until = {until.tv_sec + static_cast<time_t>(limit.count() / 1'000'000 + ns / 1'000'000'000), ns % 1'000'000'000};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_BITSET, expected, &until, nullptr, kDozers);
}

// Those of futex_wait(), which waits for every bit.
inline void futex_wake_waiters(std::atomic<uint32_t>& word) {
  constexpr uint32_t kWaiters = 1;
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_BITSET, INT_MAX, nullptr, nullptr, kWaiters);
}

inline void futex_wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace dcoll
