// An all-reduce of float32 whose messages are encoded (kernels/codec.h). Every rank owns a part of the buffer:
//
//   1. each encodes its operand, part by part, and sends each part to its owner (an all-to-all);
//   2. the owner decodes what came, adds it up in float32, in the order of ranks, and encodes the sum;
//   3. the encoded sums go to everybody (an all-gather), and everybody decodes the same bytes.
//
// So an element is rounded twice however many ranks there are, and all ranks get the same bits. 2(p-1)/p times the
// encoded buffer leaves each of p ranks, as in a ring, which would have to round at each hop.
//
// Of top-k (kernels/topk.h) everybody's selection goes to everybody, in one all-gather of messages of equal length, and
// everybody adds them up, in the order of ranks. Where that is more than the buffer itself is, the selections travel
// as a buffer of zeros and them, in the three steps above with Codec::kFloat32: the same sums.
//
// Among many ranks selections go by owners instead (kernels/topk_owners.h): each rank cuts its selection by owner,
// tells every owner how many elements come and sends them; an owner adds up, passes the greatest k/p of its sums on to
// everybody, and keeps the others as its own error, which it adds to what it encodes next. So nothing is lost, and
// about 2k elements leave each rank, not (p-1)k; but k arrive, not up to pk.
#pragma once

#include <cstddef>
#include <memory>

#include "engine/core/encoded_cost.h"
#include "engine/core/task.h"
#include "plan/schedule.h"
#include "transport/group_transport.h"

namespace dcoll {

struct EncodedJob {
  Coded coded;
  const float* operand;  // may be `data`
  float* data;           // the result
  size_t count;
  double scale;                                        // of the sum, before it is encoded
  std::shared_ptr<const plan::Schedule> to_owners;     // an all-to-all
  std::shared_ptr<const plan::Schedule> to_everybody;  // an all-gather
  size_t slice_bytes;
  size_t lanes = 1;  // of the messages; the channels of a schedule times this are the transport's
};

// The transport must live as long as the task, the data as in any all-reduce.
Task encoded_all_reduce(GroupTransport& transport, EncodedJob job);

}  // namespace dcoll
