#include "engine/collective/by_schedule.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <string_view>

#include "base/error.h"
#include "base/ranks_text.h"
#include "engine/collective/choose_path.h"
#include "engine/collective/learn_constants.h"
#include "engine/collective/mismatch.h"
#include "engine/schedule/encoded_all_reduce.h"
#include "engine/schedule/executor.h"
#include "kernels/reduce.h"
#include "transport/group_transport.h"

namespace dcoll {
namespace {

using plan::Collective;
using plan::Family;

// The algorithm of an all-reduce: as asked for, else as predicted. One rank on every node: the hierarchy's upper level
// is all there is.
Fabric::Fastest choose_algorithm(Fabric& f, const Request& r) {
  const plan::Algorithm* named = r.algo.or_else(f.algo).named();
  if (named != nullptr) return {named, f.slice_bytes};
  return f.fastest(Collective::kAllReduce, r.count * dtype_bytes(r.dtype));
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

// How the elements are combined; a scaled copy of the operand, of an all-reduce in the result, where it has to be
// scaled first.
void bind_reduction(const Fabric& f, const Request& r, DataPhase& phase) {
  Binding& b = phase.binding;
  b.dtype = r.dtype;
  b.op = r.op;
  b.postscale = final_scale(r.op, r.postscale, f.size);
  if (r.prescale == 1.0) return;
  const size_t count = r.count * r.row_elems;
  std::byte* scaled = b.output;
  if (r.kind != Kind::kAllReduce) {  // whose result is shorter
    phase.prescaled = Memory::uninitialized(count * dtype_bytes(r.dtype));
    scaled = phase.prescaled->data();
  }
  kernels::scale(scaled, r.in, count, r.dtype, r.prescale);
  b.input = scaled;
}

DataPhase data_phase(Fabric& f, Operation& op) {
  const Request& r = op.request;
  DataPhase phase;
  Binding& b = phase.binding;
  b.input = static_cast<const std::byte*>(r.in);
  b.output = static_cast<std::byte*>(r.out);
  auto use = [&](const Fabric::Fastest& choice, int root = 0) {
    phase.schedule = f.schedule(*choice.algorithm, root);
    phase.algorithm = choice.algorithm->name;
    phase.slice_bytes = choice.slice_bytes;
  };
  switch (collective_of(r.kind)) {
    case Collective::kAllReduce:
      use(choose_algorithm(f, r));
      b.input_layout = b.output_layout = Layout::even(r.count, phase.schedule->input_chunks);
      break;
    case Collective::kReduceScatter: {
      use(f.fastest(Collective::kReduceScatter, r.count * r.row_elems * dtype_bytes(r.dtype)));
      const std::vector<size_t> lengths = r.shares(f.size);
      b.input_layout = Layout::of(lengths);
      b.output_layout = Layout::of({lengths[f.rank]});
      break;
    }
    case Collective::kBroadcast:
      use(f.fastest(Collective::kBroadcast, r.count), r.root);
      b.input_layout = b.output_layout = Layout::even(r.count, phase.schedule->input_chunks);
      break;
    case Collective::kAllGather: {
      const std::vector<size_t> lengths = bytes_of_rows(op.counts, r.row_elems);
      use(f.fastest(Collective::kAllGather, std::reduce(lengths.begin(), lengths.end())));
      b.output = op.place_output(std::reduce(lengths.begin(), lengths.end()));
      b.input_layout = Layout::of({lengths[f.rank]});
      b.output_layout = Layout::of(lengths);
      break;
    }
    case Collective::kAllToAll: {
      use({&plan::algorithm_of(Collective::kAllToAll, Family::kPairwise), f.slice_bytes});
      const std::vector<size_t> lengths = bytes_of_rows(op.counts, r.row_elems);
      b.output = op.place_output(std::reduce(lengths.begin(), lengths.end()));
      b.input_layout = Layout::of(bytes_of_rows({r.splits.begin(), r.splits.end()}, r.row_elems));
      b.output_layout = Layout::of(lengths);
      break;
    }
  }
  if (reduces(r.kind)) bind_reduction(f, r, phase);
  return phase;
}

// An encoded all-reduce in pieces, some of which are under way at once, each on channels of its own: while one is
// encoded or decoded, the wire has the others' messages.
class EncodedPieces final : public Pollable {
 public:
  EncodedPieces(Fabric& f, const Request& r, const EncodedJob& whole) : request_(r), whole_(whole) {
    const auto channels = [](const plan::Schedule& s) { return s.channels.size(); };
    const size_t each = std::max(channels(*whole.to_owners), channels(*whole.to_everybody));
    const size_t banks = std::clamp<size_t>(kMaxChannels / each, 1, kUnderWay);
    whole_.lanes = kMaxChannels / banks / each;
    flights_.resize(banks);
    for (size_t bank = 0; bank < banks; ++bank) {
      const auto first_channel = static_cast<int>(bank * (kMaxChannels / banks));
      flights_[bank].transport = std::make_unique<GroupTransport>(*f.transport, first_channel);
    }
    const size_t pieces = std::clamp<size_t>(whole.count / kPieceElems, 1, 4 * kUnderWay);
    piece_ = (whole.count / pieces + kernels::kCodecBlock) / kernels::kCodecBlock * kernels::kCodecBlock;
  }

  // Piece k is always on bank k % banks, on every rank.
  bool poll(bool& moved) override {
    bool all_done = true;
    for (Flight& flight : flights_) {
      if (flight.exchange != nullptr && flight.exchange->poll(moved)) flight.exchange.reset();
      if (flight.exchange == nullptr && next_ < whole_.count && &flight == &flights_[turn_]) launch(flight);
      all_done &= flight.exchange == nullptr;
    }
    return all_done && next_ >= whole_.count;
  }
  void waiting_for(std::vector<int>& ranks) const override {
    for (const Flight& flight : flights_) {
      if (flight.exchange != nullptr) flight.exchange->waiting_for(ranks);
    }
    sort_once(ranks);
  }

 private:
  static constexpr size_t kUnderWay = 8;
  static constexpr size_t kPieceElems = size_t{512} << 10;  // at the least, of several
  struct Flight {
    std::unique_ptr<GroupTransport> transport;
    std::unique_ptr<Nested> exchange;
  };

  void launch(Flight& flight) {
    EncodedJob job = whole_;
    job.count = std::min(piece_, whole_.count - next_);
    job.data += next_;
    job.operand += next_;
    if (request_.prescale != 1.0) {
      kernels::scale(job.data, job.operand, job.count, DType::kFloat32, request_.prescale);
      job.operand = job.data;
    }
    job.coded = whole_.coded.from(next_);
    next_ += job.count;
    turn_ = (turn_ + 1) % flights_.size();
    flight.exchange = std::make_unique<Nested>(encoded_all_reduce(*flight.transport, job));
  }

  const Request& request_;
  EncodedJob whole_;
  std::vector<Flight> flights_;
  size_t piece_ = 0, next_ = 0;  // elements of a piece, of all launched
  size_t turn_ = 0;              // whose the next piece is
};

Task move_encoded(Fabric& f, const Operation& op, EncodedCost& cost) {
  const Request& r = op.request;
  EncodedPieces messages(f, r,
                         {.coded = f.coded(r.call(), cost),
                          .operand = static_cast<const float*>(r.in),
                          .data = static_cast<float*>(r.out),
                          .count = r.count,
                          .scale = final_scale(r.op, r.postscale, f.size),
                          .to_owners = f.schedule(Collective::kAllToAll, Family::kPairwise),
                          .to_everybody = f.schedule(Collective::kAllGather, Family::kRing),
                          .slice_bytes = f.slice_bytes});
  co_await messages;
}

}  // namespace

std::vector<size_t> bytes_of_rows(const std::vector<int64_t>& counts, size_t row_bytes) {
  std::vector<size_t> lengths;
  for (const int64_t count : counts) {
    const std::optional<size_t> length = bytes_of_told(static_cast<uint64_t>(count), row_bytes);
    if (!length) {
      throw TransportError("rank " + std::to_string(lengths.size()) + " tells of " + std::to_string(count) +
                           " rows of " + std::to_string(row_bytes) +
                           " bytes, more than any memory holds. Run the same dcoll version on every rank");
    }
    lengths.push_back(*length);
  }
  return lengths;
}

bool wants_coding(const Fabric& f, const Call& call) {
  return call.encoding.if_it_pays && call.kind == Kind::kAllReduce && f.board == nullptr && f.size > 1 &&
         !call.is_small() && f.codings.find(call.encoding) == nullptr;
}

// All ranks answer alike: the call is the same everywhere, but for the sizes of ragged collectives.
bool wants_constants(const Fabric& f, const Call& call) {
  if (wants_coding(f, call)) return true;
  if (f.links.use == LinkConstants::Use::kBuiltIn || f.links.learnt || f.links.until_asked > 0) return false;
  if (call.kind == Kind::kAllReduce) return call.algo.or_else(f.algo).takes_levels();
  return call.kind == Kind::kReduceScatter || call.kind == Kind::kBroadcast || call.kind == Kind::kAllGather;
}

Task exchange_counts(Fabric& f, Operation& op) {
  const Request& r = op.request;
  if (r.kind == Kind::kAllGather) {
    RecordExchange sizes(f, static_cast<int64_t>(r.count));
    co_await sizes.executor;
    op.counts = sizes.all;
    co_return;
  }
  op.counts.resize(static_cast<size_t>(f.size));
  const std::vector<int64_t> mine(r.splits.begin(), r.splits.end());
  const Layout one_each = Layout::even(f.size * sizeof(int64_t), f.size);
  // Of 8 bytes to each, so one hop is better than many, as long as there is room for everybody's at once.
  const Family family = f.size <= static_cast<int>(plan::kMaxDirectRanks) ? Family::kDirect : Family::kPairwise;
  Executor sizes(*f.transport, f.schedule(Collective::kAllToAll, family),
                 {.input = reinterpret_cast<const std::byte*>(mine.data()),
                  .output = reinterpret_cast<std::byte*>(op.counts.data()),
                  .input_layout = one_each,
                  .output_layout = one_each},
                 f.slice_bytes);
  co_await sizes;
}

Task move_by_schedule(Fabric& f, Operation& op, EncodedCost& cost) {
  const Request& r = op.request;
  const bool chooses = r.encoding.codec == Codec::kTopK && r.encoding.exchange == kernels::Exchange::kPredicted;
  if ((!op.encoded || chooses) && wants_constants(f, r.call())) co_await learn_constants(f, r.call());
  if (op.encoded) {
    op.phases.enter(Phase::kMove);
    op.phases.name_algorithm(kernels::codec_name(r.encoding.codec));
    co_await move_encoded(f, op, cost);
    co_return;
  }
  if (is_ragged(r.kind) && op.counts.empty()) {  // else they came with the handshake
    co_await exchange_counts(f, op);
  }
  op.phases.enter(Phase::kPack);
  DataPhase phase = data_phase(f, op);
  op.phases.enter(Phase::kMove);
  op.phases.name_algorithm(phase.algorithm);
  // Over shared memory a slice is there at once; on a network several must be under way.
  const size_t lanes = f.board != nullptr ? 1 : Executor::most_lanes(*phase.schedule);
  Executor executor(*f.transport, phase.schedule, phase.binding, phase.slice_bytes, lanes);
  co_await executor;
}

}  // namespace dcoll
