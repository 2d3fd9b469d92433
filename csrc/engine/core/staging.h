// The way of memory on a device through the host's: it is copied into host memory on a stream of ours, slice by slice
// (slices.h), the operation works there, and its result is copied back on another, so that neither waits for the other.
// Where ranks share memory, the host memory is of that.
#pragma once

#include <cstddef>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "base/thread_safety.h"
#include "device/device.h"
#include "engine/core/memory.h"
#include "engine/core/operation.h"
#include "engine/core/scratch.h"

namespace dcoll {

// What a communicator has for one device: streams, and host memory that is pinned once and used again.
class StagingLane {
 public:
  using Allocate = std::function<std::shared_ptr<Memory>(size_t)>;
  StagingLane(device::Device& device, Allocate allocate);
  ~StagingLane();
  StagingLane(const StagingLane&) = delete;
  StagingLane& operator=(const StagingLane&) = delete;

  device::Device& device() const { return device_; }
  device::Stream there() const { return there_; }  // of copies to the host
  device::Stream back() const { return back_; }
  std::shared_ptr<Memory> take(size_t bytes);
  // Nothing is copied into them any more. Used again when the copies out of them are done.
  void retire(std::vector<std::shared_ptr<Memory>> blocks) noexcept;

 private:
  struct Retired {
    std::unique_ptr<device::Event> after;
    std::vector<std::shared_ptr<Memory>> blocks;
  };
  void sweep();

  device::Device& device_;
  device::Stream there_, back_;
  Allocate allocate_;
  // To pin 256 MiB takes 50 ms (an H200's host), as long as to copy them five times both ways.
  static constexpr size_t kMostPinnedBytes = size_t{1} << 30;
  const std::shared_ptr<Scratch> pool_ = std::make_shared<Scratch>(kMostPinnedBytes);
  Mutex mutex_;
  std::vector<Retired> retired_ DCOLL_GUARDED_BY(mutex_);
};

// Those of a communicator, made when a device is first used.
class StagingLanes {
 public:
  explicit StagingLanes(StagingLane::Allocate allocate) : allocate_(std::move(allocate)) {}
  std::shared_ptr<StagingLane> of(int device);

 private:
  const StagingLane::Allocate allocate_;
  Mutex mutex_;
  std::map<int, std::shared_ptr<StagingLane>> lanes_ DCOLL_GUARDED_BY(mutex_);
};

class Staging {
 public:
  // Begins the copy of the operand, and has the request work on host memory. What the device has against it comes out
  // of arrived(): then the other ranks can be told. job_rank: what its errors call this rank.
  Staging(std::shared_ptr<StagingLane> lane, Request& request, int rank, int size, int job_rank, size_t slice_bytes);
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  // Of the thread that drives: whether the next slice has arrived. DeviceError.
  bool arrived();
  bool waits() const { return !arrived_; }
  // The operation on the slice is done: begins the copy of its result, if that lies where the request has it. What is
  // next is the slice behind it. DeviceError.
  void send_back(const Operation& operation);
  // Then, of whoever waits for the operation. Whether its memory is as it should be; has a stream wait for that; waits.
  bool settled();
  void hold(device::Stream stream);
  void wait();
  device::Stream stream() const { return caller_; }
  size_t slice_bytes() const { return slice_bytes_; }  // at most

 private:
  void* take(size_t bytes);
  void begin(const Request& request, const void* from);
  [[noreturn]] void rethrow_with_rank(const std::exception& e) const;

  std::shared_ptr<StagingLane> lane_;
  device::Stream caller_;
  int rank_;
  size_t slice_bytes_;
  std::vector<std::shared_ptr<Memory>> blocks_;
  std::unique_ptr<device::Event> begun_;               // what the caller's stream had before
  std::vector<std::unique_ptr<device::Event>> there_;  // each behind the copy of a slice
  std::unique_ptr<device::Event> back_;                // behind the last copy back so far
  std::vector<size_t> ends_;                           // of the slices, in bytes of the result
  std::exception_ptr refused_;
  bool arrived_ = false;
  size_t next_ = 0;         // slice
  void* result_ = nullptr;  // on the device; null: there is none
  const void* source_ = nullptr;
};

}  // namespace dcoll
