#include "engine/collective/run_collective.h"

#include <cstring>
#include <string>
#include <utility>

#include "engine/collective/adasum.h"
#include "engine/collective/by_schedule.h"
#include "engine/collective/learn_constants.h"
#include "engine/collective/mismatch.h"
#include "engine/levels/hierarchical_agreement.h"
#include "engine/levels/hierarchical_all_reduce.h"
#include "kernels/reduce.h"

namespace dcoll {
namespace {

// Of a call that is not encoded: what encoding lost in those before it goes now, in full. The velocity gathers momentum
// as there, but nothing of it is kept back.
void send_kept(Request& r) {
  const Feedback kept = std::exchange(r.feedback, {});  // once, though the call be begun again beside one that joined
  const auto scale = [&](void* to, const void* from, double factor) {
    kernels::scale(to, from, r.count, DType::kFloat32, factor);
  };
  if (kept.velocity != nullptr) {
    scale(kept.velocity, kept.velocity, kept.momentum);
    scale(r.out, r.out, r.prescale);  // feedback is of what lies behind it
    kernels::reduce2(kept.velocity, kept.velocity, r.out, r.count, DType::kFloat32, ReduceOp::kSum);
    scale(r.out, kept.velocity, 1.0 / r.prescale);
  }
  if (kept.error == nullptr || kept.empty) return;
  scale(kept.error, kept.error, 1.0 / r.prescale);
  kernels::reduce2(r.out, r.out, kept.error, r.count, DType::kFloat32, ReduceOp::kSum);
  std::memset(kept.error, 0, r.count * sizeof(float));
}

// Of one that is encoded: a velocity that other ranks are to gather momentum with goes to them with the gradients.
void send_scattered_velocity(Request& r) {
  Feedback& kept = r.feedback;
  if (kept.velocity == nullptr || !std::exchange(kept.scattered, false)) return;
  kernels::scale(kept.velocity, kept.velocity, r.count, DType::kFloat32, kept.momentum / r.prescale);
  kernels::reduce2(r.out, r.out, kept.velocity, r.count, DType::kFloat32, ReduceOp::kSum);
  std::memset(kept.velocity, 0, r.count * sizeof(float));
}

// Once: that there were values which float16 had no room for.
void tell_saturated(Fabric& f, uint64_t saturated) {
  if (saturated == 0 || std::exchange(f.told_saturated, true)) return;
  f.tell(LogLevel::kWarning, "float16 has no room for " + std::to_string(saturated) +
                                 " of the values sent, which go as +-65504: scale them down (prescale_factor), or use "
                                 "Compression.bf16, which has float32's range");
}

void note_cost(Fabric& f, const Request& r, EncodedCost& cost, int64_t begin_ns) {
  cost.calls = 1;
  cost.total_ns = now_ns() - begin_ns;
  f.encoded_costs.add(r.name, r.encoding, cost);
  tell_saturated(f, cost.saturated);
}

// After a call that was made to find out whether encoding pays.
Task note_trial(Fabric& f, const Call& call, int64_t begin_ns) {
  Trial* const trial = f.trial(call.encoding, call.bytes());
  if (trial == nullptr) co_return;
  std::array<double, 2> medians{};
  co_await note_call(f, *trial, call.bytes(), begin_ns, medians);
  if (trial->is_done()) f.settle(call.encoding, call.bytes(), medians[0], medians[1]);
}

// On two levels, where constants have been learnt after the handshake: it told where the operands are, and is made
// anew.
Task move_on_two_levels(Fabric& f, Operation& op, ReduceJob job, uint64_t ticket) {
  if (wants_constants(f, op.request.call())) {
    co_await learn_constants(f, op.request.call());
    HierarchicalAgreement everybody(*f.hierarchy, op.request.fingerprint(), &job);
    co_await everybody;
    ticket = everybody.ticket();
  }
  op.phases.enter(Phase::kMove);
  op.phases.name_algorithm("hierarchical");
  HierarchicalAllReduce levels(*f.hierarchy, job, ticket);
  co_await levels;
}

}  // namespace

Task learn_slots(Fabric& f) {
  BoardWait everybody(*f.board, f.slots_posted);
  co_await everybody;
  f.slots->learn(f.slots_posted);
  f.pull_slots->learn(f.slots_posted);
  const uint64_t tried = f.board->post({.value = f.pull_slots->can_read_peers() ? 1u : 0u});
  BoardWait everybody_tried(*f.board, tried);
  co_await everybody_tried;
  f.pull_slots->agree_on_reading(tried);
  if (f.size > 1) {
    f.tell(LogLevel::kInfo, f.pull_slots->reads_peers()
                                ? "large tensors of peers are read by the kernel (process_vm_readv), in one copy"
                                : "all tensors of peers but mapped ones are read through slots, in two copies: the "
                                  "kernel does not let every rank read every other's memory (python -m dcoll doctor "
                                  "says why)");
  }
  f.slots_posted = 0;
}

Task note_call(Fabric& f, Trial& trial, size_t bytes, int64_t begin_ns, std::array<double, 2>& medians) {
  trial.note(1e-3 * static_cast<double>(now_ns() - begin_ns), bytes);
  if (!trial.is_to_weigh()) co_return;
  RecordExchange all(f, std::array{trial.median_us_per_byte(false), trial.median_us_per_byte(true)});
  co_await all.executor;
  medians = {};
  for (const auto& one : all.all) {
    for (size_t way = 0; way < medians.size(); ++way) medians[way] += one[way] / f.size;
  }
  trial.weigh(medians[0], medians[1]);
}

Task run_collective(Fabric& f, Operation& op, Entry entry) {
  const Request& r = op.request;
  const Call call = r.call();
  const Path path = path_by_host(f, call);  // what is on a device goes by on_device.cc
  ReduceJob job;
  if (path == Path::kTwoLevels) set_job(job, call, f.size);
  EncodedCost cost;
  op.encoded = encodes(f, call);
  if (op.encoded) job.coded = f.coded(call, cost);
  if (call.encoding && !call.in_full && !op.encoded) f.tell_uncompressed();
  op.encoded ? send_scattered_velocity(op.request) : send_kept(op.request);
  if (path != Path::kNodeDirect && entry.ticket == 0) op.phases.enter(Phase::kAgree);
  if (f.slots_posted != 0) co_await learn_slots(f);
  Handshake handshake(f, op, call, path, entry, path == Path::kTwoLevels ? &job : nullptr);
  if (Pollable* everybody = handshake.everybody()) co_await *everybody;
  if (!handshake.agreed()) {
    co_await resolve_mismatch(f, op);
    co_return;
  }
  if (handshake.done()) co_return;
  if (f.links.until_asked > 0) --f.links.until_asked;

  const int64_t begin_ns = call.encoding ? now_ns() : 0;
  switch (path) {
    case Path::kNodeDirect:
    case Path::kRide:
      break;  // that was all
    case Path::kMeeting:
      if (r.kind == Kind::kShutdown && f.hierarchy != nullptr) {
        NodeBarrier everybody(*f.hierarchy, r.fingerprint());
        co_await everybody;
      }
      if (r.kind == Kind::kJoin) op.counts = {f.size};  // all have joined
      break;
    case Path::kPull: {
      op.phases.enter(Phase::kMove);
      Pull pull(*f.board, *f.pull_slots, op, handshake.ticket());
      op.phases.name_algorithm(pull.form());
      co_await pull;
      break;
    }
    case Path::kTwoLevels:
      co_await move_on_two_levels(f, op, job, handshake.ticket());
      break;
    case Path::kAdasum:
      co_await move_by_adasum(f, op);
      break;
    case Path::kSchedule:
      co_await move_by_schedule(f, op, cost);
      break;
    case Path::kNccl:
    case Path::kOpened:
      break;  // not by the host
  }
  if (job.coded.encoding || cost.elements > 0) note_cost(f, r, cost, begin_ns);
  if (call.encoding.if_it_pays && has_codec(f, call)) co_await note_trial(f, call, begin_ns);
}

}  // namespace dcoll
