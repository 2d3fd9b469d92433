#include "engine/collective.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/error.h"
#include "engine/adasum.h"
#include "engine/executor.h"
#include "engine/hierarchical_agreement.h"
#include "engine/hierarchical_all_reduce.h"
#include "engine/join.h"
#include "engine/mismatch.h"
#include "engine/rider.h"
#include "kernels/reduce.h"
#include "plan/algorithms.h"
#include "plan/select.h"

namespace dcoll {

using plan::Collective;

std::shared_ptr<const plan::Schedule> Fabric::schedule(Collective collective, const std::string& algorithm, int root) {
  for (const Cached& entry : cache_) {
    if (entry.collective == collective && entry.algorithm == algorithm && entry.root == root) return entry.schedule;
  }
  const plan::Algorithm* found = plan::find_algorithm(collective, algorithm);
  if (found == nullptr) {
    throw ArgumentError("No algorithm '" + algorithm + "' for this collective; allowed are " +
                        plan::algorithm_names(collective) + ".");
  }
  auto built = std::make_shared<const plan::Schedule>(
      found->build(static_cast<uint32_t>(size), static_cast<uint32_t>(rank), static_cast<uint32_t>(root)));
  cache_.push_back({collective, algorithm, root, built});
  return built;
}

// Sizes are rounded up to a power of two: the model is asked once for each, and all ranks ask for the same.
const Fabric::Fastest& Fabric::fastest(Collective collective, size_t bytes) {
  const size_t rounded = std::bit_ceil(std::max<size_t>(bytes, 1));
  Fastest& known = fastest_[static_cast<size_t>(collective)][std::countr_zero(rounded)];
  if (known.algorithm.empty()) {
    const plan::Choice choice = plan::select(collective, rounded, topology, slice_bytes);
    known = {std::string(choice.algorithm->name), static_cast<size_t>(choice.slice_bytes)};
  }
  return known;
}

// All ranks share memory: every rank learns where the others' slots are, as the first post on the board.
void Fabric::connect_slots() {
  board = std::make_unique<Board>(*window);
  slots = std::make_unique<Slots>(window, *board, topology.shared_cores);
  all_reduce = std::make_unique<NodeAllReduce>(*board, *slots);
  pull_slots = std::make_unique<PullSlots>(window, *board, topology.shared_cores);
  pull_now = std::make_unique<PullNow>(*board, *pull_slots);
  slots_posted = board->post({.offset_in = pull_slots->own_offset(), .value = slots->own_offset()});
}

namespace {

ReduceJob job_of(const ReduceCall& call, int size) {
  return {static_cast<const std::byte*>(call.in),
          static_cast<std::byte*>(call.out),
          call.count,
          call.dtype,
          call.op,
          call.prescale,
          final_scale(call.op, call.postscale, size),
          false,
          call.tensors,
          call.into_tensors};
}

// Shows the others the all-reduce, with the operand where it is small or staged.
void enter(NodeAllReduce& all_reduce, ReduceJob job, uint64_t fingerprint, Phases& phases) {
  job.timed = phases.on;
  phases.enter(Phase::kPack);
  all_reduce.enter(job, fingerprint);
  phases.enter_at(Phase::kAgree, all_reduce.entered_ns());
}

// Whether an all-reduce takes a direct form over mapped memory rather than a schedule.
bool use_direct(const Fabric& fabric, std::string_view algo, ReduceOp op) {
  if (fabric.all_reduce == nullptr || op == ReduceOp::kAdasum) return false;
  if (algo.empty()) algo = fabric.algo;
  return algo == "auto" || algo == "direct" || algo == "hierarchical";
}

// Whether it works on two levels: by default, where there are two.
bool use_hierarchy(const Fabric& fabric, const Request& r) {
  if (fabric.hierarchy == nullptr || r.kind != Kind::kAllReduce || r.op == ReduceOp::kAdasum) return false;
  const std::string& algo = r.algo.empty() ? fabric.algo : r.algo;
  return algo == "auto" || algo == "hierarchical";
}

// The same for the other collectives, which have no algorithm of their own to choose.
bool use_pull(const Fabric& fabric, Kind kind) {
  return Pull::suits(kind) && fabric.board != nullptr &&
         (fabric.algo == "auto" || fabric.algo == "direct" || fabric.algo == "hierarchical");
}

// The algorithm of an all-reduce: as asked for, else as predicted.
Fabric::Fastest choose_algorithm(Fabric& fabric, const Request& r) {
  const std::string& algo = r.algo.empty() ? fabric.algo : r.algo;
  // One rank on every node: the hierarchy's upper level is all there is.
  if (algo != "auto" && algo != "hierarchical") return {algo, fabric.slice_bytes};
  return fabric.fastest(Collective::kAllReduce, r.count * dtype_bytes(r.dtype));
}

// Whether the constants of the cost model are wanted now, for the first time. All ranks answer alike: the call is the
// same everywhere, but for the sizes of ragged collectives.
bool wants_constants(const Fabric& fabric, const Request& r) {
  if (fabric.links.use == LinkConstants::Use::kBuiltIn || fabric.links.learnt) return false;
  if (r.kind == Kind::kAllReduce) {
    const std::string& algo = r.algo.empty() ? fabric.algo : r.algo;
    return algo == "auto" || algo == "hierarchical";
  }
  return r.kind == Kind::kReduceScatter || r.kind == Kind::kBroadcast || r.kind == Kind::kAllGather;
}

std::vector<size_t> split_rows(size_t rows, int size, size_t row_elems) {
  const Layout layout = Layout::even(rows, size);
  std::vector<size_t> lengths;
  for (int rank = 0; rank < size; ++rank) lengths.push_back(layout.chunk(rank).len * row_elems);
  return lengths;
}

std::vector<size_t> scaled(const std::vector<int64_t>& counts, size_t factor) {
  std::vector<size_t> lengths;
  for (const int64_t count : counts) lengths.push_back(static_cast<size_t>(count) * factor);
  return lengths;
}

size_t sum(const std::vector<size_t>& values) {
  size_t total = 0;
  for (const size_t value : values) total += value;
  return total;
}

// The schedule and the buffers of the data phase. Allocates the result of ragged collectives, whose sizes are known
// now.
struct DataPhase {
  std::shared_ptr<const plan::Schedule> schedule;
  std::string_view algorithm;  // its name in the registry
  size_t slice_bytes = 0;
  Binding binding;
  std::shared_ptr<Memory> prescaled;
};

DataPhase data_phase(Fabric& f, Operation& op) {
  const Request& r = op.request;
  DataPhase phase;
  Binding& b = phase.binding;
  b.input = static_cast<const std::byte*>(r.in);
  b.output = static_cast<std::byte*>(r.out);
  auto use = [&](Collective collective, const Fabric::Fastest& choice, int root) {
    phase.schedule = f.schedule(collective, choice.algorithm, root);
    phase.algorithm = plan::find_algorithm(collective, choice.algorithm)->name;
    phase.slice_bytes = choice.slice_bytes;
  };
  switch (r.kind) {
    case Kind::kAllReduce:
      use(Collective::kAllReduce, choose_algorithm(f, r), 0);
      b.input_layout = b.output_layout = Layout::even(r.count, phase.schedule->input_chunks);
      break;
    case Kind::kReduceScatter: {
      use(Collective::kReduceScatter,
          f.fastest(Collective::kReduceScatter, r.count * r.row_elems * dtype_bytes(r.dtype)), 0);
      const std::vector<size_t> lengths = r.splits.empty() ? split_rows(r.count, f.size, r.row_elems) : r.splits;
      b.input_layout = Layout::of(lengths);
      b.output_layout = Layout::of({lengths[f.rank]});
      break;
    }
    case Kind::kBroadcast:
      use(Collective::kBroadcast, f.fastest(Collective::kBroadcast, r.count), r.root);
      b.input_layout = b.output_layout = Layout::even(r.count, phase.schedule->input_chunks);
      break;
    case Kind::kAllGather: {
      const std::vector<size_t> lengths = scaled(op.counts, r.row_elems);
      use(Collective::kAllGather, f.fastest(Collective::kAllGather, sum(lengths)), 0);
      b.output = op.place_output(sum(lengths));
      b.input_layout = Layout::of({lengths[f.rank]});
      b.output_layout = Layout::of(lengths);
      break;
    }
    case Kind::kAllToAll: {
      use(Collective::kAllToAll, {"pairwise", f.slice_bytes}, 0);
      const std::vector<size_t> lengths = scaled(op.counts, r.row_elems);
      b.output = op.place_output(sum(lengths));
      b.input_layout = Layout::of(scaled({r.splits.begin(), r.splits.end()}, r.row_elems));
      b.output_layout = Layout::of(lengths);
      break;
    }
    case Kind::kBarrier:
    case Kind::kShutdown:
    case Kind::kJoin:
      break;
  }
  if (r.kind == Kind::kAllReduce || r.kind == Kind::kReduceScatter) {
    b.dtype = r.dtype;
    b.op = r.op;
    b.postscale = final_scale(r.op, r.postscale, f.size);
    if (r.prescale != 1.0) {
      const size_t count = r.count * (r.kind == Kind::kReduceScatter ? r.row_elems : 1);
      phase.prescaled = Memory::plain(count * dtype_bytes(r.dtype));
      kernels::scale(phase.prescaled->data(), r.in, count, r.dtype, r.prescale);
      b.input = phase.prescaled->data();
    }
  }
  return phase;
}

}  // namespace

void note_agreement(const NodeAllReduce& all_reduce, Phases& phases) {
  if (!phases.on) return;
  phases.enter_at(Phase::kMove, all_reduce.agreed_ns());
  phases.name_algorithm(all_reduce.form());
}

Task run_collective(Fabric& f, Operation& op, Entry entry) {
  const Request& r = op.request;
  const bool direct = r.kind == Kind::kAllReduce && use_direct(f, r.algo, r.op);
  const bool two_levels = use_hierarchy(f, r);
  const bool pulls = use_pull(f, r.kind);
  const ReduceJob job = direct || two_levels ? job_of(r.reduce_call(), f.size) : ReduceJob{};
  bool equal = true;

  // A pull copies the root's own block like any other, while peers copy theirs. Schedules work in the output.
  if (r.kind == Kind::kBroadcast && !pulls && f.rank == r.root && r.in != r.out && r.count > 0) {
    std::memcpy(r.out, r.in, r.count);
  }
  if (!direct && entry.ticket == 0) op.phases.enter(Phase::kAgree);

  // 0. Once: where everybody's slots are.
  if (f.slots_posted != 0) {
    BoardWait everybody(*f.board, f.slots_posted);
    co_await everybody;
    f.slots->learn(f.slots_posted);
    f.pull_slots->learn(f.slots_posted);
    const uint64_t tried = f.board->post({.value = f.pull_slots->can_read_peers() ? 1u : 0u});
    BoardWait everybody_tried(*f.board, tried);
    co_await everybody_tried;
    f.pull_slots->agree_on_reading(tried);
    f.slots_posted = 0;
  }

  if (entry.taken) {
    BoardWait everybody(*f.board, entry.ticket);
    co_await everybody;
    co_return;
  }

  // 1. Everybody shows what it called. For a direct all-reduce that is also the first barrier, often the only one.
  uint64_t ticket = entry.ticket;
  if (direct) {
    if (!entry.all_reduce) enter(*f.all_reduce, job, r.fingerprint(), op.phases);
    co_await *f.all_reduce;
    note_agreement(*f.all_reduce, op.phases);
    if (f.all_reduce->outcome() == NodeAllReduce::Outcome::kDone) co_return;
    equal = false;
  } else if (f.size > 1 && f.board != nullptr) {
    if (ticket == 0 && pulls) {
      ticket = Pull::enter(*f.board, *f.pull_slots, PullCall::of(r));
    } else if (ticket == 0) {
      ticket = f.board->post({r.fingerprint(), Window::kUnmapped, Window::kUnmapped, r.count});
    }
    BoardWait everybody(*f.board, ticket);
    co_await everybody;
    equal = f.board->fingerprints_equal(ticket);
  } else if (f.hierarchy != nullptr) {
    HierarchicalAgreement everybody(*f.hierarchy, r.fingerprint(), two_levels ? &job : nullptr);
    co_await everybody;
    if (everybody.reduced()) {
      op.phases.name_algorithm("hierarchical");  // it rode along with the agreement
      op.phases.enter(Phase::kMove);
      co_return;
    }
    equal = everybody.equal();
    ticket = everybody.ticket();
  } else if (f.size > 1) {
    const Rider rider(r, f.algo, f.size, f.slice_bytes);
    Dissemination everybody(*f.transport, r.fingerprint(), rider.operand());
    co_await everybody;
    equal = everybody.equal();
    if (equal && rider.arrive(everybody, op)) co_return;
  }
  if (!equal) {
    Mismatch calls(f, op);
    co_await calls.exchange();
    Nested rest(calls.resolve(f, op));
    co_await rest;
    co_return;
  }
  if (r.kind == Kind::kShutdown && f.hierarchy != nullptr) {
    NodeBarrier everybody(*f.hierarchy, r.fingerprint());
    co_await everybody;
  }
  if (r.kind == Kind::kJoin) op.counts = {f.size};  // all have joined
  if (r.kind == Kind::kBarrier || r.kind == Kind::kShutdown || r.kind == Kind::kJoin) co_return;

  if (pulls) {
    op.phases.enter(Phase::kMove);
    op.phases.name_algorithm("pull");
    Pull pull(*f.board, *f.pull_slots, op, ticket);
    co_await pull;
    co_return;
  }

  if (r.kind == Kind::kAllReduce && r.op == ReduceOp::kAdasum) {
    op.phases.enter(Phase::kMove);
    op.phases.name_algorithm("adasum");
    Adasum adasum(f, r);
    co_await adasum;
    co_return;
  }

  // 2. Ragged collectives: how many rows come from whom.
  if (r.kind == Kind::kAllGather && op.counts.empty()) {  // else they came with the handshake
    const auto rows = static_cast<int64_t>(r.count);
    RecordExchange sizes(f, &rows, sizeof rows);
    co_await sizes.executor;
    op.counts.resize(f.size);
    std::memcpy(op.counts.data(), sizes.all.data(), sizes.all.size());
  } else if (r.kind == Kind::kAllToAll) {
    const std::vector<int64_t> mine(r.splits.begin(), r.splits.end());
    op.counts.resize(f.size);
    const Layout one_each = Layout::even(f.size * sizeof(int64_t), f.size);
    Executor sizes(*f.transport, f.schedule(Collective::kAllToAll, "pairwise", 0),
                   {.input = reinterpret_cast<const std::byte*>(mine.data()),
                    .output = reinterpret_cast<std::byte*>(op.counts.data()),
                    .input_layout = one_each,
                    .output_layout = one_each},
                   f.slice_bytes);
    co_await sizes;
  }

  // 3. Once, where several nodes let algorithms differ: what messages cost here.
  if (wants_constants(f, r)) {
    Nested learnt(learn_constants(f));
    co_await learnt;
    if (two_levels) {  // where the operands are, anew
      HierarchicalAgreement everybody(*f.hierarchy, r.fingerprint(), &job);
      co_await everybody;
      ticket = everybody.ticket();
    }
  }

  // 4. The data.
  if (two_levels) {
    op.phases.enter(Phase::kMove);
    op.phases.name_algorithm("hierarchical");
    HierarchicalAllReduce levels(*f.hierarchy, job, ticket);
    co_await levels;
  } else {
    op.phases.enter(Phase::kPack);
    DataPhase phase = data_phase(f, op);
    op.phases.enter(Phase::kMove);
    op.phases.name_algorithm(phase.algorithm);
    // Over shared memory a slice is there at once; on a network several must be under way.
    const size_t lanes = f.board != nullptr ? 1 : Executor::most_lanes(*phase.schedule);
    Executor executor(*f.transport, phase.schedule, phase.binding, phase.slice_bytes, lanes);
    co_await executor;
  }
}

Task start_collective(Fabric& fabric, Operation& operation) {
  const Request& r = operation.request;
  return r.kind == Kind::kJoin && r.count != kOneRound ? run_join(fabric, operation)
                                                       : run_collective(fabric, operation);
}

bool pulls_now(const Fabric& fabric, Kind kind) {
  if (fabric.board == nullptr || fabric.slots_posted != 0) return false;
  return kind == Kind::kBarrier || use_pull(fabric, kind);
}

TwoShot::Slice own_slice(const Fabric& fabric, const ReduceCall& call) {
  if (!use_direct(fabric, call.algo, call.op)) return {};
  return fabric.all_reduce->own_slice(call);
}

bool enter_all_reduce(Fabric& fabric, const ReduceCall& call, Phases& phases) {
  if (fabric.slots_posted != 0 || !use_direct(fabric, call.algo, call.op)) return false;
  enter(*fabric.all_reduce, job_of(call, fabric.size), call.fingerprint(), phases);
  return true;
}

}  // namespace dcoll
