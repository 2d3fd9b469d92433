// The verifier rejects every mutant of a right schedule.
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "plan/names.h"
#include "plan/steps.h"
#include "plan/verify.h"
#include "support/check.h"

using dcoll::test::full_name;
using namespace dcoll::plan;
using namespace dcoll::plan::steps;

namespace {

// Mutants of one step that cannot be equivalent to the original, with names.
struct Mutant {
  std::string name;
  std::vector<Step> replacement;
};

// Whether the channel keeps a copy of this input chunk in an output chunk of the same number.
bool is_copied(const Channel& channel, uint32_t chunk) {
  return std::any_of(channel.steps.begin(), channel.steps.end(), [&](const Step& s) {
    return s.op == StepOp::kCopy && s.src == BufferId::kInput && s.chunk == chunk && s.src_chunk == chunk;
  });
}

std::vector<Mutant> mutants_of(const Step& step, const Schedule& schedule, const Channel& channel) {
  std::vector<Mutant> mutants;
  auto with = [&](const char* name, auto edit) {
    Step changed = step;
    edit(changed);
    mutants.push_back({name, {changed}});
  };
  const uint32_t n = schedule.num_ranks;
  auto other_rank = [&](uint16_t rank) {  // neither the one it was nor ourselves
    uint32_t other = (rank + 1u) % n;
    if (other == schedule.rank) other = (other + 1) % n;
    return static_cast<uint16_t>(other);
  };
  auto next_chunk = [&](BufferId buffer, uint32_t chunk) {
    return (chunk + 1) % (buffer == BufferId::kOutput ? schedule.output_chunks : schedule.input_chunks);
  };
  const bool talks = receives(step.op) || sends(step.op);

  mutants.push_back({"dropped", {}});
  // A repeated copy changes nothing, everything else does.
  if (step.op != StepOp::kCopy) mutants.push_back({"duplicated", {step, step}});
  if (talks && n > 2) with("other peer", [&](Step& s) { s.peer = other_rank(s.peer); });
  if (talks) with("itself as peer", [&](Step& s) { s.peer = static_cast<uint16_t>(schedule.rank); });
  if (talks) with("missing peer", [&](Step& s) { s.peer = static_cast<uint16_t>(n); });
  if (sends(step.op) && step.op != StepOp::kSend && n > 2) {
    with("other destination", [&](Step& s) { s.to = other_rank(s.to); });
  }
  if (step.dst != BufferId::kNone) {
    if (next_chunk(step.dst, step.chunk) != step.chunk) {
      with("other dst chunk", [&](Step& s) { s.chunk = next_chunk(s.dst, s.chunk); });
    }
    with("dst chunk out of range", [&](Step& s) { s.chunk = schedule.input_chunks + schedule.output_chunks; });
    with("dst is the input", [](Step& s) { s.dst = BufferId::kInput; });
    with("no dst", [](Step& s) { s.dst = BufferId::kNone; });
  }
  if (step.src != BufferId::kNone) {
    if (next_chunk(step.src, step.src_chunk) != step.src_chunk) {
      with("other src chunk", [&](Step& s) { s.src_chunk = next_chunk(s.src, s.src_chunk); });
    }
    with("src chunk out of range", [&](Step& s) { s.src_chunk = schedule.input_chunks + schedule.output_chunks; });
  }
  if (step.count > 1) with("a shorter range", [](Step& s) { --s.count; });
  if (schedule.longest_range > 1 && step.op != StepOp::kCopy) with("a longer range", [](Step& s) { ++s.count; });
  with("an empty range", [](Step& s) { s.count = 0; });
  if (step.src == BufferId::kInput) with("src is the output", [](Step& s) { s.src = BufferId::kOutput; });
  if (step.src == BufferId::kOutput && !is_copied(channel, step.src_chunk))
    with("src is the input", [](Step& s) { s.src = BufferId::kInput; });
  if (step.op == StepOp::kRecvReduce || step.op == StepOp::kRecvReduceSend) {
    with("received, not reduced", [](Step& s) {
      s.op = s.op == StepOp::kRecvReduce ? StepOp::kRecv : StepOp::kRecvSend;
      s.src = BufferId::kNone;
      s.finalize = false;
    });
  }
  if (step.op == StepOp::kReduce) with("copied, not reduced", [](Step& s) { s.op = StepOp::kCopy; });
  if (step.finalize) with("not finalized", [](Step& s) { s.finalize = false; });
  if (!step.finalize) with("finalized", [](Step& s) { s.finalize = true; });
  return mutants;
}

// Whether `second` depends on coming after `first`: messages of one FIFO, or memory written and then read.
bool dependent(const Step& first, const Step& second) {
  if (sends(first.op) && sends(second.op) && destination(first) == destination(second)) return true;
  if (receives(first.op) && receives(second.op) && first.peer == second.peer) return true;
  return first.dst != BufferId::kNone && first.dst == second.src && first.chunk == second.src_chunk;
}

struct Tally {
  int mutants = 0;
  int survivors = 0;
  std::string first_survivor;
};

void judge(const std::vector<Schedule>& mutant, const Algorithm& algorithm, const std::string& what, Tally& tally) {
  ++tally.mutants;
  VerifyOptions options;
  options.rank_order = algorithm.name == "direct";  // or swapping two of its additions would be as good
  if (!verify(mutant, algorithm.collective, options)) return;
  if (tally.survivors++ == 0) tally.first_survivor = full_name(algorithm) + ": " + what;
}

void mutate_all_steps(const Algorithm& algorithm, uint32_t n, Tally& tally) {
  const std::vector<Schedule> original = build_all(algorithm, n);
  CHECK(verify(original, algorithm.collective));
  std::vector<Schedule> mutant = original;
  for (uint32_t rank = 0; rank < n; ++rank) {
    for (size_t c = 0; c < original[rank].channels.size(); ++c) {
      const std::vector<Step>& before = original[rank].channels[c].steps;
      std::vector<Step>& steps = mutant[rank].channels[c].steps;
      for (size_t i = 0; i < before.size(); ++i) {
        const std::string where = std::to_string(n) + " ranks, rank " + std::to_string(rank) + " channel " +
                                  std::to_string(c) + " step " + std::to_string(i) + " (" + describe(before[i]) + ") ";
        for (const Mutant& m : mutants_of(before[i], original[rank], original[rank].channels[c])) {
          steps = before;
          steps.erase(steps.begin() + i);
          steps.insert(steps.begin() + i, m.replacement.begin(), m.replacement.end());
          judge(mutant, algorithm, where + m.name, tally);
        }
        steps = before;
        if (i + 1 < before.size() && dependent(before[i], before[i + 1])) {
          std::swap(steps[i], steps[i + 1]);
          judge(mutant, algorithm, where + "swapped with the next", tally);
          steps = before;
        }
      }
      if (before.empty()) continue;
      mutant[rank].channels[c].send_on = static_cast<uint8_t>((send_channel(original[rank].channels[c], c) + 1) % 8);
      bool sends_something = false;
      for (const Step& step : before) sends_something |= sends(step.op);
      if (sends_something)
        judge(mutant, algorithm, "rank " + std::to_string(rank) + " sends on another channel", tally);
      mutant[rank].channels[c].send_on = original[rank].channels[c].send_on;
    }
  }
}

}  // namespace

TEST(every_mutant_is_rejected) {
  Tally tally;
  for (const Algorithm& algorithm : algorithms()) {
    for (const uint32_t n : {2u, 3u, 4u, 5u, 7u}) mutate_all_steps(algorithm, n, tally);
  }
  std::printf("     %d mutants, %d survived\n", tally.mutants, tally.survivors);
  CHECK_EQ(tally.first_survivor, std::string());
  CHECK(tally.mutants > 25000);
}

TEST_MAIN
