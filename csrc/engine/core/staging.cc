#include "engine/core/staging.h"

#include <utility>

#include "base/error.h"
#include "engine/core/call.h"

namespace dcoll {
namespace {

// What a rank keeps of the result of a reducescatter.
size_t share_bytes(const Request& r, int rank, int size) {
  const auto self = static_cast<size_t>(rank), ranks = static_cast<size_t>(size);
  if (!r.splits.empty()) return r.splits[self] * dtype_bytes(r.dtype);
  return (r.count / ranks + (self < r.count % ranks ? 1 : 0)) * r.row_elems * dtype_bytes(r.dtype);
}

}  // namespace

StagingLane::StagingLane(device::Device& device, Allocate allocate)
    : device_(device), stream_(device.make_stream()), allocate_(std::move(allocate)) {}

StagingLane::~StagingLane() {
  for (Retired& one : retired_) {
    try {
      one.after->wait();
    } catch (const device::DeviceError&) {  // its stream has ended
    }
  }
  device_.destroy_stream(stream_);
}

void StagingLane::sweep() {
  const MutexLock lock(mutex_);
  // One by one: where a device that failed throws, what is left is whole.
  for (auto at = retired_.begin(); at != retired_.end();) at = at->after->done() ? retired_.erase(at) : std::next(at);
}

std::shared_ptr<Memory> StagingLane::take(size_t bytes) {
  sweep();
  return pool_->take(bytes, [this](size_t size) -> std::shared_ptr<Memory> {
    std::shared_ptr<Memory> block = allocate_(size);
    const bool pinned = device_.pin(block->data(), size);
    Memory* memory = block.get();
    return {memory, [&device = device_, pinned, block = std::move(block)](Memory*) mutable {
              if (pinned) device.unpin(block->data());
              block.reset();
            }};
  });
}

void StagingLane::retire(std::vector<std::shared_ptr<Memory>> blocks) noexcept {
  try {
    auto after = device_.make_event();
    after->record(stream_);
    const MutexLock lock(mutex_);
    retired_.push_back({std::move(after), std::move(blocks)});
  } catch (const std::exception&) {
    // A device that has failed may still write there: never freed.
    static auto* const kept = new std::vector<std::vector<std::shared_ptr<Memory>>>;
    static Mutex mutex;
    const MutexLock lock(mutex);
    kept->push_back(std::move(blocks));
  }
}

std::shared_ptr<StagingLane> StagingLanes::of(int device) {
  const MutexLock lock(mutex_);
  std::shared_ptr<StagingLane>& known = lanes_[device];
  if (known == nullptr) known = std::make_shared<StagingLane>(device::device_of(device), allocate_);
  return known;
}

Staging::Staging(std::shared_ptr<StagingLane> lane, Request& r, int rank, int size, int job_rank)
    : lane_(std::move(lane)), caller_(r.stream), rank_(job_rank) {
  const size_t bytes = r.call().bytes();
  const void* const in = r.in;
  void* const out = r.out;
  try {
    moved_ = lane_->device().make_event();
    moved_->record(caller_);
    moved_->hold(lane_->stream());
    // Of a broadcast others have nothing to give.
    r.in = begin(r.kind == Kind::kBroadcast && rank != r.root ? nullptr : in, bytes);
    if (r.kind == Kind::kAllReduce || r.kind == Kind::kBroadcast || r.kind == Kind::kReceive) {
      r.out = blocks_.back()->data();
      result_bytes_ = bytes;
    } else if (r.kind != Kind::kSend) {
      result_bytes_ = r.kind == Kind::kReduceScatter ? share_bytes(r, rank, size) : r.out_bytes;
      r.out = result_bytes_ > 0 ? begin(nullptr, result_bytes_) : nullptr;  // null: the core makes it, in host memory
    }
    moved_->record(lane_->stream());
    arrived_ = r.kind == Kind::kReceive;  // a peer waits for nothing of this rank's
  } catch (const device::DeviceError&) {
    refused_ = std::current_exception();
  }
  if (result_bytes_ > 0) result_ = out;
  source_ = r.out;
}

void* Staging::begin(const void* from, size_t bytes) {
  blocks_.push_back(lane_->take(bytes));
  void* const to = blocks_.back()->data();
  if (from != nullptr) lane_->device().copy(to, from, bytes, lane_->stream());
  return to;
}

Staging::~Staging() {
  try {
    if (!arrived_) wait();                // the caller's memory is still read
  } catch (const device::DeviceError&) {  // whoever waited for the operation has heard of it
  }
  lane_->retire(std::move(blocks_));
}

void Staging::rethrow_with_rank(const std::exception& e) const {
  throw device::DeviceError(std::string(e.what()) + " (on rank " + std::to_string(rank_) + ")");
}

bool Staging::arrived() try {
  if (refused_) std::rethrow_exception(refused_);
  return arrived_ = arrived_ || moved_->done();
} catch (const device::DeviceError& e) {
  rethrow_with_rank(e);
}

void Staging::send_back(const Operation& operation) try {
  if (result_ == nullptr || operation.output != nullptr) return;
  lane_->device().copy(result_, source_, result_bytes_, lane_->stream());
  moved_->record(lane_->stream());
} catch (const device::DeviceError& e) {
  rethrow_with_rank(e);
}

void Staging::hold(device::Stream stream) try {
  if (moved_ == nullptr) return;
  moved_->hold(caller_);
  if (stream != caller_) moved_->hold(stream);
} catch (const device::DeviceError& e) {
  rethrow_with_rank(e);
}

void Staging::wait() try {
  if (moved_ != nullptr) moved_->wait();
} catch (const device::DeviceError& e) {
  rethrow_with_rank(e);
}

}  // namespace dcoll
