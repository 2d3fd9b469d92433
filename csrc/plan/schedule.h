// Algorithms are data: a Schedule is one rank's program for one collective. It knows chunk indices, never pointers,
// byte counts or dtypes, so one Schedule serves every size and is proved once (verify.h), simulated, executed and
// cached.
//
// Vocabulary
//   chunk    the algorithm's unit. Input and output are each cut into chunks by a layout the engine owns; chunks may
//            have different lengths, zero included.
//   round    pipelining: chunk lengths are cut into slices of at most slice_elems; round t runs the whole schedule on
//            the t-th slice of every chunk. Hence one Step moves at most one slice = one message = one transport slot.
//            A slice of zero elements is not sent at all (both sides know it is empty).
//   range    a Step may name several consecutive chunks (Step::count): the slices of all of them travel as one message,
//            end to end, so that many small chunks cost one message. Ranges turn around: what follows the last chunk of
//            num_ranks ones is the first of them (range_chunk below). No range of a schedule is longer than
//            Schedule::longest_range, which is the same on all ranks: the engine cuts slices that much shorter, so that
//            the message still fits a slot.
//   channel  an independent sequence of steps. Steps of a channel run in order, round after round; channels of a rank
//            advance independently of each other (channel 1 may be rounds ahead of channel 0). A builder must order
//            conflicting accesses of two channels by messages; verify() checks that with vector clocks.
//   FIFO     a message sent by rank s to rank d is posted on a channel number c (the sender's Channel::send_on, usually
//            the channel's own number) and received by channel c of d; per (s, d, c) messages arrive in the order sent.
//            At most one channel of s posts to each (s, d, c).
//   scratch  one slice of memory per channel, owned by the engine (Channel::scratch): a register, not an array. Only
//            that channel touches it, it holds nothing when a round begins, and what is sent from it is copied into the
//            transport's memory (never pinned), so the channel may overwrite it at once. The chunk number beside
//            kScratch selects no memory: it says that the slice is as long as that input chunk's.
//   work     memory cut like the input, owned by the engine, for partial results that have no place in the output
//            (Schedule::work says whether it is needed). Ordinary memory: what is posted from it is pinned.
//
// Semantics of a step on slice x = (chunk, round). "in"/"out" are the rank's input and output buffer, which the engine
// may bind to the same memory (in place). `msg` is the received slice.
//   send              post src[x] to peer
//   recv              dst[x] = msg from peer
//   recv_send         dst[x] = msg from peer; then post dst[x] to `to`. With dst == none: forward without storing
//   recv_reduce       dst[x] = src[x] op msg from peer
//   recv_reduce_send  dst[x] = src[x] op msg from peer; then post the result to `to`. With dst == none the result is
//                     not stored locally, only sent
//                     Both compute msg op src[x] where `message_first` is set: two ranks that each compute a sum of
//                     the same operands then do it in the same order, to the last bit (of NaN, and of min(+0, -0),
//                     too).
//   copy              dst[x] = src[x]; nothing to do when both are the same memory (in place)
//   reduce            dst[x] = dst[x] op src[x]
// Length: all slices a step names are of one length, and so is its message. A recv_send that neither reads nor stores
// takes the length of output chunk `chunk`; a scratch slice that of the *input* chunk whose number it carries (see
// scratch). What is of zero elements, a slice or all slices of a range, is skipped by every step on both sides: no
// message, no copy, no wait. A fused step may wait until its message has arrived *and* there is room for what it sends
// (so that the result can be composed straight in the transport's memory); builders must not deadlock then, not even
// with one slot per FIFO.
//
// `finalize` on a reducing step: after it the chunk is fully reduced, so the engine applies the post-scale (average)
// there, once. Either one rank finalizes a chunk and the others get copies, or several compute the same expression: all
// ranks hold the same bits.
// A schedule for one rank (n == 1) is a copy of each chunk with `finalize` set (the engine scales there).
//
// Memory: a posted slice may be read by the peer until it consumed it (zero copy). So between a send from a chunk and
// the next local write to that slice there must be a chain of messages proving the peer consumed it. The chain may only
// use messages of the same slice: the others may be empty, and then they are never sent. verify() checks this.
#pragma once

#include <cstdint>
#include <vector>

namespace dcoll::plan {

enum class StepOp : uint8_t { kSend, kRecv, kRecvSend, kRecvReduce, kRecvReduceSend, kCopy, kReduce };
enum class BufferId : uint8_t { kNone, kInput, kOutput, kScratch, kWork };

struct Step {
  StepOp op;
  BufferId src = BufferId::kNone;
  BufferId dst = BufferId::kNone;
  bool finalize = false;
  uint16_t peer = 0;           // receives from it; for kSend, sends to it
  uint16_t to = 0;             // the fused kinds send to it
  uint32_t chunk = 0;          // index in dst (where there is one)
  uint32_t src_chunk = 0;      // index in src (where there is one); differs where input and output are cut differently
  uint16_t count = 1;          // a range of so many chunks, from `chunk` and `src_chunk` on
  bool message_first = false;  // of recv_reduce and recv_reduce_send: msg op src instead of src op msg

  bool operator==(const Step&) const = default;
};
static_assert(sizeof(Step) == 20);

// Transports carry this many channels (transport.h, kMaxChannels, says the same).
inline constexpr uint32_t kMaxScheduleChannels = 8;

struct Channel {
  static constexpr uint8_t kSame = 255;

  std::vector<Step> steps;
  bool scratch = false;     // some step uses BufferId::kScratch
  uint8_t send_on = kSame;  // the channel number its messages are posted on, e.g. where a tree's root turns from the up
                            // lane to the down lane; kSame: its own
};

struct Schedule {
  uint32_t rank = 0;
  uint32_t num_ranks = 1;
  uint32_t input_chunks = 1;   // how many chunks the input is cut into
  uint32_t output_chunks = 1;  // and the output
  uint32_t longest_range = 1;  // at least every Step::count, of every rank
  bool work = false;           // some step of this rank uses BufferId::kWork
  std::vector<Channel> channels{};
};

inline bool receives(StepOp op) {
  return op == StepOp::kRecv || op == StepOp::kRecvSend || op == StepOp::kRecvReduce || op == StepOp::kRecvReduceSend;
}
inline bool sends(StepOp op) { return op == StepOp::kSend || op == StepOp::kRecvSend || op == StepOp::kRecvReduceSend; }
inline bool reduces(StepOp op) {
  return op == StepOp::kRecvReduce || op == StepOp::kRecvReduceSend || op == StepOp::kReduce;
}
// Chunk number `part` of a range that begins at `chunk`: chunks are counted in circles of one per rank.
inline uint32_t range_chunk(uint32_t num_ranks, uint32_t chunk, uint32_t part) {
  const uint32_t place = chunk % num_ranks;
  return chunk - place + (place + part) % num_ranks;
}
// The channel number that messages of channel `index` are posted on (receives are always on the channel's own number).
inline uint32_t send_channel(const Channel& channel, uint32_t index) {
  return channel.send_on == Channel::kSame ? index : channel.send_on;
}
// The rank a step posts its message to; only meaningful where sends(op).
inline uint16_t destination(const Step& step) { return step.op == StepOp::kSend ? step.peer : step.to; }

}  // namespace dcoll::plan
