// The way of memory on a device. Through the host's: it is copied into host memory on a stream of ours, slice by slice
// (slices.h), the operation works there, and its result is copied back on another, so that neither waits for the other.
// Where ranks share memory, the host memory is of that. An operation that may stay on the device (collective/
// on_device.h) does its work there, in one of these streams; whether it stays the ranks agree on when its turn has
// come.
#pragma once

#include <atomic>
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
  device::Stream stay() const { return stay_; }  // of what stays
  // For what must not wait for anything else. Lives as long as this.
  device::Stream add_stream();
  // All ranks of a sequence of operations have agreed that none stays here: copies may begin at once.
  bool never_stays() const { return never_stays_.load(std::memory_order_relaxed); }
  void note_never_stays() { never_stays_.store(true, std::memory_order_relaxed); }
  bool never_by_nccl() const { return never_by_nccl_.load(std::memory_order_relaxed); }  // likewise
  void note_never_by_nccl() { never_by_nccl_.store(true, std::memory_order_relaxed); }
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
  device::Stream there_, back_, stay_;
  std::atomic<bool> never_stays_{false}, never_by_nccl_{false};
  Allocate allocate_;
  // To pin 256 MiB takes 50 ms (an H200's host), as long as to copy them five times both ways.
  static constexpr size_t kMostPinnedBytes = size_t{1} << 30;
  const std::shared_ptr<Scratch> pool_ = std::make_shared<Scratch>(kMostPinnedBytes);
  Mutex mutex_;
  std::vector<device::Stream> added_ DCOLL_GUARDED_BY(mutex_);
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
  // rank, size: of the communicator. job_rank: what errors call this rank. may_stay: on the device; else it goes by the
  // host. What the device has against it comes out of arrived(): then the other ranks can be told.
  struct Ranks {
    int rank, size, job_rank;
  };
  Staging(std::shared_ptr<StagingLane> lane, Request& request, Ranks ranks, size_t slice_bytes, bool may_stay);
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  bool goes_by_host() const { return by_host_; }
  StagingLane& lane() const { return *lane_; }
  // Begins the copy of the operand, and has the request work on host memory.
  void go_by_host(Request& request);
  // Of the thread that drives: whether the next slice has arrived; of what stays on the device, whether all is done
  // that was put there, or that the caller's stream had before. DeviceError.
  bool arrived();
  bool waits() const { return !arrived_; }
  // What stays does so in a stream of the lane's that was added.
  void use(device::Stream stream) { stay_ = stream; }
  // Of what stays, once it has arrived: has the device work, in a stream of ours: work(device, stream). DeviceError.
  template <typename Work>
  void put(const Work& work) {
    checked([&] {
      work(lane_->device(), stay_);
      back_->record(stay_);
    });
    has_work_ = true;
    arrived_ = false;
  }
  // The same behind what the caller's stream had before, which nobody waits for: the operation is done, and its memory
  // is as it should be when the device has done that.
  template <typename Work>
  void put_behind_caller(const Work& work) {
    checked([&] {
      if (refused_) std::rethrow_exception(refused_);
      begun_->hold(stay_);
    });
    put(work);
    arrived_ = true;
  }
  // What the device is asked: an error names the rank.
  template <typename Step>
  void checked(const Step& step) {
    try {
      step();
    } catch (const device::DeviceError& e) {
      rethrow_with_rank(e);
    }
  }
  // Other ranks read and write the caller's memory, until they have said that they are done.
  void set_shown(bool shown) { shown_ = shown; }
  bool is_shown() const { return shown_; }
  // The operation on the slice is done: begins the copy of its result, if that lies where the request has it. What is
  // next is the slice behind it. DeviceError.
  void send_back(const Operation& operation);
  // Then, of whoever waits for the operation. Whether its memory is as it should be; has a stream wait for that, which
  // is an ArgumentError where it, or the caller's, is captured, and can be called again; waits.
  bool settled();
  void hold(device::Stream stream);
  void wait();
  size_t slice_bytes() const { return slice_bytes_; }  // at most

 private:
  void* take(size_t bytes);
  void begin(const Request& request, const void* from);
  // Where the device has failed an event may be missing behind what was begun, and the caller lets go of its memory.
  void drain() noexcept;
  [[noreturn]] void rethrow_with_rank(const std::exception& e);

  std::shared_ptr<StagingLane> lane_;
  device::Stream caller_, stay_;
  const Ranks ranks_;
  const size_t slice_bytes_;
  bool by_host_ = false, has_work_ = false, shown_ = false;
  bool held_ = false;  // the caller's stream waits for what is done to its memory
  std::vector<std::shared_ptr<Memory>> blocks_;
  std::unique_ptr<device::Event> begun_;               // what the caller's stream had before
  std::vector<std::unique_ptr<device::Event>> there_;  // each behind the copy of a slice
  std::unique_ptr<device::Event> back_;                // behind the last copy back so far, or what was put there last
  std::vector<size_t> ends_;                           // of the slices, in bytes of the result
  std::exception_ptr refused_;
  bool arrived_ = false;
  size_t next_ = 0;         // slice
  void* result_ = nullptr;  // on the device; null: there is none
  const void* source_ = nullptr;
};

}  // namespace dcoll
