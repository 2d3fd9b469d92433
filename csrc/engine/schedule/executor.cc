#include "engine/schedule/executor.h"

#include <cstring>

#include "kernels/reduce.h"

namespace dcoll {

using plan::BufferId;
using plan::Step;
using plan::StepOp;

Executor::Executor(Messages& transport, std::shared_ptr<const plan::Schedule> schedule, Binding binding,
                   size_t slice_bytes, size_t lanes)
    : transport_(transport),
      schedule_(std::move(schedule)),
      binding_(std::move(binding)),
      elem_bytes_(dtype_bytes(binding_.dtype)),
      // A range of slices is one message.
      slice_elems_(std::max<size_t>(1, slice_bytes / elem_bytes_ / schedule_->longest_range)),
      rounds_((std::max(binding_.input_layout.longest(), binding_.output_layout.longest()) + slice_elems_ - 1) /
              slice_elems_),
      lanes_(std::max<size_t>(1, std::min({lanes, rounds_, most_lanes(*schedule_)}))),
      channels_(schedule_->channels.size() * lanes_) {
  if (schedule_->work) work_ = std::make_unique_for_overwrite<std::byte[]>(binding_.input_layout.total() * elem_bytes_);
  const size_t per_lane = schedule_->channels.size();
  for (size_t i = 0; i < channels_.size(); ++i) {
    const size_t lane = i / per_lane, channel = i % per_lane;
    const plan::Channel& program = schedule_->channels[channel];
    ChannelState& state = channels_[i];
    state.program = &program;
    state.receive_on = static_cast<int>(i);
    state.send_on = static_cast<int>(lane * per_lane + plan::send_channel(program, static_cast<uint32_t>(channel)));
    state.at.round = state.posted.round = program.steps.empty() ? rounds_ : lane;
    if (program.scratch) state.scratch = std::make_unique<std::byte[]>(slice_elems_ * elem_bytes_);
  }
}

bool Executor::poll(bool& moved) {
  bool all_done = true;
  for (ChannelState& state : channels_) all_done &= run_channel(state, moved);
  return all_done && pins_released();
}

// Advances one channel until it would block. True when the channel has run all its rounds.
bool Executor::run_channel(ChannelState& state, bool& moved) {
  const plan::Channel& program = *state.program;
  for (; !finished(state.at); next(state.at, program)) {
    const Step& step = program.steps[state.at.step];
    const size_t bytes = range_bytes(step, state.at.round);
    if (bytes == 0) continue;  // both sides know when a slice is empty; then nothing is sent
    post_receives(state);
    bool done = false;  // a step that must wait has done nothing that would be repeated
    switch (step.op) {
      case StepOp::kSend:
        done = run_send(state, step.src, step.src_chunk, step, bytes);
        break;
      case StepOp::kRecv:
      case StepOp::kRecvReduce:
        done = receive_into(step, state);
        break;
      case StepOp::kRecvSend:
      case StepOp::kRecvReduceSend:
        if (step.dst == BufferId::kNone) {
          done = run_fused_forward(step, state, bytes);
          break;
        }
        state.reduced = state.reduced || receive_into(step, state);
        done = state.reduced && run_send(state, step.dst, step.chunk, step, bytes);
        if (done) state.reduced = false;
        break;
      case StepOp::kCopy:
      case StepOp::kReduce:
        done = run_local(step, state);
        break;
    }
    if (!done) return false;
    moved = true;
  }
  return true;
}

bool Executor::run_send(const ChannelState& state, BufferId buffer, uint32_t chunk, const Step& step, size_t bytes) {
  const int to = plan::destination(step);
  if (const std::byte* data = in_one_piece(state, buffer, chunk, step.count)) {
    if (!transport_.post_send(to, state.send_on, data, bytes)) return false;
    const uint64_t ticket = transport_.posted(to, state.send_on);
    if (transport_.sent(to, state.send_on) < ticket) pins_.push_back({data, bytes, to, state.send_on, ticket});
    return true;
  }
  std::byte* room = transport_.acquire_send(to, state.send_on, bytes);
  if (room == nullptr) return false;
  for (uint32_t part = 0; part < step.count; ++part) {
    const size_t len = part_bytes(step, part, state.at.round);
    if (len > 0) std::memcpy(room, locate(state, buffer, plan::range_chunk(schedule_->num_ranks, chunk, part)), len);
    room += len;
  }
  transport_.commit_send(to, state.send_on);
  return true;
}

// recv_send and recv_reduce_send without a local copy: the result is composed in the transport's memory.
bool Executor::run_fused_forward(const Step& step, const ChannelState& state, size_t bytes) {
  std::byte* room = transport_.acquire_send(step.to, state.send_on, bytes);
  if (room == nullptr) return false;
  const std::byte* message = transport_.front(step.peer, state.receive_on);
  if (message == nullptr) return false;
  for (uint32_t part = 0; part < step.count; ++part) {
    const size_t len = part_bytes(step, part, state.at.round);
    if (len > 0) combine(room, state, step, part, message, len);
    room += len;
    message += len;
  }
  transport_.commit_send(step.to, state.send_on);
  transport_.pop(step.peer, state.receive_on);
  return true;
}

// The receiving half of a step: the message, combined with src where the step reduces, is stored to dst.
bool Executor::receive_into(const Step& step, const ChannelState& state) {
  if (!may_write_range(state, step)) return false;
  const std::byte* message = transport_.front(step.peer, state.receive_on);
  if (message == nullptr) return false;
  for (uint32_t part = 0; part < step.count; ++part) {
    const size_t len = part_bytes(step, part, state.at.round);
    if (len > 0) combine(target(state, step, part), state, step, part, message, len);
    message += len;
  }
  transport_.pop(step.peer, state.receive_on);
  return true;
}

// One slice of a message, reduced with src where the step says so, to its place.
void Executor::combine(std::byte* to, const ChannelState& state, const Step& step, uint32_t part,
                       const std::byte* message, size_t bytes) const {
  if (plan::reduces(step.op)) {
    const std::byte* own = source(state, step, part);
    kernels::reduce2(to, step.message_first ? message : own, step.message_first ? own : message, bytes / elem_bytes_,
                     binding_.dtype, binding_.op, step.finalize ? binding_.postscale : 1.0);
  } else if (message != to) {
    std::memcpy(to, message, bytes);
  }
}

bool Executor::run_local(const Step& step, const ChannelState& state) {
  if (!may_write_range(state, step)) return false;
  const double scale = step.finalize ? binding_.postscale : 1.0;
  for (uint32_t part = 0; part < step.count; ++part) {
    std::byte* dst = target(state, step, part);
    const std::byte* src = source(state, step, part);
    const size_t len = part_bytes(step, part, state.at.round);
    if (len == 0) continue;
    if (step.op == StepOp::kReduce) {
      kernels::reduce2(dst, dst, src, len / elem_bytes_, binding_.dtype, binding_.op, scale);
    } else {
      kernels::copy_scaled(dst, src, len, binding_.dtype, scale);
    }
  }
  return true;
}

// Posts receives ahead of the step being executed, so that the medium can deliver early: into the caller's memory where
// nothing is in the way, else into the transport's.
void Executor::post_receives(ChannelState& state) {
  const plan::Channel& program = *state.program;
  auto before = [](const Cursor& a, const Cursor& b) {
    return a.round < b.round || (a.round == b.round && a.step < b.step);
  };
  if (before(state.posted, state.at)) state.posted = state.at;
  for (int ahead = 0; ahead < kReceivesAhead && !finished(state.posted); ++ahead) {
    const Step& step = program.steps[state.posted.step];
    const size_t bytes = plan::receives(step.op) ? range_bytes(step, state.posted.round) : 0;
    if (bytes > 0) {
      // Places are found for the round of state.at.
      const bool stores = (step.op == StepOp::kRecv || step.op == StepOp::kRecvSend) && step.dst != BufferId::kNone &&
                          state.posted.round == state.at.round;
      auto* dst = stores ? const_cast<std::byte*>(in_one_piece(state, step.dst, step.chunk, step.count)) : nullptr;
      const bool current = !before(state.at, state.posted);
      if (dst != nullptr && !may_write(dst, bytes)) {
        if (current) return;  // into its place or not at all
        dst = nullptr;
      }
      if (dst != nullptr && !current && !may_land(state, dst, bytes)) dst = nullptr;
      if (!transport_.post_recv(step.peer, state.receive_on, dst, bytes)) return;
    }
    next(state.posted, program);
  }
}

// Whether the message of step state.posted may be written to its place before the steps up to it are done. They must
// not use that memory. And what the proof lets them learn from messages must be known already when this message comes:
// it is if they receive from the same peer, who sends this message later.
bool Executor::may_land(const ChannelState& state, const std::byte* begin, size_t bytes) const {
  const std::vector<Step>& steps = state.program->steps;
  for (size_t i = state.at.step; i < state.posted.step; ++i) {
    if (plan::receives(steps[i].op) && steps[i].peer != steps[state.posted.step].peer) return false;
    if (touches(state, steps[i], begin, bytes)) return false;
  }
  return true;
}

bool Executor::touches(const ChannelState& state, const Step& step, const std::byte* begin, size_t bytes) const {
  for (uint32_t part = 0; part < step.count; ++part) {
    const size_t used = part_bytes(step, part, state.at.round);
    for (const std::byte* other :
         {source(state, step, part), static_cast<const std::byte*>(target(state, step, part))}) {
      if (other != nullptr && begin < other + used && other < begin + bytes) return true;
    }
  }
  return false;
}

// Steps to the following (round, step) of the lane.
void Executor::next(Cursor& cursor, const plan::Channel& program) const {
  if (++cursor.step == program.steps.size()) {
    cursor.step = 0;
    cursor.round += lanes_;
  }
}

bool Executor::finished(const Cursor& cursor) const { return cursor.round >= rounds_; }

// The slice that determines how much a step moves (schedule.h, "Length").
ChunkRange Executor::slice(const Step& step, uint32_t part, size_t round) const {
  if (step.src != BufferId::kNone)
    return slice(step.src, plan::range_chunk(schedule_->num_ranks, step.src_chunk, part), round);
  return slice(step.dst == BufferId::kNone ? BufferId::kOutput : step.dst,
               plan::range_chunk(schedule_->num_ranks, step.chunk, part), round);
}

size_t Executor::part_bytes(const Step& step, uint32_t part, size_t round) const {
  return slice(step, part, round).len * elem_bytes_;
}

size_t Executor::range_bytes(const Step& step, size_t round) const {
  size_t bytes = 0;
  for (uint32_t part = 0; part < step.count; ++part) bytes += part_bytes(step, part, round);
  return bytes;
}

ChunkRange Executor::slice(BufferId buffer, uint32_t chunk, size_t round) const {
  const bool output = buffer == BufferId::kOutput;
  return (output ? binding_.output_layout : binding_.input_layout).slice(chunk, round, slice_elems_);
}

const std::byte* Executor::source(const ChannelState& state, const Step& step, uint32_t part) const {
  return locate(state, step.src, plan::range_chunk(schedule_->num_ranks, step.src_chunk, part));
}

std::byte* Executor::target(const ChannelState& state, const Step& step, uint32_t part) const {
  // dst is never the input (verify() rejects such schedules), so nothing const is written through this.
  return const_cast<std::byte*>(locate(state, step.dst, plan::range_chunk(schedule_->num_ranks, step.chunk, part)));
}

const std::byte* Executor::in_one_piece(const ChannelState& state, BufferId buffer, uint32_t chunk,
                                        uint32_t count) const {
  if (count == 1) return locate(state, buffer, chunk);
  const std::byte* begin = nullptr;
  size_t end = 0;
  for (uint32_t part = 0; part < count; ++part) {
    const ChunkRange range = slice(buffer, plan::range_chunk(schedule_->num_ranks, chunk, part), state.at.round);
    if (range.len == 0) continue;
    if (begin == nullptr) {
      begin = locate(state, buffer, plan::range_chunk(schedule_->num_ranks, chunk, part));
    } else if (range.begin != end) {
      return nullptr;
    }
    end = range.begin + range.len;
  }
  return begin;
}

const std::byte* Executor::locate(const ChannelState& state, BufferId buffer, uint32_t chunk) const {
  const size_t round = state.at.round;
  switch (buffer) {
    case BufferId::kInput:
      return binding_.input + slice(buffer, chunk, round).begin * elem_bytes_;
    case BufferId::kOutput:
      return binding_.output + slice(buffer, chunk, round).begin * elem_bytes_;
    case BufferId::kScratch:
      return state.scratch.get();
    case BufferId::kWork:
      return work_.get() + slice(buffer, chunk, round).begin * elem_bytes_;
    case BufferId::kNone:
      return nullptr;
  }
  return nullptr;
}

bool Executor::may_write(const std::byte* begin, size_t bytes) {
  return pins_released() || std::ranges::none_of(pins_, [&](const Pin& pin) {
           return begin < pin.begin + pin.bytes && pin.begin < begin + bytes;
         });
}

bool Executor::may_write_range(const ChannelState& state, const Step& step) {
  for (uint32_t part = 0; part < step.count; ++part) {
    if (!may_write(target(state, step, part), part_bytes(step, part, state.at.round))) return false;
  }
  return true;
}

bool Executor::pins_released() {
  std::erase_if(pins_, [this](const Pin& pin) { return transport_.sent(pin.peer, pin.channel) >= pin.ticket; });
  return pins_.empty();
}

void Executor::waiting_for(std::vector<int>& ranks) const {
  for (const ChannelState& state : channels_) {
    if (finished(state.at)) continue;
    const Step& step = state.program->steps[state.at.step];
    const bool sending = step.op == StepOp::kSend || state.reduced;
    ranks.push_back(sending ? plan::destination(step) : step.peer);
  }
  for (const Pin& pin : pins_) ranks.push_back(pin.peer);
}

}  // namespace dcoll
