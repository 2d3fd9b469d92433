// What the parts of the verifier share: verify.cc checks and compiles the schedules, symbolic_run.cc executes them,
// memory_order.cc proves the accesses to memory ordered. Not for others.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/error.h"
#include "plan/verify.h"

namespace dcoll::plan::internal {

// Thrown where a schedule is found wrong; verify() turns it into its result.
class Violation : public Error {
 public:
  using Error::Error;
};

inline constexpr uint32_t kNoSlot = ~uint32_t{0};
inline constexpr uint32_t kScratchSlot = kNoSlot - 1;
inline constexpr uint32_t kNoFifo = ~uint32_t{0};

// A step on one chunk with everything looked up; a step on a range is as many of them, which move together. A slot is a
// place in the rank's memory; in place, input and output share slots. A shape is a class of slices that have the same
// length on every rank because they are the same data.
struct CompiledStep {
  StepOp op;
  bool finalize;
  uint32_t src, dst;                 // slots
  uint32_t in_fifo, out_fifo;        // indices into Program::fifos
  uint32_t in_message, out_message;  // number of the message within one round, over all FIFOs
  uint32_t shape;
  uint32_t source;  // index of the step in its channel
  uint32_t range;   // how many parts of its range follow, this one included
  bool message_first;
};

// One channel of one rank.
struct Process {
  uint32_t rank, channel;
  std::vector<CompiledStep> steps;
};

struct Fifo {
  uint32_t src, dst, channel;
  uint32_t writer = kNoFifo, reader = kNoFifo;  // processes
  uint32_t sends = 0, receives = 0;             // per round
};

struct Program {
  std::span<const Schedule> schedules;
  Collective collective{};
  VerifyOptions options;
  uint32_t n = 0;
  uint32_t input_chunks = 0, output_chunks = 0;
  uint32_t slots = 0;   // per rank
  uint32_t shapes = 0;  // over all ranks
  std::vector<Process> processes;
  std::vector<Fifo> fifos;
  uint32_t messages = 0;  // per round

  uint32_t input_slot(uint32_t rank, uint32_t chunk) const;
  uint32_t output_slot(uint32_t rank, uint32_t chunk) const;
  uint32_t input_shape(uint32_t rank, uint32_t chunk) const;
  uint32_t output_shape(uint32_t rank, uint32_t chunk) const;
  uint32_t work_slot(uint32_t chunk) const { return slots - input_chunks + chunk; }
  // "rank 2 channel 0 step 3 (out[1] = message from 1)"; the index is the source's
  std::string where(uint32_t process, size_t source) const;
};

// Expressions, hash-consed: equal expressions have equal ids. Grouping matters, and so does the order of operands: it
// decides which of two NaNs is kept, and whether min(+0, -0) is -0.
class Expressions {
 public:
  using Id = uint32_t;
  static constexpr Id kNothing = ~Id{0};

  Expressions(uint32_t ranks, uint32_t chunks, uint32_t rounds);
  Id leaf(uint32_t rank, uint32_t chunk, uint32_t round) const;
  // Both throw Violation with the reason; the caller says where.
  Id combine(Id a, Id b);
  Id finalize(Id a);

  bool is_final(Id id) const { return nodes_[id].final; }
  // "[x0+x2 (2 of 4), chunk 1 round 0]"
  std::string describe(Id id) const;
  // The ranks that contribute, in the order they are met from the left; stops after `limit`.
  std::vector<uint32_t> contributors(Id id, size_t limit) const;
  Id rank_order_sum(uint32_t chunk, uint32_t round);
  // The chunk and round all contributions are of, as one number.
  uint32_t subject(Id id) const { return nodes_[id].subject; }

 private:
  struct Node {
    Id a, b;          // b == kNothing: a leaf (a is the rank), or, when final, the finalized a
    uint32_t leaves;  // counted with multiplicity
    uint32_t subject;
    bool final;
  };
  Id intern(Node node);

  uint32_t ranks_, chunks_, rounds_;
  std::vector<Node> nodes_;
  std::unordered_map<uint64_t, Id> ids_;
};

enum class Order : uint8_t { kRoundRobin, kLowestFirst, kHighestFirst, kRandom };
// Executes all processes in this order; throws Violation.
void run(const Program& program, Expressions& expressions, Order order);

// Throws Violation on a data race or a zero-copy hazard. The program must have passed run().
void check_memory_order(const Program& program);

}  // namespace dcoll::plan::internal
