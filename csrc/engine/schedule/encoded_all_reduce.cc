#include "engine/schedule/encoded_all_reduce.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "engine/core/memory.h"
#include "engine/schedule/executor.h"

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

float* behind(float* at, size_t elements) { return at == nullptr ? nullptr : at + elements; }

}  // namespace

Task encoded_all_reduce(Transport& transport, EncodedJob job) {
  const auto size = static_cast<size_t>(transport.size()), own = static_cast<size_t>(transport.rank());
  const Layout parts = parts_of(job.count, size), wire = encoded(job.codec, parts);
  const ChunkRange mine = parts.chunk(own);
  const std::shared_ptr<Memory> encoded = Memory::uninitialized(wire.total());
  for (size_t i = 0; i < size; ++i) {
    const ChunkRange part = parts.chunk(i);
    *job.saturated += kernels::encode(job.codec, encoded->data() + wire.chunk(i).begin, job.data + part.begin, part.len,
                                      behind(job.error, part.begin));
    Pause portion;
    co_await portion;
  }

  const size_t own_bytes = wire.chunk(own).len;
  const Layout arriving = Layout::of(std::vector<size_t>(size, own_bytes));
  const std::shared_ptr<Memory> arrived = Memory::uninitialized(arriving.total());
  Executor to_owners(
      transport, job.to_owners,
      {.input = encoded->data(), .output = arrived->data(), .input_layout = wire, .output_layout = arriving},
      job.slice_bytes, job.lanes);
  co_await to_owners;

  std::vector<const void*> operands;
  for (size_t i = 0; i < size; ++i) operands.push_back(arrived->data() + arriving.chunk(i).begin);
  *job.saturated +=
      kernels::sum_encoded(job.codec, arrived->data(), operands, mine.len, job.scale, behind(job.error, mine.begin));
  Executor to_everybody(transport, job.to_everybody,
                        {.input = arrived->data(),
                         .output = encoded->data(),
                         .input_layout = Layout::of({own_bytes}),
                         .output_layout = wire},
                        job.slice_bytes, job.lanes);
  co_await to_everybody;

  for (size_t i = 0; i < size; ++i) {
    const ChunkRange part = parts.chunk(i);
    kernels::decode(job.codec, job.data + part.begin, encoded->data() + wire.chunk(i).begin, part.len);
    Pause portion;
    co_await portion;
  }
}

}  // namespace dcoll
