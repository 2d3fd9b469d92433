// What the calling thread has set of its floating-point unit, put aside while a kernel runs. Which rank, and which of
// its threads, reduces a slice is the engine's affair, and all ranks get the same bits: a program's
// torch.set_flush_denormal(True), which is a thread's own, must not decide them.
#pragma once

#include <cstdint>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace dcoll::kernels {

// Subnormal numbers are neither read nor written as zeros while this lives.
class KeepSubnormals {
 public:
  KeepSubnormals() : state_(get()) {
    if ((state_ & kFlush) != 0) [[unlikely]]
      set(state_ & ~kFlush);
  }
  ~KeepSubnormals() {
    if ((state_ & kFlush) != 0) [[unlikely]]
      set(state_);
  }
  KeepSubnormals(const KeepSubnormals&) = delete;
  KeepSubnormals& operator=(const KeepSubnormals&) = delete;

 private:
#if defined(__SSE2__)
  using State = unsigned;
  static constexpr State kFlush = 0x8040;  // MXCSR: FTZ and DAZ
  static State get() { return _mm_getcsr(); }
  static void set(State state) { _mm_setcsr(state); }
#elif defined(__aarch64__)
  using State = uint64_t;
  static constexpr State kFlush = uint64_t{1} << 24;  // FPCR: FZ
  static State get() {
    State state;
    asm volatile("mrs %0, fpcr" : "=r"(state));
    return state;
  }
  static void set(State state) { asm volatile("msr fpcr, %0" : : "r"(state)); }
#else
  using State = unsigned;
  static constexpr State kFlush = 0;
  static State get() { return 0; }
  static void set(State) {}
#endif
  const State state_;
};

}  // namespace dcoll::kernels
