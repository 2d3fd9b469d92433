// Runs one rank's Schedule over a transport: each channel is a cursor (round, step) that moves on whenever the message
// it waits for has arrived and the slot it sends through is free. Nothing here knows which algorithm it runs.
//
// Lanes: with L lanes every channel of the schedule is run by L cursors, of which the i-th runs rounds i, i + L, ... on
// transport channels of its own. So L slices are under way where one would wait for its answer. What is proved of the
// schedule (plan/verify.h) holds for each lane: it is the schedule run for some of the rounds, with FIFOs and scratch
// of its own; and lanes share no memory, because slices of different rounds are different memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/types.h"
#include "engine/core/layout.h"
#include "engine/core/task.h"
#include "plan/schedule.h"
#include "transport/transport.h"

namespace dcoll {

struct Binding {
  const std::byte* input = nullptr;
  std::byte* output = nullptr;  // may equal input
  Layout input_layout;
  Layout output_layout;
  DType dtype = DType::kUInt8;
  ReduceOp op = ReduceOp::kSum;
  double postscale = 1.0;  // applied where a step is marked `finalize`
};

class Executor final : public Pollable {
 public:
  // slice_bytes: at most the transport's max_message_bytes(). It and `lanes` are the same on every rank; the schedule's
  // channels times `lanes` are at most kMaxChannels.
  Executor(Messages& transport, std::shared_ptr<const plan::Schedule> schedule, Binding binding, size_t slice_bytes,
           size_t lanes = 1);
  // As many lanes as there are transport channels for.
  static size_t most_lanes(const plan::Schedule& schedule) {
    return std::max<size_t>(1, kMaxChannels / std::max<size_t>(1, schedule.channels.size()));
  }

  bool poll(bool& moved) override;
  void waiting_for(std::vector<int>& ranks) const override;

 private:
  struct Cursor {
    size_t round = 0;
    size_t step = 0;
  };
  // One channel of the schedule in one lane.
  struct ChannelState {
    const plan::Channel* program = nullptr;
    Cursor at;                             // the step being executed
    Cursor posted;                         // receives before this one are posted
    bool reduced = false;                  // a fused step has done its receive half and waits for room to send
    int receive_on = 0;                    // the transport's channel its messages come on
    int send_on = 0;                       // and the one they are posted on
    std::unique_ptr<std::byte[]> scratch;  // one slice
  };
  // Memory of ours that a transport may still read: (peer, channel) must have sent `ticket` messages before we write
  // it.
  struct Pin {
    const std::byte* begin;
    size_t bytes;
    int peer;
    int channel;
    uint64_t ticket;
  };

  bool run_channel(ChannelState& state, bool& moved);
  bool run_send(const ChannelState& state, plan::BufferId buffer, uint32_t chunk, const plan::Step& step, size_t bytes);
  bool run_fused_forward(const plan::Step& step, const ChannelState& state, size_t bytes);
  bool receive_into(const plan::Step& step, const ChannelState& state);
  bool run_local(const plan::Step& step, const ChannelState& state);
  void post_receives(ChannelState& state);
  bool may_land(const ChannelState& state, const std::byte* begin, size_t bytes) const;
  bool touches(const ChannelState& state, const plan::Step& step, const std::byte* begin, size_t bytes) const;
  void next(Cursor& cursor, const plan::Channel& program) const;
  bool finished(const Cursor& cursor) const;

  // Part `part` of a step's range: how long it is, and where.
  ChunkRange slice(const plan::Step& step, uint32_t part, size_t round) const;
  ChunkRange slice(plan::BufferId buffer, uint32_t chunk, size_t round) const;
  size_t range_bytes(const plan::Step& step, size_t round) const;
  size_t part_bytes(const plan::Step& step, uint32_t part, size_t round) const;
  const std::byte* source(const ChannelState& state, const plan::Step& step, uint32_t part) const;
  std::byte* target(const ChannelState& state, const plan::Step& step, uint32_t part) const;
  const std::byte* locate(const ChannelState& state, plan::BufferId buffer, uint32_t chunk) const;
  // The slices of a range where they lie end to end; else nullptr.
  const std::byte* in_one_piece(const ChannelState& state, plan::BufferId buffer, uint32_t chunk, uint32_t count) const;
  bool may_write(const std::byte* begin, size_t bytes);
  bool may_write_range(const ChannelState& state, const plan::Step& step);
  void combine(std::byte* to, const ChannelState& state, const plan::Step& step, uint32_t part,
               const std::byte* message, size_t bytes) const;
  bool pins_released();

  static constexpr int kReceivesAhead = 4;

  Messages& transport_;
  std::shared_ptr<const plan::Schedule> schedule_;
  Binding binding_;
  size_t elem_bytes_;
  size_t slice_elems_;
  size_t rounds_;
  size_t lanes_;
  std::unique_ptr<std::byte[]> work_;   // cut like the input; where the schedule uses it
  std::vector<ChannelState> channels_;  // lane by lane
  std::vector<Pin> pins_;
};

}  // namespace dcoll
