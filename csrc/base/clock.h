// Monotonic time, in the units the code uses.
#pragma once

#include <chrono>

namespace dcoll {

using Clock = std::chrono::steady_clock;

inline double seconds_between(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

inline Clock::duration duration_of(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

// Whoever waits looks for its peers at least this often. A process that has not looked for longer did not run: it was
// stopped, its container frozen, its machine suspended, and as a rule its peers with it. No deadline counts the rest of
// that time.
inline constexpr std::chrono::seconds kMostBetweenLooks{1};

// A hint that this hardware thread is spinning.
inline void cpu_relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

}  // namespace dcoll
