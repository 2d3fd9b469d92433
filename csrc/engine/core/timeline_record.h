// What the timeline keeps of an operation: when it entered each phase, and what it was.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string_view>

#include "base/clock.h"
#include "base/types.h"

namespace dcoll {

enum class Kind : uint8_t;

enum class Phase : uint8_t {
  kQueue,  // submitted; operations before it are not done
  kAgree,  // shows the others what it called, and waits until all of them did
  kPack,   // copies or scales the operand to where it is read from
  kMove,   // the algorithm
};

inline int64_t ns_of(Clock::time_point time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}
inline int64_t now_ns() { return ns_of(Clock::now()); }

// The phases an operation has entered so far; each ends where the next begins. Belongs to whoever runs the operation.
struct Phases {
  static constexpr int kMost = 8;
  static constexpr size_t kAlgorithmBytes = 24;

  bool on = false;  // whether anything is noted: the timeline was on when the operation was submitted
  uint8_t count = 0;
  uint64_t number = 0;      // of the operation in its communicator
  Phase phase[kMost];       // the first `count`
  int64_t begin_ns[kMost];  // the first `count`
  char algorithm[kAlgorithmBytes];

  explicit Phases(bool is_on) : on(is_on) { algorithm[0] = '\0'; }
  void enter(Phase entered) {
    if (on) [[unlikely]]
      enter_at(entered, now_ns());
  }
  // `at` is not before the phase before it.
  void enter_at(Phase entered, int64_t at) {
    if (!on || count == kMost) return;
    begin_ns[count] = count > 0 ? std::max(at, begin_ns[count - 1]) : at;
    phase[count++] = entered;
  }
  void name_algorithm(std::string_view name) {
    if (on) algorithm[name.copy(algorithm, kAlgorithmBytes - 1)] = '\0';
  }
};

struct TimelineRecord {
  static constexpr size_t kNameBytes = 96;
  enum class What : uint8_t { kOperation, kSpan, kMark };

  What what = What::kOperation;
  Kind kind{};
  DType dtype{};
  ReduceOp op{};
  bool failed = false;
  int communicator = 0;
  uint64_t bytes = 0;
  int64_t end_ns = 0;
  Phases phases{true};
  char name[kNameBytes];   // of the operation or span; cut off
  char track[kNameBytes];  // of a span
};

}  // namespace dcoll
