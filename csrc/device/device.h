// A device with memory of its own: what the engine needs of one. Work is put into streams, which do it later and in
// order; events tell how far they are. Only what says so below waits.
//
// Two devices exist: CUDA's (cuda.cc), and an emulated one on the CPU for tests (emulated.cc). Device 0 of the emulated
// one has the CPU's memory, works late, and overwrites the target of a copy with kPoison before it copies: whoever
// reads without waiting reads that.
#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "base/error.h"
#include "base/types.h"

namespace dcoll::device {

// The device itself failed. Most such errors stay: every later call fails as well.
class DeviceError : public Error {
 public:
  using Error::Error;
};

// As its library knows it: a cudaStream_t. Null is CUDA's default stream, and the calling thread of the emulated
// device: what is put there is done at once, and an event that it waits for is waited for by the caller.
using Stream = void*;

// A place in a stream. Before it is first recorded it is done.
class Event {
 public:
  virtual ~Event() = default;
  virtual void record(Stream stream) = 0;
  // What comes in `stream` from now on begins after the event.
  virtual void hold(Stream stream) = 0;
  virtual bool done() = 0;
  // The calling thread waits.
  virtual void wait() = 0;
};

// By which another process opens memory of this one's.
using Handle = std::array<std::byte, 64>;

// All functions throw DeviceError, which names the device.
class Device {
 public:
  virtual ~Device() = default;
  virtual std::string name() const = 0;  // "cuda:0"
  // Which of the machine it is, whatever numbers its processes give it.
  virtual std::string place() = 0;
  // Whether it runs this build's kernels. It has loaded them then, which it cannot while a kernel on it waits for
  // something that this process has yet to do.
  virtual bool has_kernels() = 0;
  // Calls a library that works on the calling thread's current device, and on this one then.
  virtual void as_current(const std::function<void()>& call) = 0;
  virtual void* allocate(size_t bytes) = 0;
  virtual void free(void* data) noexcept = 0;
  // Of what allocate() gave. open() is another process's, for a device that can reach the memory.
  virtual Handle handle_of(void* data) = 0;
  virtual void* open(const Handle& handle) = 0;
  virtual void close(void* opened) noexcept = 0;
  // Locks host memory in place, so that copies from and to it need not wait for the caller. False: it could not be;
  // then copies are right all the same.
  virtual bool pin(void* data, size_t bytes) = 0;
  virtual void unpin(void* data) noexcept = 0;
  virtual Stream make_stream() = 0;
  virtual void destroy_stream(Stream stream) noexcept = 0;  // after what is in it
  // Whether what is put there becomes a part of a graph (torch.cuda.graph) in place of being done.
  virtual bool is_capturing(Stream stream) = 0;
  virtual std::unique_ptr<Event> make_event() = 0;
  // Between memory of the host and of devices, in any direction.
  virtual void copy(void* to, const void* from, size_t bytes, Stream stream) = 0;
  // kernels::reduce_n_to_n, scale and cast, of its own memory and what it opened. A build without CUDA has none.
  virtual void reduce_n_to_n(std::span<void* const> to, std::span<const void* const> from, size_t count, DType dtype,
                             ReduceOp op, double scale, Stream stream) = 0;
  virtual void scale(void* to, const void* from, size_t count, DType dtype, double factor, Stream stream) = 0;
  virtual void cast(void* to, DType to_type, const void* from, DType from_type, size_t count, Stream stream) = 0;
  // The calling thread waits for all that is in streams of this device.
  virtual void wait_for_all() = 0;
  // The calling thread waits until nothing in the stream touches memory any more, whether or not the device has failed.
  virtual void drain(Stream stream) noexcept = 0;
};

// What tensors lie on is a number: of a GPU as CUDA numbers them, or one of these.
inline constexpr int kHost = -1;
inline constexpr int kEmulated = 1 << 10;  // and all above: the same device by other numbers, for tests
inline bool is_emulated(int number) { return number >= kEmulated; }

// Lives as long as the process. ArgumentError: there is none of that number, with the reason.
Device& cuda_device(int number);
Device& emulated_device();
inline Device& device_of(int number) { return is_emulated(number) ? emulated_device() : cuda_device(number); }
// "cuda" or "emulated": the same for all numbers of a kind.
inline const char* kind_name(int number) { return number == kHost ? "cpu" : is_emulated(number) ? "emulated" : "cuda"; }

inline constexpr unsigned char kPoison = 0xCD;
// For tests: from now on the emulated device fails as CUDA's do, for good, when it has begun so many more copies and
// kernels. Negative: it works again.
void fail_emulated_after(int pieces);
// For tests: whether it shows its memory to other processes, and opens theirs.
void share_emulated(bool shares);
// For tests: whether it has kernels.
void let_emulated_compute(bool computes);
// For tests: what place() of the emulated device gives from now on.
void place_emulated(const std::string& place);
// For tests: has a stream of the emulated device do this, late, as a kernel.
void put_into_emulated(Stream stream, std::function<void()> kernel);

}  // namespace dcoll::device
