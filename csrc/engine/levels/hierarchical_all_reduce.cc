#include "engine/levels/hierarchical_all_reduce.h"

#include <algorithm>
#include <string>

#include "base/ranks_text.h"
#include "engine/core/memory.h"
#include "kernels/reduce.h"

namespace dcoll {
namespace {

constexpr size_t kAhead = Hierarchy::kPieces;

}  // namespace

HierarchicalAllReduce::HierarchicalAllReduce(Hierarchy& hierarchy, const ReduceJob& job, uint64_t ticket)
    : h_(hierarchy),
      job_(job),
      carriers_(h_.carriers_for(job.bytes())),
      base_(h_.pieces_begun),
      pieces_(job.bytes(), h_.piece_bytes(job.bytes(), carriers_, static_cast<bool>(job.coded.encoding)),
              Hierarchy::kLine) {
  h_.tell_missing({});
  Board& board = h_.board();
  for (int local = 0; local < h_.local_size(); ++local) {
    const uint64_t offset = board.at(local, ticket).offset_in;
    ins_.push_back(offset == Window::kUnmapped ? nullptr : board.place(local, offset, job.bytes()));
  }
  for (int carrier = 0; carrier < carriers_; ++carrier) {
    const uint64_t offset = board.at(carrier, ticket).offset_out;
    outs_.push_back(offset == Window::kUnmapped ? nullptr : board.place(carrier, offset, job.bytes()));
  }
  h_.pieces_begun += pieces_.count;
  if (carries()) {
    if (job.coded.encoding) {
      channels_ = h_.encoded().channels;
    } else {
      const Hierarchy::Between& between = h_.between(job.bytes() / carriers_, carriers_);
      schedule_ = between.schedule;
      channels_ = between.channels;
    }
    banks_ = std::clamp<size_t>(kMaxChannels / channels_, 1, kAhead);
  }
  if (ins_[h_.local_rank()] != nullptr) {
    fill_.piece = pieces_.count;
    publish(&NodeShared::filled, pieces_.count);
  }
}

Span HierarchicalAllReduce::part(Span whole, size_t index, size_t parts) {
  const Span part = part_on_lines(whole.size(), Hierarchy::kLine, index, parts);
  return {whole.begin + part.begin, whole.begin + part.end};
}

// What this rank adds up: a part of the slice whose team it is in.
Span HierarchicalAllReduce::share(size_t k) const {
  const int carrier = h_.local_rank() % carriers_;
  const int team = (h_.local_size() - carrier + carriers_ - 1) / carriers_;
  return part(slice(k, carrier), h_.local_rank() / carriers_, team);
}

const std::byte* HierarchicalAllReduce::operand(int local, size_t k, size_t at) const {
  if (local == h_.local_rank() && job_.prescale == 1.0) return job_.in + at;
  if (ins_[local] != nullptr) return ins_[local] + at;
  return h_.operand_slot(local, number(k)) + (at - piece(k).begin);
}

std::byte* HierarchicalAllReduce::result(int carrier, size_t k, size_t at) const {
  if (outs_[carrier] != nullptr) return outs_[carrier] + at;
  return h_.result_slot(carrier, number(k)) + (at - slice(k, carrier).begin);
}

// Acquires what `local` has counted. Nobody can be further than the end of this all-reduce.
uint64_t HierarchicalAllReduce::counted(Count count, int local) const {
  const uint64_t pieces = (h_.shared(local).*count).pieces.load(std::memory_order_acquire);
  if (pieces > base_ + pieces_.count) [[unlikely]] {
    h_.board().throw_damaged(local, " counts " + std::to_string(pieces) + " pieces of " +
                                        std::to_string(base_ + pieces_.count) + " that there are");
  }
  return pieces;
}

bool HierarchicalAllReduce::all_counted(Count count, uint64_t pieces) const {
  for (int local = 0; local < h_.local_size(); ++local) {
    if (counted(count, local) < pieces) return false;
  }
  return true;
}

void HierarchicalAllReduce::publish(Count count, size_t pieces) {
  (h_.own().*count).pieces.store(base_ + pieces, std::memory_order_release);
  h_.board().window().notify_all();
}

bool HierarchicalAllReduce::poll(bool& moved) {
  // The network first: what it waits for is worth most. Then in the order in which it needs the rest, one portion.
  moved |= move_network();
  if (reduce_some() || fill_some() || take_some()) moved = true;
  return finished();
}

bool HierarchicalAllReduce::finished() const {
  if (take_.piece < pieces_.count) return false;
  // A result of ours that peers read in place may be changed by the caller as soon as we return.
  const bool read_by_peers = carries() && outs_[h_.local_rank()] != nullptr;
  return !read_by_peers || all_counted(&NodeShared::taken, base_ + pieces_.count);
}

bool HierarchicalAllReduce::may_launch(size_t k) const {
  if (k >= pieces_.count || k - arrived_ >= banks_) return false;
  for (int local = h_.local_rank(); local < h_.local_size(); local += carriers_) {
    if (counted(&NodeShared::reduced, local) <= number(k)) return false;
  }
  return true;
}

void HierarchicalAllReduce::launch(size_t k) {
  const Span mine = slice(k, h_.local_rank());
  Flight flight;
  flight.transport = h_.carriers(static_cast<int>(k % banks_), channels_);
  flight.exchange = exchange(*flight.transport, result(h_.local_rank(), k, mine.begin), mine);
  flights_.push_back(std::move(flight));
}

// Between nodes, of a slice whose sum over this node lies at `data`.
std::unique_ptr<Pollable> HierarchicalAllReduce::exchange(GroupTransport& carriers, std::byte* data, Span mine) const {
  const size_t elem = dtype_bytes(job_.dtype);
  if (job_.coded.encoding) {
    const Hierarchy::Encoded& encoded = h_.encoded();
    return std::make_unique<Nested>(encoded_all_reduce(carriers, {.coded = job_.coded.from(mine.begin / elem),
                                                                  .operand = reinterpret_cast<const float*>(data),
                                                                  .data = reinterpret_cast<float*>(data),
                                                                  .count = mine.size() / elem,
                                                                  .scale = job_.postscale,
                                                                  .to_owners = encoded.to_owners,
                                                                  .to_everybody = encoded.to_everybody,
                                                                  .slice_bytes = h_.slice_bytes()}));
  }
  const Layout layout = Layout::even(mine.size() / elem, schedule_->input_chunks);
  return std::make_unique<Executor>(carriers, schedule_,
                                    Binding{.input = data,
                                            .output = data,
                                            .input_layout = layout,
                                            .output_layout = layout,
                                            .dtype = job_.dtype,
                                            .op = job_.op,
                                            .postscale = job_.postscale},
                                    h_.slice_bytes());
}

bool HierarchicalAllReduce::move_network() {
  if (!carries()) return false;
  bool moved = false;
  while (may_launch(launched_)) {
    launch(launched_++);
    moved = true;
  }
  bool first = true;  // pieces arrive in order
  for (auto flight = flights_.begin(); flight != flights_.end();) {
    if (flight->exchange == nullptr || flight->exchange->poll(moved)) {
      flight->exchange.reset();
      if (first) {
        flight = flights_.erase(flight);
        publish(&NodeShared::arrived, ++arrived_);
        moved = true;
        continue;
      }
    }
    first = false;
    ++flight;
  }
  return moved;
}

bool HierarchicalAllReduce::may_reduce(size_t k) const {
  if (!all_counted(&NodeShared::filled, number(k) + 1)) return false;
  const bool in_place = outs_[h_.local_rank() % carriers_] != nullptr;
  return in_place || number(k) < kAhead || all_counted(&NodeShared::taken, number(k) + 1 - kAhead);
}

// A portion of this rank's share of the next piece. False when there is nothing to do now.
bool HierarchicalAllReduce::reduce_some() {
  if (reduce_.piece == pieces_.count || (reduce_.at == 0 && !may_reduce(reduce_.piece))) return false;
  const size_t k = reduce_.piece, elem = dtype_bytes(job_.dtype);
  const Span mine = share(k);
  const size_t at = mine.begin + reduce_.at, bytes = std::min(kBytesPerPoll, mine.size() - reduce_.at);
  if (bytes > 0) {
    sources_.clear();
    for (int local = 0; local < h_.local_size(); ++local) sources_.push_back(operand(local, k, at));
    kernels::reduce_n(result(h_.local_rank() % carriers_, k, at), sources_, bytes / elem, job_.dtype, job_.op);
  }
  reduce_.at += bytes;
  if (reduce_.at == mine.size()) {
    reduce_ = {k + 1, 0};
    publish(&NodeShared::reduced, reduce_.piece);
  }
  return true;
}

bool HierarchicalAllReduce::may_fill(size_t k) const {
  return number(k) < kAhead || all_counted(&NodeShared::reduced, number(k) + 1 - kAhead);
}

bool HierarchicalAllReduce::fill_some() {
  if (fill_.piece == pieces_.count || (fill_.at == 0 && !may_fill(fill_.piece))) return false;
  const size_t k = fill_.piece;
  const Span whole = piece(k);
  // Nobody but this rank reads its share, and this rank where it is, unless that has to be scaled first.
  const Span own = job_.prescale == 1.0 ? share(k) : Span{whole.end, whole.end};
  const size_t own_at = own.begin - whole.begin;
  if (fill_.at == own_at) fill_.at += own.size();
  const size_t end = fill_.at < own_at ? own_at : whole.size();
  const size_t bytes = std::min(kBytesPerPoll, end - fill_.at);
  std::byte* to = h_.operand_slot(h_.local_rank(), number(k)) + fill_.at;
  const std::byte* from = job_.in + whole.begin + fill_.at;
  kernels::scale(to, from, bytes / dtype_bytes(job_.dtype), job_.dtype, job_.prescale);
  fill_.at += bytes;
  if (fill_.at == whole.size()) {
    fill_ = {k + 1, 0};
    publish(&NodeShared::filled, fill_.piece);
  }
  return true;
}

bool HierarchicalAllReduce::take_some() {
  if (take_.piece == pieces_.count) return false;
  const size_t k = take_.piece;
  if (take_.at == 0) {
    for (int carrier = 0; carrier < carriers_; ++carrier) {
      if (counted(&NodeShared::arrived, carrier) <= number(k)) return false;
    }
  }
  // Slice by slice, beginning with the own one, so that not all ranks read the same carrier's memory.
  size_t room = kBytesPerPoll, skip = take_.at;
  for (int i = 0; i < carriers_ && room > 0; ++i) {
    const int carrier = (h_.local_rank() + i) % carriers_;
    const Span theirs = slice(k, carrier);
    const size_t before = std::min(skip, theirs.size()), bytes = std::min(room, theirs.size() - before);
    skip -= before;
    const size_t at = theirs.begin + before;
    const std::byte* from = result(carrier, k, at);
    copy_bytes(job_.out + at, from, bytes);
    take_.at += bytes;
    room -= bytes;
  }
  if (take_.at == piece(k).size()) {
    take_ = {k + 1, 0};
    publish(&NodeShared::taken, take_.piece);
  }
  return true;
}

void HierarchicalAllReduce::add_uncounted(Count count, uint64_t pieces, std::vector<int>& ranks) const {
  for (int local = 0; local < h_.local_size(); ++local) {
    if ((h_.shared(local).*count).pieces.load(std::memory_order_acquire) < pieces) {
      ranks.push_back(h_.map().rank_of(local));
    }
  }
}

void HierarchicalAllReduce::waiting_for(std::vector<int>& ranks) const {
  std::vector<int> missing;
  for (const Flight& flight : flights_) {
    if (flight.exchange == nullptr) continue;
    std::vector<int> nodes;
    flight.exchange->waiting_for(nodes);
    for (const int node : nodes) missing.push_back(flight.transport->rank_of(node));
  }
  sort_once(missing);
  h_.tell_missing(missing);
  ranks.insert(ranks.end(), missing.begin(), missing.end());
  if (!missing.empty()) return;
  if (take_.piece == pieces_.count) return add_uncounted(&NodeShared::taken, base_ + pieces_.count, ranks);
  if (reduce_.piece < pieces_.count) add_uncounted(&NodeShared::filled, number(reduce_.piece) + 1, ranks);
  if (!ranks.empty()) return;
  for (int carrier = 0; carrier < carriers_; ++carrier) {
    if (h_.shared(carrier).arrived.pieces.load(std::memory_order_acquire) > number(take_.piece)) continue;
    if (carrier != h_.local_rank()) h_.add_missing(carrier, ranks);
  }
  if (ranks.empty()) add_uncounted(&NodeShared::reduced, number(take_.piece) + 1, ranks);
}

}  // namespace dcoll
