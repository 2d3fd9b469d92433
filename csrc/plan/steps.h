// The verbs the builders are written in: one function per StepOp, so that a builder reads like its description.
//   recv_reduce(out(3), in(3), prev)   is   out[3] = in[3] op message from prev
#pragma once

#include <cstdint>
#include <string>

#include "base/error.h"
#include "plan/schedule.h"

namespace dcoll::plan::steps {

struct Place {
  BufferId buffer;
  uint32_t chunk;
};
inline Place in(uint32_t chunk) { return {BufferId::kInput, chunk}; }
inline Place out(uint32_t chunk) { return {BufferId::kOutput, chunk}; }
inline Place scratch(uint32_t chunk) { return {BufferId::kScratch, chunk}; }  // the register, as long as in(chunk)
inline Place work(uint32_t chunk) { return {BufferId::kWork, chunk}; }
inline Place nowhere(uint32_t chunk) { return {BufferId::kNone, chunk}; }

// Messages of the schedule are few and steps many: a plain aggregate, filled in by name.
inline Step make_step(StepOp op, Place dst, Place src, uint32_t peer, uint32_t to, bool finalize) {
  return {.op = op,
          .src = src.buffer,
          .dst = dst.buffer,
          .finalize = finalize,
          .peer = static_cast<uint16_t>(peer),
          .to = static_cast<uint16_t>(to),
          .chunk = dst.chunk,
          .src_chunk = src.chunk};
}

inline Step send(Place src, uint32_t to) { return make_step(StepOp::kSend, nowhere(src.chunk), src, to, 0, false); }
inline Step recv(Place dst, uint32_t from) { return make_step(StepOp::kRecv, dst, nowhere(dst.chunk), from, 0, false); }
inline Step recv_send(Place dst, uint32_t from, uint32_t to) {
  return make_step(StepOp::kRecvSend, dst, nowhere(dst.chunk), from, to, false);
}
inline Step recv_reduce(Place dst, Place src, uint32_t from, bool finalize = false) {
  return make_step(StepOp::kRecvReduce, dst, src, from, 0, finalize);
}
inline Step recv_reduce_send(Place dst, Place src, uint32_t from, uint32_t to, bool finalize = false) {
  return make_step(StepOp::kRecvReduceSend, dst, src, from, to, finalize);
}
inline Step copy(Place dst, Place src, bool finalize = false) {
  return make_step(StepOp::kCopy, dst, src, 0, 0, finalize);
}
inline Step reduce(Place dst, Place src, bool finalize = false) {
  return make_step(StepOp::kReduce, dst, src, 0, 0, finalize);
}

// The same step on `count` consecutive chunks, as one message.
inline Step range(Step step, uint32_t count) {
  step.count = static_cast<uint16_t>(count);
  return step;
}
// The same reduction with its operands in the other order.
inline Step message_first(Step step) {
  step.message_first = true;
  return step;
}

// The head every builder starts from; checks what all of them require.
inline Schedule make_schedule(uint32_t n, uint32_t rank, uint32_t input_chunks, uint32_t output_chunks,
                              uint32_t num_channels) {
  if (n == 0 || n > 65535) {
    throw ArgumentError("a schedule is for 1 to 65535 ranks, got " + std::to_string(n));
  }
  if (rank >= n) {
    throw ArgumentError("rank " + std::to_string(rank) + " does not exist: there are " + std::to_string(n) +
                        " ranks, numbered from 0");
  }
  if (num_channels == 0 || num_channels > kMaxScheduleChannels) {
    throw ArgumentError("a schedule has 1 to " + std::to_string(kMaxScheduleChannels) + " channels, got " +
                        std::to_string(num_channels));
  }
  Schedule schedule{.rank = rank, .num_ranks = n, .input_chunks = input_chunks, .output_chunks = output_chunks};
  schedule.channels.resize(num_channels);
  return schedule;
}

inline Schedule make_broadcast(uint32_t n, uint32_t rank, uint32_t root) {
  Schedule schedule = make_schedule(n, rank, 1, 1, 1);
  if (root < n) return schedule;
  throw ArgumentError("root " + std::to_string(root) + " does not exist: there are " + std::to_string(n) +
                      " ranks, numbered from 0");
}

}  // namespace dcoll::plan::steps
