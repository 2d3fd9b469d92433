// How ranks get back into step after one of them skipped a call that the others made.
//
// Calls without a name meet by their order. A rank whose call was refused before it reached the others (a wrong
// argument), or that skipped one after an exception of its own, is ahead of the others from then on, and every later
// handshake would fail. Two things are known once one has failed, because the ranks then show each other what they
// called (mismatch.h), and with it:
//
// - What a rank refused since its last call. Ranks that refused fewer calls than others fail, with the words of those
//   that refused; the others try again what they asked for, with the next call of those that failed.
// - What a rank called since the ranks last agreed, in vain. Who now calls what another rank had called before is
//   behind that one: it fails, and the other one tries again. So a skipped call is made up for at the second mismatch.
//
// All ranks come to the same verdict from the same words. While ranks agree nothing is kept, compared or sent.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <vector>

namespace dcoll {

// What a rank brings to the verdict. A value of fixed size: it travels.
struct Standing {
  static constexpr size_t kMostFailed = 32;
  uint64_t call = 0;     // the fingerprint of what it calls
  uint32_t refused = 0;  // how many calls it refused before this one
  uint32_t num_failed = 0;
  std::array<uint64_t, kMostFailed> failed = {};  // what it called in vain since the ranks last agreed
  bool gives_way = false;                         // it asks for nothing but that the others fail: Communicator::refuse
  bool joined = false;                            // it has no part in this

  bool had_called(uint64_t other) const;
};

enum class Verdict {
  kFails,     // with a MismatchError
  kTryAgain,  // the same call, with the next one of those that fail
  kGivesWay,  // done
};
std::vector<Verdict> line_up(std::span<const Standing> ranks);

// What one rank remembers of its sequence of calls, by the numbers of its operations.
class OutOfStep {
 public:
  // The call that would have become operation `number`.
  void refuse(uint64_t number, std::string why);
  Standing standing(uint64_t number, uint64_t call);
  // Why the first of the calls was refused that the standing counts. Empty: none was.
  std::string reason() const { return refused_.empty() ? std::string() : refused_.front().why; }
  // The same, for operation `number`.
  std::string reason_of(uint64_t number) const;

  // After the verdict on operation `number`, which asked for `call`. Whether the operation counts, as it does where
  // all ranks have made one.
  bool settle(uint64_t number, std::span<const Standing> ranks, std::span<const Verdict> verdicts, size_t self);

 private:
  struct Refusal {
    uint64_t number;
    std::string why;
  };
  std::deque<Refusal> refused_;
  std::deque<uint64_t> failed_;
  uint64_t failed_at_ = 0;  // the number of the last one
};

}  // namespace dcoll
