#include "plan/verify.h"

#include "plan/describe.h"
#include "plan/verify_internal.h"

namespace dcoll::plan {
namespace internal {

using enum Collective;

// Slots: in place, reduce-scatter's output and all-gather's input are the rank's own block of the larger buffer.
uint32_t Program::input_slot(uint32_t rank, uint32_t chunk) const {
  return options.in_place && collective == kAllGather ? rank * input_chunks + chunk : chunk;
}
uint32_t Program::output_slot(uint32_t rank, uint32_t chunk) const {
  if (!options.in_place) return input_chunks + chunk;
  return collective == kReduceScatter ? rank * output_chunks + chunk : chunk;
}

// Shapes are numbered like the chunks of the largest buffer; all-to-all has one for each (sender, receiver).
uint32_t Program::input_shape(uint32_t rank, uint32_t chunk) const {
  switch (collective) {
    case kAllReduce:
    case kReduceScatter:
    case kBroadcast:
      return chunk;
    case kAllGather:
      return rank * input_chunks + chunk;
    case kAllToAll:
      return rank * n + chunk;
  }
  return chunk;
}
uint32_t Program::output_shape(uint32_t rank, uint32_t chunk) const {
  switch (collective) {
    case kAllReduce:
    case kAllGather:
    case kBroadcast:
      return chunk;
    case kReduceScatter:
      return rank * output_chunks + chunk;
    case kAllToAll:
      return chunk * n + rank;
  }
  return chunk;
}

std::string Program::where(uint32_t process, size_t source) const {
  const Process& p = processes[process];
  const Step& step = schedules[p.rank].channels[p.channel].steps[source];
  return "rank " + std::to_string(p.rank) + " channel " + std::to_string(p.channel) + " step " +
         std::to_string(source) + " (" + std::string(step_op_name(step.op)) + ": " + plan::describe(step) + ")";
}

namespace {

std::string text(uint32_t number) { return std::to_string(number); }

void require(bool condition, const char* reason) {
  if (!condition) throw Violation(reason);
}

// The chunk counts the collective allows.
void check_header(const Program& program) {
  const uint32_t n = program.n, in = program.input_chunks, out = program.output_chunks;
  for (uint32_t r = 0; r < n; ++r) {
    const Schedule& s = program.schedules[r];
    const std::string who = "rank " + text(r) + ": ";
    if (s.rank != r || s.num_ranks != n) {
      throw Violation(who + "its schedule is for rank " + text(s.rank) + " of " + text(s.num_ranks) + ", not " +
                      text(r) + " of " + text(n));
    }
    if (s.input_chunks != in || s.output_chunks != out) {
      throw Violation(who + "cuts input and output into " + text(s.input_chunks) + " and " + text(s.output_chunks) +
                      " chunks, rank 0 into " + text(in) + " and " + text(out));
    }
    // Lanes of an executor number their channels behind each other's (engine/schedule/executor.h).
    if (s.channels.size() != program.schedules[0].channels.size()) {
      throw Violation(who + "has " + text(static_cast<uint32_t>(s.channels.size())) + " channels, rank 0 has " +
                      text(static_cast<uint32_t>(program.schedules[0].channels.size())));
    }
    if (s.longest_range != program.schedules[0].longest_range) {
      throw Violation(who + "says that its longest range is of " + text(s.longest_range) + " chunks, rank 0 of " +
                      text(program.schedules[0].longest_range) + ": slices would differ in length");
    }
    if (s.channels.size() > kMaxScheduleChannels) {
      throw Violation(who + "has " + text(static_cast<uint32_t>(s.channels.size())) + " channels; at most " +
                      text(kMaxScheduleChannels) + " are allowed");
    }
  }
  bool fits = in > 0 && out > 0;
  switch (program.collective) {
    case kAllReduce:
    case kBroadcast:
      fits = fits && in == out;
      break;
    case kReduceScatter:
      fits = fits && in == n * out;
      break;
    case kAllGather:
      fits = fits && out == n * in;
      break;
    case kAllToAll:
      fits = fits && in == n && out == n;
      break;
  }
  if (!fits) {
    throw Violation(text(in) + " input and " + text(out) + " output chunks do not make a " +
                    std::string(collective_name(program.collective)) + " of " + text(n) + " ranks");
  }
}

class Compiler {
 public:
  explicit Compiler(Program& program) : program_(program) {}

  void compile() {
    for (uint32_t r = 0; r < program_.n; ++r) {
      for (uint32_t c = 0; c < program_.schedules[r].channels.size(); ++c) compile_channel(r, c);
    }
    number_messages();
  }

 private:
  void compile_channel(uint32_t rank, uint32_t index) {
    const Channel& channel = program_.schedules[rank].channels[index];
    const auto process = static_cast<uint32_t>(program_.processes.size());
    program_.processes.push_back({rank, index, {}});
    for (size_t i = 0; i < channel.steps.size(); ++i) {
      try {
        const Step& step = channel.steps[i];
        check_operands(program_.schedules[rank], channel, step);
        for (uint32_t part = 0; part < step.count; ++part) {
          CompiledStep compiled = compile_part(rank, process, channel, index, step, part);
          compiled.source = static_cast<uint32_t>(i);
          program_.processes[process].steps.push_back(compiled);
        }
      } catch (const Violation& violation) {
        throw Violation(program_.where(process, i) + ": " + violation.what());
      }
    }
  }

  CompiledStep compile_part(uint32_t rank, uint32_t process, const Channel& channel, uint32_t index, const Step& step,
                            uint32_t part) {
    CompiledStep compiled{.op = step.op,
                          .finalize = step.finalize,
                          .src = kNoSlot,
                          .dst = kNoSlot,
                          .in_fifo = kNoFifo,
                          .out_fifo = kNoFifo,
                          .in_message = 0,
                          .out_message = 0,
                          .shape = program_.shapes,
                          .source = 0,
                          .range = step.count - part,
                          .message_first = step.message_first};
    compiled.src = place(rank, step.src, range_chunk(program_.n, step.src_chunk, part), compiled.shape);
    compiled.dst = place(rank, step.dst, range_chunk(program_.n, step.chunk, part), compiled.shape);
    if (step.src == BufferId::kNone && step.dst == BufferId::kNone) {
      require(range_chunk(program_.n, step.chunk, part) < program_.output_chunks, "no such output chunk");
      compiled.shape = program_.output_shape(rank, range_chunk(program_.n, step.chunk, part));
    }
    if (receives(step.op)) {
      require(step.peer < program_.n && step.peer != rank, "receives from a rank that does not exist, or from itself");
      compiled.in_fifo = fifo(step.peer, rank, index);
      program_.fifos[compiled.in_fifo].reader = process;
    }
    if (sends(step.op)) {
      const uint32_t to = destination(step), on = send_channel(channel, index);
      require(to < program_.n && to != rank, "sends to a rank that does not exist, or to itself");
      require(on < program_.schedules[rank].channels.size(), "sends on a channel number that does not exist");
      compiled.out_fifo = fifo(rank, to, on);
      Fifo& f = program_.fifos[compiled.out_fifo];
      require(f.writer == kNoFifo || f.writer == process, "another channel of this rank feeds the same FIFO");
      f.writer = process;
    }
    return compiled;
  }

  // Which buffers each operation names.
  static void check_operands(const Schedule& schedule, const Channel& channel, const Step& step) {
    const bool src = step.src != BufferId::kNone, dst = step.dst != BufferId::kNone;
    switch (step.op) {
      case StepOp::kSend:
        require(src && !dst, "send takes a src and no dst");
        break;
      case StepOp::kRecv:
        require(!src && dst, "recv takes a dst and no src");
        break;
      case StepOp::kRecvSend:
        require(!src, "recv_send takes no src");
        break;
      case StepOp::kRecvReduceSend:
        require(src, "recv_reduce_send takes a src");
        break;
      case StepOp::kRecvReduce:
      case StepOp::kCopy:
      case StepOp::kReduce:
        require(src && dst, "takes a src and a dst");
        break;
    }
    require(step.dst != BufferId::kInput, "writes the input, which belongs to the caller");
    require(!step.finalize || reduces(step.op) || step.op == StepOp::kCopy, "finalize on a step that computes nothing");
    const bool scratch = step.src == BufferId::kScratch || step.dst == BufferId::kScratch;
    require(!scratch || channel.scratch, "uses scratch, which its channel does not declare");
    const bool work = step.src == BufferId::kWork || step.dst == BufferId::kWork;
    require(!work || schedule.work, "uses work memory, which its schedule does not declare");
    require(step.count > 0 && step.count <= schedule.longest_range,
            "its range is empty, or longer than the schedule says ranges are");
    require(step.count == 1 || !scratch, "a range in scratch, which is one slice");
    require(!step.message_first || step.op == StepOp::kRecvReduce || step.op == StepOp::kRecvReduceSend,
            "message_first on a step that does not reduce a message");
  }

  // The slot of an operand; all operands of a step must have one shape.
  uint32_t place(uint32_t rank, BufferId buffer, uint32_t chunk, uint32_t& shape) {
    uint32_t slot = kNoSlot, own_shape = 0;
    switch (buffer) {
      case BufferId::kNone:
        return kNoSlot;
      case BufferId::kInput:
        require(chunk < program_.input_chunks, "no such input chunk");
        slot = program_.input_slot(rank, chunk);
        own_shape = program_.input_shape(rank, chunk);
        break;
      case BufferId::kOutput:
        require(chunk < program_.output_chunks, "no such output chunk");
        slot = program_.output_slot(rank, chunk);
        own_shape = program_.output_shape(rank, chunk);
        break;
      case BufferId::kScratch:
        require(chunk < program_.input_chunks, "no such input chunk (a scratch slice is as long as one)");
        slot = kScratchSlot;
        own_shape = program_.input_shape(rank, chunk);
        break;
      case BufferId::kWork:
        require(chunk < program_.input_chunks, "no such input chunk (work memory is cut like the input)");
        slot = program_.work_slot(chunk);
        own_shape = program_.input_shape(rank, chunk);
        break;
    }
    require(shape == program_.shapes || shape == own_shape, "src and dst are chunks of different lengths");
    shape = own_shape;
    return slot;
  }

  uint32_t fifo(uint32_t src, uint32_t dst, uint32_t channel) {
    const auto fresh = static_cast<uint32_t>(program_.fifos.size());
    const uint64_t key = (static_cast<uint64_t>(src) << 32) | (dst << 4) | channel;
    const auto [at, inserted] = fifo_ids_.try_emplace(key, fresh);
    if (inserted) program_.fifos.push_back({src, dst, channel});
    return at->second;
  }

  // The i-th message sent into a FIFO in a round is the i-th received from it.
  void number_messages() {
    for (Process& process : program_.processes) {
      for (CompiledStep& step : process.steps) {
        if (step.in_fifo != kNoFifo) step.in_message = program_.fifos[step.in_fifo].receives++;
        if (step.out_fifo != kNoFifo) step.out_message = program_.fifos[step.out_fifo].sends++;
      }
    }
    std::vector<uint32_t> first;
    for (const Fifo& f : program_.fifos) {
      first.push_back(program_.messages);
      program_.messages += f.sends > f.receives ? f.sends : f.receives;
    }
    for (Process& process : program_.processes) {
      for (CompiledStep& step : process.steps) {
        if (step.in_fifo != kNoFifo) step.in_message += first[step.in_fifo];
        if (step.out_fifo != kNoFifo) step.out_message += first[step.out_fifo];
      }
    }
  }

  Program& program_;
  std::unordered_map<uint64_t, uint32_t> fifo_ids_;
};

void check_options(const Program& program) {
  const VerifyOptions& options = program.options;
  require(program.n > 0, "no schedules were given");
  require(options.slot_depth > 0, "slot_depth must be at least 1");
  require(options.rounds > 0, "rounds must be at least 1");
  require(program.collective != kBroadcast || options.root < program.n, "the root is not a rank");
  require(program.collective != kAllToAll || !options.in_place,
          "all-to-all has no in-place form: what is received would overwrite what is still to be sent");
}

void prove(std::span<const Schedule> all_ranks, Collective collective, const VerifyOptions& options) {
  Program program;
  program.schedules = all_ranks;
  program.collective = collective;
  program.options = options;
  program.n = static_cast<uint32_t>(all_ranks.size());
  check_options(program);
  program.input_chunks = all_ranks[0].input_chunks;
  program.output_chunks = all_ranks[0].output_chunks;
  check_header(program);
  const uint32_t larger = program.input_chunks > program.output_chunks ? program.input_chunks : program.output_chunks;
  program.slots = (options.in_place ? larger : program.input_chunks + program.output_chunks) + program.input_chunks;
  program.shapes = collective == kAllToAll ? program.n * program.n : larger;
  Compiler(program).compile();

  Expressions expressions(program.n, program.input_chunks, options.rounds);
  run(program, expressions, Order::kRoundRobin);
  check_memory_order(program);
  run(program, expressions, Order::kLowestFirst);
  run(program, expressions, Order::kHighestFirst);
  run(program, expressions, Order::kRandom);
}

}  // namespace
}  // namespace internal

VerifyResult verify(std::span<const Schedule> all_ranks, Collective collective, const VerifyOptions& options) {
  try {
    internal::prove(all_ranks, collective, options);
    return {};
  } catch (const internal::Violation& violation) {
    return {violation.what()};
  }
}

}  // namespace dcoll::plan
