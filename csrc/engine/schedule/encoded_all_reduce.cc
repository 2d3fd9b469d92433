#include "engine/schedule/encoded_all_reduce.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/error.h"
#include "engine/core/memory.h"
#include "engine/core/timeline_record.h"
#include "engine/schedule/executor.h"
#include "kernels/topk.h"
#include "kernels/topk_owners.h"

namespace dcoll {
namespace {

// Lets the driver look at everything else once.
class Pause final : public Pollable {
 public:
  bool poll(bool& moved) override {
    if (std::exchange(paused_, true)) return true;
    moved = true;
    return false;
  }
  void waiting_for(std::vector<int>&) const override {}

 private:
  bool paused_ = false;
};

// Adds to `ns` until it is stopped. Nobody else runs in between: it is stopped before the next co_await.
class Stopwatch {
 public:
  explicit Stopwatch(int64_t& ns) : ns_(ns), begin_(now_ns()) {}
  void stop() const { ns_ += now_ns() - begin_; }

 private:
  int64_t& ns_;
  int64_t begin_;
};

// The parts of the owners, in elements; all but the last end where a block of the codec does.
Layout parts_of(size_t count, size_t owners) {
  const Layout blocks = Layout::even((count + kernels::kCodecBlock - 1) / kernels::kCodecBlock, owners);
  std::vector<size_t> lengths;
  for (size_t owner = 0, left = count; owner < owners; ++owner) {
    lengths.push_back(std::min(left, blocks.chunk(owner).len * kernels::kCodecBlock));
    left -= lengths.back();
  }
  return Layout::of(lengths);
}

Layout encoded(kernels::Codec codec, const Layout& parts) {
  std::vector<size_t> lengths;
  for (size_t i = 0; i < parts.num_chunks(); ++i) {
    lengths.push_back(kernels::encoded_bytes(codec, parts.chunk(i).len));
  }
  return Layout::of(lengths);
}

Task by_owners(GroupTransport& transport, EncodedJob job) {
  EncodedCost& cost = *job.coded.cost;
  const kernels::Codec codec = job.coded.encoding.codec;
  const auto size = static_cast<size_t>(transport.size()), own = static_cast<size_t>(transport.rank());
  const Layout parts = parts_of(job.count, size), wire = encoded(codec, parts);
  const ChunkRange mine = parts.chunk(own);
  const std::shared_ptr<Memory> encoded = Memory::uninitialized(wire.total());
  for (size_t i = 0; i < size; ++i) {
    const ChunkRange part = parts.chunk(i);
    const Stopwatch encoding(cost.encode_ns);
    cost.saturated +=
        kernels::encode(codec, encoded->data() + wire.chunk(i).begin, job.operand + part.begin, part.len,
                        job.coded.feedback.from(part.begin).error, kernels::derived(job.coded.key, part.begin));
    encoding.stop();
    Pause portion;
    co_await portion;
  }

  const size_t own_bytes = wire.chunk(own).len;
  cost.note(job.count, size, wire.total() - own_bytes + (size - 1) * own_bytes);
  const Layout arriving = Layout::of(std::vector<size_t>(size, own_bytes));
  const std::shared_ptr<Memory> arrived = Memory::uninitialized(arriving.total());
  Executor to_owners(
      transport, job.to_owners,
      {.input = encoded->data(), .output = arrived->data(), .input_layout = wire, .output_layout = arriving},
      job.slice_bytes, job.lanes);
  co_await to_owners;

  std::vector<const void*> operands;
  for (size_t i = 0; i < size; ++i) operands.push_back(arrived->data() + arriving.chunk(i).begin);
  const Stopwatch adding(cost.decode_ns);
  cost.saturated +=
      kernels::sum_encoded(codec, arrived->data(), operands, mine.len, job.scale,
                           job.coded.feedback.from(mine.begin).error, kernels::derived(job.coded.key, ~mine.begin));
  adding.stop();
  Executor to_everybody(transport, job.to_everybody,
                        {.input = arrived->data(),
                         .output = encoded->data(),
                         .input_layout = Layout::of({own_bytes}),
                         .output_layout = wire},
                        job.slice_bytes, job.lanes);
  co_await to_everybody;

  for (size_t i = 0; i < size; ++i) {
    const ChunkRange part = parts.chunk(i);
    const Stopwatch decoding(cost.decode_ns);
    kernels::decode(codec, job.data + part.begin, encoded->data() + wire.chunk(i).begin, part.len);
    decoding.stop();
    Pause portion;
    co_await portion;
  }
}

[[noreturn]] void throw_damaged(const GroupTransport& transport, size_t from) {
  throw TransportError("rank " + std::to_string(transport.rank_of(static_cast<int>(from))) +
                       " sent a selection of the greatest elements that no encoder makes: its message or its memory "
                       "is damaged. Run the same dcoll version on every rank, and check the network");
}

// Everybody's selections, of so many bytes each, one behind the other in `all`, where this rank's is already.
Executor gather_selections(GroupTransport& transport, const EncodedJob& job, std::byte* all, size_t bytes) {
  const auto size = static_cast<size_t>(transport.size()), own = static_cast<size_t>(transport.rank());
  return Executor(transport, job.to_everybody,
                  {.input = all + own * bytes,
                   .output = all,
                   .input_layout = Layout::of({bytes}),
                   .output_layout = Layout::of(std::vector<size_t>(size, bytes))},
                  job.slice_bytes, job.lanes);
}

// Of k elements each, as they were gathered.
void add_up_selections(const GroupTransport& transport, const EncodedJob& job, const std::byte* all, size_t bytes,
                       size_t k) {
  std::vector<const void*> messages;
  for (int i = 0; i < transport.size(); ++i) messages.push_back(all + static_cast<size_t>(i) * bytes);
  const Stopwatch adding(job.coded.cost->decode_ns);
  const size_t damaged = kernels::sum_top(job.data, messages, job.count, k, job.scale);
  adding.stop();
  if (damaged < messages.size()) throw_damaged(transport, damaged);
}

// How many elements of the selection come from whom.
Task tell_elements(GroupTransport& transport, const EncodedJob& job, const std::vector<size_t>& ours,
                   std::vector<size_t>& theirs, size_t most) {
  const Layout one_each = Layout::of(std::vector<size_t>(ours.size(), sizeof(uint64_t)));
  std::vector<uint64_t> sent(ours.begin(), ours.end()), come(ours.size());
  Executor numbers(transport, job.to_owners,
                   {.input = reinterpret_cast<const std::byte*>(sent.data()),
                    .output = reinterpret_cast<std::byte*>(come.data()),
                    .input_layout = one_each,
                    .output_layout = one_each},
                   job.slice_bytes, job.lanes);
  co_await numbers;
  for (size_t i = 0; i < come.size(); ++i) {
    if (come[i] > most) throw_damaged(transport, i);
    theirs.push_back(come[i]);
  }
}

// `selected`: what this rank has chosen, k elements.
Task greatest_by_owners(GroupTransport& transport, EncodedJob job, const std::byte* selected, size_t k) {
  EncodedCost& cost = *job.coded.cost;
  const auto size = static_cast<size_t>(transport.size()), own = static_cast<size_t>(transport.rank());
  const auto bytes_of = [&job](const std::vector<size_t>& elements) {
    std::vector<size_t> lengths;
    for (const size_t n : elements) lengths.push_back(kernels::top_bytes(job.count, n));
    return Layout::of(lengths);
  };
  const Stopwatch splitting(cost.encode_ns);
  const kernels::SplitTop split = kernels::split_top(selected, job.count, k, size);
  splitting.stop();
  std::vector<size_t> theirs;
  co_await tell_elements(transport, job, split.elements, theirs, k);
  const Layout wire = bytes_of(split.elements), arriving = bytes_of(theirs);
  const std::shared_ptr<Memory> arrived = Memory::uninitialized(arriving.total());
  Executor to_owners(
      transport, job.to_owners,
      {.input = split.messages.data(), .output = arrived->data(), .input_layout = wire, .output_layout = arriving},
      job.slice_bytes, job.lanes);
  co_await to_owners;

  const size_t most = (k + size - 1) / size, bytes = kernels::top_bytes(job.count, most);
  const std::shared_ptr<Memory> sums = Memory::uninitialized(size * bytes);
  std::vector<const void*> parts;
  for (size_t i = 0; i < size; ++i) parts.push_back(arrived->data() + arriving.chunk(i).begin);
  const Stopwatch merging(cost.decode_ns);
  const size_t damaged =
      kernels::merge_top(sums->data() + own * bytes, parts, theirs, job.count, most, job.coded.feedback.error);
  merging.stop();
  if (damaged < size) throw_damaged(transport, damaged);
  cost.note(job.count, size, (size - 1) * sizeof(uint64_t) + wire.total() - wire.chunk(own).len + (size - 1) * bytes);
  Executor to_everybody = gather_selections(transport, job, sums->data(), bytes);
  co_await to_everybody;
  add_up_selections(transport, job, sums->data(), bytes, most);
}

Task of_greatest(GroupTransport& transport, EncodedJob job) {
  EncodedCost& cost = *job.coded.cost;
  const auto size = static_cast<size_t>(transport.size()), own = static_cast<size_t>(transport.rank());
  const size_t k = kernels::top_count(job.count, job.coded.encoding.ratio), bytes = kernels::top_bytes(job.count, k);
  const std::shared_ptr<Memory> selected = Memory::uninitialized(size * bytes);
  const Stopwatch encoding(cost.encode_ns);
  kernels::encode_top(selected->data() + own * bytes, job.operand, job.count, k, job.coded.feedback);
  encoding.stop();
  Pause portion;
  co_await portion;

  if (job.coded.encoding.exchange != kernels::Exchange::kOwners && size * bytes > 2 * job.count * sizeof(float)) {
    const void* chosen = selected->data() + own * bytes;
    kernels::sum_top(job.data, {&chosen, 1}, job.count, k);
    job.operand = job.data;
    job.coded.encoding = {.codec = kernels::Codec::kFloat32};
    job.coded.feedback = {};
    co_await by_owners(transport, job);
    co_return;
  }
  if (job.coded.by_owners) {
    co_await greatest_by_owners(transport, job, selected->data() + own * bytes, k);
    co_return;
  }
  cost.note(job.count, size, (size - 1) * bytes);
  Executor to_everybody = gather_selections(transport, job, selected->data(), bytes);
  co_await to_everybody;
  add_up_selections(transport, job, selected->data(), bytes, k);
}

}  // namespace

Task encoded_all_reduce(GroupTransport& transport, EncodedJob job) {
  return job.coded.encoding.codec == kernels::Codec::kTopK ? of_greatest(transport, std::move(job))
                                                           : by_owners(transport, std::move(job));
}

}  // namespace dcoll
