// Memory of a device that other processes can open: blocks out of long segments, each of which is opened once. Segments
// are kept until the process ends; they are allocated when there is no room in those there are.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "base/fork.h"
#include "base/thread_safety.h"
#include "device/device.h"

namespace dcoll::device {

class Arena;

// A block of an arena. Its bytes are anything at first.
class Block {
 public:
  Block(Arena& arena, std::byte* data, size_t bytes) : arena_(arena), data_(data), bytes_(bytes) {}
  ~Block();
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  // Nothing on any device works on it, or will. Of a block that is not, only the device knows.
  void set_idle() { idle_ = true; }

 private:
  Arena& arena_;
  std::byte* data_;
  size_t bytes_;
  bool idle_ = false;
};

class Arena {
 public:
  static constexpr size_t kSegmentBytes = size_t{32} << 20;  // at least
  static constexpr size_t kAlignment = 512;

  // number: of the device.
  explicit Arena(int number) : number_(number), device_(device_of(number)) {}
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Out of memory that is idle, or new; does not wait for what is in streams. DeviceError: no room on the device.
  std::unique_ptr<Block> alloc(size_t bytes);
  // As above, but rather than allocate anew it waits for all that is in the device's streams, after which what was
  // freed before is idle.
  std::unique_ptr<Block> alloc_or_wait(size_t bytes);

 private:
  friend class Block;
  using Blocks = std::map<std::byte*, size_t>;
  void free(std::byte* data, bool idle) noexcept;
  std::byte* find(size_t length) DCOLL_REQUIRES(mutex_);
  std::unique_ptr<Block> block(std::byte* data, size_t bytes) { return std::make_unique<Block>(*this, data, bytes); }
  void add_segment(size_t length);

  const int number_;
  Device& device_;
  const ForkGuard fork_;
  Mutex mutex_;  // never held while waiting for the device
  Blocks idle_ DCOLL_GUARDED_BY(mutex_), freed_ DCOLL_GUARDED_BY(mutex_), in_use_ DCOLL_GUARDED_BY(mutex_);
};

// Lives as long as the process. ArgumentError: there is no device of that number.
Arena& arena_of(int number);

// Those of all arenas of this process, in the order in which they were allocated.
struct Segment {
  int device;
  std::byte* data;
  size_t bytes;
  std::optional<Handle> handle;  // none: the device gives none, so others cannot open it
  std::string why;               // it gives none
};
std::optional<Segment> segment_at(size_t number);
// Where memory lies in them, if all of it does.
struct Place {
  size_t segment, offset;
};
std::optional<Place> place_of(const void* data, size_t bytes);

}  // namespace dcoll::device
