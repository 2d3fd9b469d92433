// Executes all ranks' programs on expressions, against bounded FIFOs, in a chosen order of the channels.
#include <bit>
#include <random>

#include "plan/verify_internal.h"

namespace dcoll::plan::internal {
namespace {

using Id = Expressions::Id;

// The set of processes that may be able to move, searched in the order of the run.
class ReadySet {
 public:
  explicit ReadySet(uint32_t size) : size_(size), words_((size + 63) / 64) {}

  void insert(uint32_t i) { words_[i / 64] |= bit(i); }
  void erase(uint32_t i) { words_[i / 64] &= ~bit(i); }
  // The first member at or after `from`, cyclically; size() when there is none.
  uint32_t next(uint32_t from) const {
    const uint32_t start = from < size_ ? from : 0;
    for (uint32_t w = start / 64, mask_first = 1; w < words_.size(); ++w, mask_first = 0) {
      const uint64_t word = mask_first ? words_[w] & (~uint64_t{0} << (start % 64)) : words_[w];
      if (word != 0) return w * 64 + static_cast<uint32_t>(std::countr_zero(word));
    }
    for (uint32_t w = 0; w <= start / 64 && w < words_.size(); ++w) {
      if (words_[w] != 0) return w * 64 + static_cast<uint32_t>(std::countr_zero(words_[w]));
    }
    return size_;
  }
  uint32_t last() const {
    for (size_t w = words_.size(); w-- > 0;) {
      if (words_[w] != 0)
        return static_cast<uint32_t>(w * 64 + 63) - static_cast<uint32_t>(std::countl_zero(words_[w]));
    }
    return size_;
  }
  uint32_t size() const { return size_; }

 private:
  static uint64_t bit(uint32_t i) { return uint64_t{1} << (i % 64); }
  uint32_t size_;
  std::vector<uint64_t> words_;
};

// One part of a message. A message on a range has several, and takes one slot.
struct Part {
  Id value;
  uint32_t shape, round;
  uint32_t range;  // parts of the message that follow, this one included
};

class Run {
 public:
  Run(const Program& program, Expressions& expressions, Order order)
      : program_(program),
        expressions_(expressions),
        order_(order),
        ready_(static_cast<uint32_t>(program.processes.size())),
        cursors_(program.processes.size()),
        queues_(program.fifos.size()),
        queue_capacity_(static_cast<size_t>(program.options.slot_depth) * program.schedules[0].longest_range),
        parts_(program.fifos.size() * queue_capacity_),
        memory_(static_cast<size_t>(program.n) * program.slots * program.options.rounds, Expressions::kNothing) {}

  void execute() {
    fill_inputs();
    for (uint32_t p = 0; p < cursors_.size(); ++p) {
      if (!program_.processes[p].steps.empty()) ready_.insert(p);
    }
    for (uint32_t p = pick(0); p < ready_.size(); p = pick(p)) {
      if (!advance(p)) ready_.erase(p);
    }
    check_all_finished();
    check_queues_empty();
    check_outputs();
  }

 private:
  struct Cursor {
    uint32_t round = 0;
    uint32_t step = 0;
    Id scratch = Expressions::kNothing;
    uint32_t scratch_shape = 0;
  };
  struct Queue {
    uint32_t head = 0, parts = 0, messages = 0;
  };

  uint32_t pick(uint32_t last) {
    switch (order_) {
      case Order::kRoundRobin:
        return ready_.next(last + 1);
      case Order::kLowestFirst:
        return ready_.next(0);
      case Order::kHighestFirst:
        return ready_.last();
      case Order::kRandom:
        return ready_.next(static_cast<uint32_t>(random_() % ready_.size()));
    }
    return ready_.size();
  }

  Id& memory(uint32_t rank, uint32_t slot, uint32_t round) {
    return memory_[(static_cast<size_t>(rank) * program_.slots + slot) * program_.options.rounds + round];
  }

  void fill_inputs() {
    for (uint32_t rank = 0; rank < program_.n; ++rank) {
      // Only the root has something to broadcast.
      if (program_.collective == Collective::kBroadcast && rank != program_.options.root) continue;
      for (uint32_t chunk = 0; chunk < program_.input_chunks; ++chunk) {
        for (uint32_t round = 0; round < program_.options.rounds; ++round) {
          memory(rank, program_.input_slot(rank, chunk), round) = expressions_.leaf(rank, chunk, round);
        }
      }
    }
  }

  // One step of process p, with all parts of its range. False when it is blocked or has finished; whoever unblocks it
  // makes it ready again.
  bool advance(uint32_t p) {
    const Process& process = program_.processes[p];
    Cursor& cursor = cursors_[p];
    if (cursor.round == program_.options.rounds) return false;
    const CompiledStep& step = process.steps[cursor.step];
    if (waits_for_message(step) || waits_for_room(step)) return false;
    try {
      if (step.in_fifo != kNoFifo) take_message(step);
      for (uint32_t part = 0; part < step.range; ++part) execute(process, cursor, process.steps[cursor.step + part]);
      if (step.out_fifo != kNoFifo) ++queues_[step.out_fifo].messages;
    } catch (const Violation& violation) {
      throw Violation(place(p) + ": " + violation.what());
    }
    cursor.step += step.range;
    if (cursor.step == process.steps.size()) {
      cursor.step = 0;
      ++cursor.round;
      cursor.scratch = Expressions::kNothing;
    }
    return true;
  }

  bool waits_for_message(const CompiledStep& step) const {
    return step.in_fifo != kNoFifo && queues_[step.in_fifo].messages == 0;
  }
  bool waits_for_room(const CompiledStep& step) const {
    return step.out_fifo != kNoFifo && queues_[step.out_fifo].messages == program_.options.slot_depth;
  }

  // schedule.h, "Semantics of a step".
  void execute(const Process& process, Cursor& cursor, const CompiledStep& step) {
    Id value = Expressions::kNothing;
    if (step.in_fifo != kNoFifo) value = pop(step, cursor.round);
    switch (step.op) {
      case StepOp::kSend:
      case StepOp::kCopy:
        value = load(process, cursor, step, step.src);
        break;
      case StepOp::kRecv:
      case StepOp::kRecvSend:
        break;
      case StepOp::kRecvReduce:
      case StepOp::kRecvReduceSend: {
        const Id own = load(process, cursor, step, step.src);
        value = step.message_first ? expressions_.combine(value, own) : expressions_.combine(own, value);
        break;
      }
      case StepOp::kReduce:
        value = expressions_.combine(load(process, cursor, step, step.dst), load(process, cursor, step, step.src));
        break;
    }
    if (step.finalize) value = expressions_.finalize(value);
    if (step.dst != kNoSlot) store(process, cursor, step, value);
    if (step.out_fifo != kNoFifo) push(step, {value, step.shape, cursor.round, step.range});
  }

  Id load(const Process& process, const Cursor& cursor, const CompiledStep& step, uint32_t slot) {
    if (slot == kScratchSlot) {
      if (cursor.scratch == Expressions::kNothing) throw Violation("reads scratch before writing it in this round");
      if (cursor.scratch_shape != step.shape) throw Violation("reads scratch as a chunk it does not hold");
      return cursor.scratch;
    }
    const Id value = memory(process.rank, slot, cursor.round);
    if (value == Expressions::kNothing) throw Violation("reads memory that nothing was written to");
    return value;
  }

  void store(const Process& process, Cursor& cursor, const CompiledStep& step, Id value) {
    if (step.dst == kScratchSlot) {
      cursor.scratch = value;
      cursor.scratch_shape = step.shape;
    } else {
      memory(process.rank, step.dst, cursor.round) = value;
    }
  }

  // The slot of the message at the front is free from here on: the step takes all of its parts, and nobody else moves
  // meanwhile.
  void take_message(const CompiledStep& step) {
    Queue& queue = queues_[step.in_fifo];
    const uint32_t parts = parts_[step.in_fifo * queue_capacity_ + queue.head].range;
    if (parts != step.range) {
      throw Violation("the message is of " + std::to_string(parts) + " chunks, but one of " +
                      std::to_string(step.range) + " is expected");
    }
    --queue.messages;
    const Fifo& fifo = program_.fifos[step.in_fifo];
    if (fifo.writer != kNoFifo) ready_.insert(fifo.writer);
  }

  Id pop(const CompiledStep& step, uint32_t round) {
    Queue& queue = queues_[step.in_fifo];
    const Part message = parts_[step.in_fifo * queue_capacity_ + queue.head];
    queue.head = static_cast<uint32_t>((queue.head + 1) % queue_capacity_);
    --queue.parts;
    if (message.shape != step.shape || message.round != round) {
      throw Violation("the message is " + expressions_.describe(message.value) + " (length of chunk " +
                      std::to_string(message.shape) + " in round " + std::to_string(message.round) +
                      "), but one as long as chunk " + std::to_string(step.shape) + " in round " +
                      std::to_string(round) + " is expected");
    }
    return message.value;
  }

  void push(const CompiledStep& step, const Part& part) {
    Queue& queue = queues_[step.out_fifo];
    parts_[step.out_fifo * queue_capacity_ + (queue.head + queue.parts) % queue_capacity_] = part;
    ++queue.parts;
    const Fifo& fifo = program_.fifos[step.out_fifo];
    if (fifo.reader != kNoFifo) ready_.insert(fifo.reader);
  }

  std::string place(uint32_t p) const {
    return program_.where(p, program_.processes[p].steps[cursors_[p].step].source) + " in round " +
           std::to_string(cursors_[p].round);
  }

  void check_all_finished() const {
    constexpr int kNamed = 8;
    std::string waiting;
    int stuck = 0;
    for (uint32_t p = 0; p < cursors_.size(); ++p) {
      if (program_.processes[p].steps.empty() || cursors_[p].round == program_.options.rounds) continue;
      if (++stuck > kNamed) continue;
      const CompiledStep& step = program_.processes[p].steps[cursors_[p].step];
      waiting += "\n  " + place(p);
      if (waits_for_message(step)) {
        waiting += " waits for a message from rank " + std::to_string(program_.fifos[step.in_fifo].src);
      } else {
        const Fifo& fifo = program_.fifos[step.out_fifo];
        waiting += " waits for rank " + std::to_string(fifo.dst) + " to take a message from channel " +
                   std::to_string(fifo.channel);
      }
    }
    if (stuck > kNamed) waiting += "\n  and " + std::to_string(stuck - kNamed) + " more";
    if (stuck > 0) {
      throw Violation("deadlock with " + std::to_string(program_.options.slot_depth) + " slots per FIFO:" + waiting);
    }
  }

  void check_queues_empty() const {
    for (size_t f = 0; f < queues_.size(); ++f) {
      if (queues_[f].messages == 0) continue;
      const Fifo& fifo = program_.fifos[f];
      throw Violation(std::to_string(queues_[f].messages) + " messages from rank " + std::to_string(fifo.src) +
                      " to rank " + std::to_string(fifo.dst) + " on channel " + std::to_string(fifo.channel) +
                      " are never received");
    }
  }

  void check_outputs() {
    for (uint32_t round = 0; round < program_.options.rounds; ++round) {
      for (uint32_t chunk = 0; chunk < program_.output_chunks; ++chunk) {
        Id first = Expressions::kNothing;
        for (uint32_t rank = 0; rank < program_.n; ++rank) {
          const Id value = memory(rank, program_.output_slot(rank, chunk), round);
          const std::string reason = judge(rank, chunk, round, value, first);
          if (!reason.empty()) {
            throw Violation("rank " + std::to_string(rank) + " output chunk " + std::to_string(chunk) + " round " +
                            std::to_string(round) + " " + reason);
          }
        }
      }
    }
  }

  // Why `value` is not what the collective promises; empty if it is. `first`: the value of the first rank seen.
  std::string judge(uint32_t rank, uint32_t chunk, uint32_t round, Id value, Id& first) {
    if (value == Expressions::kNothing) return "is never written";
    const uint32_t k = program_.collective == Collective::kAllGather ? program_.input_chunks : program_.output_chunks;
    switch (program_.collective) {
      case Collective::kAllReduce:
        if (first != Expressions::kNothing) {
          return value == first ? "" : "drifts: it is not computed as on rank 0: " + expressions_.describe(value);
        }
        first = value;
        return judge_sum(chunk, round, value);
      case Collective::kReduceScatter:
        return judge_sum(rank * k + chunk, round, value);
      case Collective::kAllGather:
        return judge_copy(expressions_.leaf(chunk / k, chunk % k, round), value);
      case Collective::kBroadcast:
        return judge_copy(expressions_.leaf(program_.options.root, chunk, round), value);
      case Collective::kAllToAll:
        return judge_copy(expressions_.leaf(chunk, rank, round), value);
    }
    return "";
  }

  std::string judge_copy(Id expected, Id value) const {
    if (value == expected) return "";
    return "holds " + expressions_.describe(value) + (expressions_.is_final(value) ? " finalized" : "") +
           " instead of " + expressions_.describe(expected);
  }

  std::string judge_sum(uint32_t chunk, uint32_t round, Id value) {
    const uint32_t wanted = expressions_.subject(expressions_.leaf(0, chunk, round));
    if (expressions_.subject(value) != wanted) return "holds another chunk: " + expressions_.describe(value);
    if (!expressions_.is_final(value)) return "is not finalized: " + expressions_.describe(value);
    if (program_.options.rank_order && value != expressions_.rank_order_sum(chunk, round)) {
      return "is not summed in rank order";
    }
    return "";
  }

  const Program& program_;
  Expressions & expressions_;
  Order order_;
  ReadySet ready_;
  std::vector<Cursor> cursors_;
  std::vector<Queue> queues_;
  size_t queue_capacity_;  // in parts
  std::vector<Part> parts_;
  std::vector<Id> memory_;
  std::minstd_rand random_{1};  // fixed seed: a failure comes back
};

}  // namespace

void run(const Program& program, Expressions& expressions, Order order) { Run(program, expressions, order).execute(); }

}  // namespace dcoll::plan::internal
