// Whether an all-reduce is faster with encoded messages (engine/schedule/encoded_all_reduce.h) than without.
#pragma once

#include <cstdint>

#include "plan/cost.h"
#include "plan/topology.h"

namespace dcoll::plan {

// What a codec makes of float32, and what one core takes for a byte of that. Of decoding: of one rank's message.
struct Coding {
  double share = 1;       // of the bytes are left
  bool gathered = false;  // everybody gets everybody's message; else parts go to their owners and sums to everybody
  double encode_us_per_byte = 0, decode_us_per_byte = 0;
};

struct EncodedTimes {
  double plain_us = 0, encoded_us = 0;

  // What the model promises must be worth the loss: it is no more exact than this.
  bool pays() const { return encoded_us < 0.95 * plain_us; }
  // So close, for so many bytes, that the model is not believed: by such factors it was wrong between hosts that are
  // pretended on one machine, whose links are copies by the cores that encode (docs/compression.md).
  bool is_close(uint64_t bytes) const {
    const double factor = bytes <= (4 << 20) ? 2.0 : 1.6;
    return encoded_us < factor * plain_us && plain_us < factor * encoded_us;
  }
};

// A pure function, as select() is. two_levels: nodes add up in shared memory, and their ranks share what lies between
// them. Coding and messages are taken to follow each other: that is within 6 % of what 4 hosts of bench/netlab take at
// 1 Gbit/s (docs/compression.md).
EncodedTimes predict_encoded(uint64_t bytes, const Coding& coding, const Topology& topology, uint64_t slice_bytes,
                             bool two_levels);

// Whether selections of so many bytes in all, one of each node, go by owners who select again (kernels/topk_owners.h):
// where that is predicted to take half the time of sending everybody's to everybody at the most, because fewer arrive.
bool owners_pay(uint64_t bytes, const Topology& topology, uint64_t slice_bytes, bool two_levels);

}  // namespace dcoll::plan
