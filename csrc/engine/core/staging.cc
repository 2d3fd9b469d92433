#include "engine/core/staging.h"

#include <utility>

#include "base/error.h"
#include "engine/core/slices.h"

namespace dcoll {

StagingLane::StagingLane(device::Device& device, Allocate allocate)
    : device_(device),
      there_(device.make_stream()),
      back_(device.make_stream()),
      stay_(device.make_stream()),
      allocate_(std::move(allocate)) {}

StagingLane::~StagingLane() {
  for (Retired& one : retired_) {
    try {
      one.after->wait();
    } catch (const device::DeviceError&) {  // its stream has ended
    }
  }
  for (const device::Stream stream : added_) device_.destroy_stream(stream);
  device_.destroy_stream(there_);
  device_.destroy_stream(back_);
  device_.destroy_stream(stay_);
}

device::Stream StagingLane::add_stream() {
  const device::Stream stream = device_.make_stream();
  const MutexLock lock(mutex_);
  added_.push_back(stream);
  return stream;
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
  if (blocks.empty()) return;
  try {
    auto after = device_.make_event();
    after->record(back_);
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

Staging::Staging(std::shared_ptr<StagingLane> lane, Request& request, Ranks ranks, size_t slice_bytes, bool may_stay)
    : lane_(std::move(lane)), caller_(request.stream), stay_(lane_->stay()), ranks_(ranks), slice_bytes_(slice_bytes) {
  try {
    begun_ = lane_->device().make_event();
    begun_->record(caller_);
    back_ = lane_->device().make_event();
  } catch (const device::DeviceError&) {
    refused_ = std::current_exception();
  }
  if (!may_stay) go_by_host(request);
}

void Staging::go_by_host(Request& r) {
  by_host_ = true;
  const size_t bytes = r.bytes();
  const void* const in = r.in;
  void* const out = r.out;
  size_t result_bytes = 0;
  try {
    if (refused_) std::rethrow_exception(refused_);
    begun_->hold(lane_->there());
    r.in = take(bytes);
    if (r.kind == Kind::kAllReduce || r.kind == Kind::kBroadcast || r.kind == Kind::kReceive) {
      r.out = blocks_.back()->data();
      result_bytes = bytes;
    } else if (r.kind != Kind::kSend) {
      result_bytes = r.out_bytes;
      if (r.kind == Kind::kReduceScatter) {
        result_bytes = r.shares(ranks_.size)[static_cast<size_t>(ranks_.rank)] * dtype_bytes(r.dtype);
      }
      r.out = result_bytes > 0 ? take(result_bytes) : nullptr;  // null: the core makes it, in host memory
    }
    // Of a broadcast others have nothing to give, nor has who receives.
    const bool gives = r.kind != Kind::kReceive && (r.kind != Kind::kBroadcast || ranks_.rank == r.root);
    begin(r, gives ? in : nullptr);
    ends_.back() = result_bytes;
    arrived_ = r.kind == Kind::kReceive;  // a peer waits for nothing of this rank's
  } catch (const device::DeviceError&) {
    refused_ = std::current_exception();
    drain();
  }
  if (result_bytes > 0) result_ = out;
  source_ = r.out;
}

void* Staging::take(size_t bytes) {
  blocks_.push_back(lane_->take(bytes));
  return blocks_.back()->data();
}

// The copies of all slices, one behind the other. from: null where there is nothing to copy.
void Staging::begin(const Request& request, const void* from) {
  Request cut = request;
  Slices slices(cut, slice_bytes_);
  for (size_t slice = 0; slice < slices.number(); ++slice) {
    slices.enter(slice);
    const size_t at = slices.begin_bytes(slice);
    ends_.push_back(at + cut.bytes());
    if (from != nullptr) {
      lane_->device().copy(const_cast<void*>(cut.in), static_cast<const std::byte*>(from) + at, cut.bytes(),
                           lane_->there());
    }
    there_.push_back(lane_->device().make_event());
    there_.back()->record(lane_->there());
  }
}

Staging::~Staging() {
  try {
    device::Event* const last = by_host_ ? (there_.empty() ? nullptr : there_.back().get()) : back_.get();
    if (last != nullptr && !held_) last->wait();  // the caller's memory is still used
  } catch (const device::DeviceError&) {          // whoever waited for the operation has heard of it
    drain();
  }
  lane_->retire(std::move(blocks_));
}

void Staging::drain() noexcept {
  for (const device::Stream stream : {lane_->there(), lane_->back(), stay_}) lane_->device().drain(stream);
}

void Staging::rethrow_with_rank(const std::exception& e) {
  drain();
  throw device::DeviceError(std::string(e.what()) + " (on rank " + std::to_string(ranks_.job_rank) + ")");
}

bool Staging::arrived() try {
  if (refused_) std::rethrow_exception(refused_);
  return arrived_ = arrived_ || (by_host_ ? there_[next_] : has_work_ ? back_ : begun_)->done();
} catch (const device::DeviceError& e) {
  rethrow_with_rank(e);
}

void Staging::send_back(const Operation& operation) try {
  const Request& r = operation.request;
  const size_t begin = next_ == 0 ? 0 : ends_[next_ - 1];
  const size_t end = r.kind == Kind::kReceive ? r.count : ends_[next_];  // less may have come than there is room for
  arrived_ = ++next_ == ends_.size();
  if (result_ == nullptr || operation.output != nullptr) return;
  // Of all else the copy of the operand has waited for that.
  if (r.kind == Kind::kReceive) begun_->hold(lane_->back());
  lane_->device().copy(static_cast<std::byte*>(result_) + begin, static_cast<const std::byte*>(source_) + begin,
                       end - begin, lane_->back());
  back_->record(lane_->back());
} catch (const device::DeviceError& e) {
  rethrow_with_rank(e);
}

bool Staging::settled() { return refused_ || ((there_.empty() || there_.back()->done()) && back_->done()); }

void Staging::hold(device::Stream stream) try {
  if (refused_) return;
  for (const device::Stream one : {caller_, stream}) {
    if (!lane_->device().is_capturing(one)) continue;
    throw ArgumentError(
        "a CUDA graph cannot wait for a collective that began before it was captured: wait for it outside of "
        "torch.cuda.graph()");
  }
  for (device::Event* event : {there_.empty() ? nullptr : there_.back().get(), back_.get()}) {
    if (event == nullptr) continue;
    event->hold(caller_);
    if (stream != caller_) event->hold(stream);
  }
  held_ = true;
} catch (const device::DeviceError& e) {
  rethrow_with_rank(e);
}

void Staging::wait() try {
  if (refused_) return;
  if (!there_.empty()) there_.back()->wait();
  back_->wait();
} catch (const device::DeviceError& e) {
  rethrow_with_rank(e);
}

}  // namespace dcoll
