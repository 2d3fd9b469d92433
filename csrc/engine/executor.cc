#include "engine/executor.h"

#include <algorithm>
#include <cstring>

#include "kernels/reduce.h"

namespace dcoll {

using plan::BufferId;
using plan::Step;
using plan::StepOp;

Executor::Executor(Transport& transport, std::shared_ptr<const plan::Schedule> schedule, Binding binding,
                   size_t slice_bytes)
    : transport_(transport),
      schedule_(std::move(schedule)),
      binding_(std::move(binding)),
      elem_bytes_(dtype_bytes(binding_.dtype)),
      slice_elems_(std::max<size_t>(1, slice_bytes / elem_bytes_)),
      rounds_((std::max(binding_.input_layout.longest(), binding_.output_layout.longest()) + slice_elems_ - 1) /
              slice_elems_),
      channels_(schedule_->channels.size()) {
  for (size_t c = 0; c < channels_.size(); ++c) {
    const plan::Channel& program = schedule_->channels[c];
    ChannelState& state = channels_[c];
    state.send_on = static_cast<int>(plan::send_channel(program, static_cast<uint32_t>(c)));
    if (program.scratch) state.scratch = std::make_unique<std::byte[]>(slice_elems_ * elem_bytes_);
    if (program.steps.empty()) state.at.round = state.posted.round = rounds_;
  }
}

bool Executor::poll(bool& moved) {
  bool all_done = true;
  for (size_t c = 0; c < channels_.size(); ++c) {
    all_done &= run_channel(static_cast<int>(c), moved);
  }
  return all_done && pins_released();
}

// Advances one channel until it would block. True when the channel has run all its rounds.
bool Executor::run_channel(int channel, bool& moved) {
  ChannelState& state = channels_[channel];
  const plan::Channel& program = schedule_->channels[channel];
  while (!finished(state.at)) {
    const Step& step = program.steps[state.at.step];
    const size_t bytes = slice(step, state.at.round).len * elem_bytes_;
    if (bytes > 0) {  // both sides know when a slice is empty; then nothing is sent
      post_receives(channel);
      if (!run_step(channel, step, state, bytes)) return false;
      moved = true;
    }
    next(state.at, program);
  }
  return true;
}

// One step on one slice. False when it must wait; then nothing happened that would be repeated.
bool Executor::run_step(int channel, const Step& step, ChannelState& state, size_t bytes) {
  switch (step.op) {
    case StepOp::kSend:
      return run_send(state, source(state, step), step.peer, bytes);
    case StepOp::kRecv:
    case StepOp::kRecvReduce:
      return receive_into(channel, step, state, bytes);
    case StepOp::kRecvSend:
    case StepOp::kRecvReduceSend:
      if (step.dst == BufferId::kNone) return run_fused_forward(channel, step, state, bytes);
      if (!state.reduced) {
        if (!receive_into(channel, step, state, bytes)) return false;
        state.reduced = true;
      }
      if (!run_send(state, target(state, step), step.to, bytes)) return false;
      state.reduced = false;
      return true;
    case StepOp::kCopy:
    case StepOp::kReduce:
      return run_local(step, state, bytes);
  }
  return false;
}

bool Executor::run_send(const ChannelState& state, const std::byte* data, int to, size_t bytes) {
  if (!transport_.post_send(to, state.send_on, data, bytes)) return false;
  const uint64_t ticket = transport_.posted(to, state.send_on);
  if (transport_.sent(to, state.send_on) < ticket) pins_.push_back({data, bytes, to, state.send_on, ticket});
  return true;
}

// recv_send and recv_reduce_send without a local copy: the result is composed in the transport's memory.
bool Executor::run_fused_forward(int channel, const Step& step, const ChannelState& state, size_t bytes) {
  std::byte* room = transport_.acquire_send(step.to, state.send_on, bytes);
  if (room == nullptr) return false;
  const std::byte* message = transport_.front(step.peer, channel);
  if (message == nullptr) return false;
  if (step.op == StepOp::kRecvReduceSend) {
    kernels::reduce2(room, source(state, step), message, bytes / elem_bytes_, binding_.dtype, binding_.op,
                     step.finalize ? binding_.postscale : 1.0);
  } else {
    std::memcpy(room, message, bytes);
  }
  transport_.commit_send(step.to, state.send_on);
  transport_.pop(step.peer, channel);
  return true;
}

// The receiving half of a step: the message, combined with src where the step reduces, is stored to dst.
bool Executor::receive_into(int channel, const Step& step, const ChannelState& state, size_t bytes) {
  std::byte* dst = target(state, step);
  if (!may_write(dst, bytes)) return false;
  const std::byte* message = transport_.front(step.peer, channel);
  if (message == nullptr) return false;
  if (plan::reduces(step.op)) {
    kernels::reduce2(dst, source(state, step), message, bytes / elem_bytes_, binding_.dtype, binding_.op,
                     step.finalize ? binding_.postscale : 1.0);
  } else if (message != dst) {
    std::memcpy(dst, message, bytes);
  }
  transport_.pop(step.peer, channel);
  return true;
}

bool Executor::run_local(const Step& step, const ChannelState& state, size_t bytes) {
  std::byte* dst = target(state, step);
  if (!may_write(dst, bytes)) return false;
  const std::byte* src = source(state, step);
  const size_t count = bytes / elem_bytes_;
  const double scale = step.finalize ? binding_.postscale : 1.0;
  if (step.op == StepOp::kReduce) {
    kernels::reduce2(dst, dst, src, count, binding_.dtype, binding_.op, scale);
  } else if (scale != 1.0) {
    kernels::scale(dst, src, count, binding_.dtype, scale);
  } else if (src != dst) {
    std::memcpy(dst, src, bytes);
  }
  return true;
}

// Posts receives ahead of the step being executed, so that the medium can deliver early. Only the current step's
// receive may land in the caller's memory: further ahead, earlier steps may still need what is there.
void Executor::post_receives(int channel) {
  ChannelState& state = channels_[channel];
  const plan::Channel& program = schedule_->channels[channel];
  auto before = [](const Cursor& a, const Cursor& b) {
    return a.round < b.round || (a.round == b.round && a.step < b.step);
  };
  if (before(state.posted, state.at)) state.posted = state.at;
  for (int ahead = 0; ahead < kReceivesAhead && !finished(state.posted); ++ahead) {
    const Step& step = program.steps[state.posted.step];
    const size_t bytes = plan::receives(step.op) ? slice(step, state.posted.round).len * elem_bytes_ : 0;
    if (bytes > 0) {
      const bool current = !before(state.at, state.posted);
      const bool store = current && step.op == StepOp::kRecv && step.dst != BufferId::kNone;
      std::byte* dst = store ? target(state, step) : nullptr;  // current, so state.at is its round
      if (dst != nullptr && !may_write(dst, bytes)) return;
      if (!transport_.post_recv(step.peer, channel, dst, bytes)) return;
    }
    next(state.posted, program);
  }
}

// Steps to the following (round, step).
void Executor::next(Cursor& cursor, const plan::Channel& program) {
  if (++cursor.step == program.steps.size()) {
    cursor.step = 0;
    ++cursor.round;
  }
}

bool Executor::finished(const Cursor& cursor) const { return cursor.round >= rounds_; }

// The slice that determines how much a step moves (schedule.h, "Length").
ChunkRange Executor::slice(const Step& step, size_t round) const {
  if (step.src != BufferId::kNone) return slice(step.src, step.src_chunk, round);
  return slice(step.dst == BufferId::kNone ? BufferId::kOutput : step.dst, step.chunk, round);
}

ChunkRange Executor::slice(BufferId buffer, uint32_t chunk, size_t round) const {
  const bool output = buffer == BufferId::kOutput;
  return (output ? binding_.output_layout : binding_.input_layout).slice(chunk, round, slice_elems_);
}

const std::byte* Executor::source(const ChannelState& state, const Step& step) const {
  return locate(state, step.src, step.src_chunk);
}

std::byte* Executor::target(const ChannelState& state, const Step& step) const {
  // dst is never the input (verify() rejects such schedules), so nothing const is written through this.
  return const_cast<std::byte*>(locate(state, step.dst, step.chunk));
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
    case BufferId::kNone:
      return nullptr;
  }
  return nullptr;
}

bool Executor::may_write(const std::byte* begin, size_t bytes) {
  for (size_t i = 0; i < pins_.size();) {
    const Pin& pin = pins_[i];
    if (transport_.sent(pin.peer, pin.channel) >= pin.ticket) {
      pins_[i] = pins_.back();
      pins_.pop_back();
      continue;
    }
    if (begin < pin.begin + pin.bytes && pin.begin < begin + bytes) return false;
    ++i;
  }
  return true;
}

bool Executor::pins_released() {
  std::erase_if(pins_, [this](const Pin& pin) { return transport_.sent(pin.peer, pin.channel) >= pin.ticket; });
  return pins_.empty();
}

void Executor::waiting_for(std::vector<int>& ranks) const {
  for (size_t c = 0; c < channels_.size(); ++c) {
    const ChannelState& state = channels_[c];
    if (finished(state.at)) continue;
    const Step& step = schedule_->channels[c].steps[state.at.step];
    const bool sending = step.op == StepOp::kSend || state.reduced;
    ranks.push_back(sending ? plan::destination(step) : step.peer);
  }
  for (const Pin& pin : pins_) ranks.push_back(pin.peer);
}

}  // namespace dcoll
