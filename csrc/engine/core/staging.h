// The way of memory on a device through the host's: it is copied into host memory on a stream of ours, the operation
// works there, and its result is copied back. Where ranks share memory, the host memory is of that.
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

// What a communicator has for one device: a stream, and host memory that is pinned once and used again.
class StagingLane {
 public:
  using Allocate = std::function<std::shared_ptr<Memory>(size_t)>;
  StagingLane(device::Device& device, Allocate allocate);
  ~StagingLane();
  StagingLane(const StagingLane&) = delete;
  StagingLane& operator=(const StagingLane&) = delete;

  device::Device& device() const { return device_; }
  device::Stream stream() const { return stream_; }
  std::shared_ptr<Memory> take(size_t bytes);
  // Used again when the stream has come as far as it is now.
  void retire(std::vector<std::shared_ptr<Memory>> blocks) noexcept;

 private:
  struct Retired {
    std::unique_ptr<device::Event> after;
    std::vector<std::shared_ptr<Memory>> blocks;
  };
  void sweep();

  device::Device& device_;
  device::Stream stream_;
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
  Staging(std::shared_ptr<StagingLane> lane, Request& request, int rank, int size, int job_rank);
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  // Of the thread that drives. DeviceError.
  bool arrived();
  bool waits() const { return !arrived_; }
  // The operation is done: begins the copy of its result, if that lies where the request has it. DeviceError.
  void send_back(const Operation& operation);
  // Then, of whoever waits for the operation. Whether its memory is as it should be; has a stream wait for that; waits.
  bool settled() { return moved_ == nullptr || moved_->done(); }
  void hold(device::Stream stream);
  void wait();
  device::Stream stream() const { return caller_; }

 private:
  void* begin(const void* from, size_t bytes);
  [[noreturn]] void rethrow_with_rank(const std::exception& e) const;

  std::shared_ptr<StagingLane> lane_;
  device::Stream caller_;
  int rank_;
  std::vector<std::shared_ptr<Memory>> blocks_;
  std::unique_ptr<device::Event> moved_;  // behind the last copy
  std::exception_ptr refused_;
  bool arrived_ = false;
  void* result_ = nullptr;  // on the device; null: there is none
  const void* source_ = nullptr;
  size_t result_bytes_ = 0;
};

}  // namespace dcoll
