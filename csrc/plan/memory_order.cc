// Are conflicting accesses to memory ordered? Each channel carries a vector clock (C. Fidge 1988, F. Mattern 1989):
// entry q says up to which of its steps channel q is known to have come, by program order and messages. Two accesses to
// a slot, one of them a write, must be so ordered. A slice that was posted counts as read until the step that consumes
// it at the peer.
//
// Every shape is checked on its own, with the messages of that shape only: the slices of other shapes may be empty, and
// messages that are not sent order nothing. Room in a FIFO proves nothing either (FIFOs may be deeper). All rounds look
// the same then, so one is enough; slices of different rounds are different memory.
#include <algorithm>

#include "plan/verify_internal.h"

namespace dcoll::plan::internal {
namespace {

using Clock = std::vector<uint32_t>;

struct Event {
  uint32_t process, step;
};

class ShapeChecker {
 public:
  explicit ShapeChecker(const Program& program)
      : program_(program),
        local_of_process_(program.processes.size()),
        messages_(program.messages),
        slots_(static_cast<size_t>(program.n) * program.slots) {}

  // The events of one shape, those of a channel in order and together.
  void check(std::span<const Event> events) {
    ++generation_;
    lanes_.clear();
    for (uint32_t i = 0; i < events.size(); ++i) {
      if (i == 0 || events[i].process != events[i - 1].process) {
        local_of_process_[events[i].process] = static_cast<uint32_t>(lanes_.size());
        lanes_.push_back({i, i, {}});
      }
      lanes_.back().end = i + 1;
    }
    std::vector<uint32_t> runnable;
    for (uint32_t lane = 0; lane < lanes_.size(); ++lane) {
      lanes_[lane].clock.assign(lanes_.size(), 0);
      runnable.push_back(lane);
    }
    size_t done = 0;
    while (!runnable.empty()) {
      const uint32_t lane = runnable.back();
      runnable.pop_back();
      for (Lane& at = lanes_[lane]; at.next < at.end; ++at.next, ++done) {
        const Event& event = events[at.next];
        const CompiledStep& step = program_.processes[event.process].steps[event.step];
        if (step.in_fifo != kNoFifo && !is_posted(step.in_message)) break;
        execute(lane, event, step);
        if (step.out_fifo != kNoFifo) {
          const uint32_t reader = program_.fifos[step.out_fifo].reader;
          runnable.push_back(local_of_process_[reader]);
        }
      }
    }
    if (done != events.size()) throw Violation("the messages of one chunk depend on those of others");
  }

 private:
  struct Lane {
    uint32_t next, end;
    Clock clock;
  };
  struct Access {
    uint32_t lane;
    uint32_t time;
    Event event;
  };
  struct MessageState {
    uint32_t generation = 0;
    Clock clock;
    uint32_t consumer = 0;       // lane
    uint32_t consumed_time = 0;  // 0: not yet
  };
  struct Post {
    uint32_t message;
    Event event;
  };
  struct SlotState {
    uint32_t generation = 0;
    bool written = false;
    Access last_write{};
    std::vector<Access> reads;
    std::vector<Post> posts;
  };

  bool is_posted(uint32_t message) const { return messages_[message].generation == generation_; }

  void execute(uint32_t lane, const Event& event, const CompiledStep& step) {
    Clock& clock = lanes_[lane].clock;
    const uint32_t now = ++clock[lane];
    if (step.in_fifo != kNoFifo) {
      MessageState& message = messages_[step.in_message];
      for (size_t i = 0; i < clock.size(); ++i) clock[i] = std::max(clock[i], message.clock[i]);
      message.consumer = lane;
      message.consumed_time = now;
    }
    const uint32_t rank = program_.processes[event.process].rank;
    const Access access{lane, now, event};
    const bool nothing_to_do = step.op == StepOp::kCopy && step.src == step.dst && !step.finalize;
    if (in_memory(step.src) && !nothing_to_do) read(slot(rank, step.src), access);
    if (in_memory(step.dst) && !nothing_to_do) {
      if (step.op == StepOp::kReduce) read(slot(rank, step.dst), access);
      write(slot(rank, step.dst), access);
    }
    if (step.out_fifo != kNoFifo) {
      MessageState& message = messages_[step.out_message];
      message.generation = generation_;
      message.clock = clock;
      message.consumed_time = 0;
      const uint32_t posted = step.op == StepOp::kSend ? step.src : step.dst;
      if (in_memory(posted)) slot(rank, posted).posts.push_back({step.out_message, event});
    }
  }

  // Scratch belongs to one channel, and what is sent from it is copied: nothing to order.
  static bool in_memory(uint32_t slot) { return slot != kNoSlot && slot != kScratchSlot; }

  SlotState& slot(uint32_t rank, uint32_t index) {
    SlotState& state = slots_[static_cast<size_t>(rank) * program_.slots + index];
    if (state.generation != generation_) {
      state.generation = generation_;
      state.written = false;
      state.reads.clear();
      state.posts.clear();
    }
    return state;
  }

  bool happened_before(uint32_t lane, uint32_t time, const Access& later) const {
    return lane == later.lane || lanes_[later.lane].clock[lane] >= time;
  }

  void read(SlotState& state, const Access& access) {
    if (state.written && !happened_before(state.last_write.lane, state.last_write.time, access)) {
      race(access, "reads what", state.last_write.event, "writes, and no message orders the two");
    }
    state.reads.push_back(access);
  }

  void write(SlotState& state, const Access& access) {
    if (state.written && !happened_before(state.last_write.lane, state.last_write.time, access)) {
      race(access, "writes what", state.last_write.event, "writes too, and no message orders the two");
    }
    for (const Access& earlier : state.reads) {
      if (!happened_before(earlier.lane, earlier.time, access)) {
        race(access, "writes what", earlier.event, "reads, and no message orders the two");
      }
    }
    for (const Post& post : state.posts) {
      const MessageState& message = messages_[post.message];
      if (message.consumed_time == 0 || lanes_[access.lane].clock[message.consumer] < message.consumed_time) {
        race(access, "writes memory that", post.event, "has posted, and nothing proves that the peer has consumed it");
      }
    }
    state.written = true;
    state.last_write = access;
    state.reads.clear();
    state.posts.clear();
  }

  [[noreturn]] void race(const Access& access, const char* verb, const Event& other, const char* reason) const {
    throw Violation(where(access.event) + " " + verb + " " + where(other) + " " + reason);
  }
  std::string where(const Event& event) const {
    return program_.where(event.process, program_.processes[event.process].steps[event.step].source);
  }

  const Program& program_;
  uint32_t generation_ = 0;
  std::vector<uint32_t> local_of_process_;
  std::vector<Lane> lanes_;
  std::vector<MessageState> messages_;
  std::vector<SlotState> slots_;
};

}  // namespace

void check_memory_order(const Program& program) {
  // Sort the steps by shape, stably: within a shape, processes and their steps stay in order.
  std::vector<uint32_t> first(program.shapes + 1, 0);
  for (const Process& process : program.processes) {
    for (const CompiledStep& step : process.steps) ++first[step.shape + 1];
  }
  for (uint32_t shape = 0; shape < program.shapes; ++shape) first[shape + 1] += first[shape];
  std::vector<Event> events(first.back());
  std::vector<uint32_t> next(first.begin(), first.end() - 1);
  for (uint32_t p = 0; p < program.processes.size(); ++p) {
    const std::vector<CompiledStep>& steps = program.processes[p].steps;
    for (uint32_t i = 0; i < steps.size(); ++i) events[next[steps[i].shape]++] = {p, i};
  }
  ShapeChecker checker(program);
  for (uint32_t shape = 0; shape < program.shapes; ++shape) {
    checker.check(std::span(events).subspan(first[shape], first[shape + 1] - first[shape]));
  }
}

}  // namespace dcoll::plan::internal
