// What the ranks of a node know of each other's memory on devices (device/arena.h): each has opened the others'
// segments, which are listed in memory of the host that all of them map. Which ranks' devices reach each other is found
// out by trying, once for each combination of devices.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "device/arena.h"
#include "engine/board/agreement.h"
#include "engine/core/memory.h"

namespace dcoll {

// What one rank says of itself in a post, beside where its operand and result are.
struct DeviceWord {
  static constexpr unsigned kCountBits = 20;
  int device = 0;
  size_t segments = 0;   // listed so far
  bool large = false;    // its operand is not in a half of the small block: it waits until all have read it
  bool sliced = false;   // it has brought the first slice of its operand into memory that others open, not all of it
  bool by_host = false;  // it can only go through the host
  uint64_t word() const {
    return static_cast<uint64_t>(static_cast<uint32_t>(device)) | uint64_t{segments} << 32 | uint64_t{large} << 61 |
           uint64_t{sliced} << 62 | uint64_t{by_host} << 63;
  }
  static DeviceWord of(uint64_t word) {
    return {static_cast<int>(static_cast<uint32_t>(word)), word >> 32 & ((uint64_t{1} << kCountBits) - 1),
            (word >> 61 & 1) != 0, (word >> 62 & 1) != 0, (word >> 63 & 1) != 0};
  }
};

class DeviceMemory {
 public:
  // Operands of so many bytes go through halves of a small block, by turns; longer ones that lie elsewhere go through a
  // block as long as they are, or as a slice.
  static constexpr size_t kSmallBytes = size_t{64} << 10;
  static constexpr size_t kSliceBytes = size_t{32} << 20;
  static constexpr int kMostRanks = 63;

  DeviceMemory(Board& board, std::shared_ptr<Window> window) : board_(board), window_(std::move(window)) {}
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  // All ranks have agreed that their devices do not reach each other.
  bool off = false;
  // The communicator has failed: others may still work on this rank's blocks, which are never used again.
  void keep_blocks() { keeps_blocks_ = true; }

  // Whether the devices of the ranks are known to reach each other; whether this one was, with some others.
  bool knows(const std::vector<int>& devices) const { return opened_.contains(devices); }
  bool is_likely(int device) const;
  // Whether, besides, all has been opened that the ranks had listed then.
  bool has_opened(const std::vector<int>& devices, const std::vector<size_t>& segments) const;
  void note_opened(const std::vector<int>& devices, const std::vector<size_t>& segments) {
    opened_[devices] = segments;
  }
  // Opens it, of the ranks' devices, for this rank's: memory of another GPU, which this one may not reach, is none of
  // theirs. DeviceError: why it cannot.
  void open(const std::vector<int>& devices, const std::vector<size_t>& segments);

  // This rank's blocks on a device. DeviceError: no room.
  std::byte* next_half(int device);
  std::byte* block(int device, size_t bytes);
  // What was put into the stream is the last that reads the longer block, and nobody waits for it.
  void left_behind(int device, device::Stream stream);

  // For posts: where memory of this rank is, by what others find it, and how many segments they then need. kUnmapped:
  // it is not in what others can open of that device.
  uint64_t word_of(const void* data, size_t bytes, int device);
  size_t num_listed() const { return list_ == nullptr ? 0 : own_list().count; }
  // Where memory of another rank, which has been opened, is for a device of this one. TransportError: the rank cannot
  // have meant that.
  std::byte* place(int rank, uint64_t word, size_t bytes, int device) const;

  // The trial, in three steps on every rank, each after all have posted what the one before gave. What a step throws
  // is why the ranks' devices do not reach each other.
  //   1. A pattern of this rank lies in memory that others open: where the list of it is, and where the memory.
  //   2. It has added up everybody's patterns into everybody's memory.
  //   3. All have done so here.
  struct Shown {
    uint64_t list = Window::kUnmapped, memory = Window::kUnmapped;
    size_t segments = 0;
  };
  Shown show(int device);
  void open_and_write(const std::vector<int>& devices, const std::vector<Shown>& shown);
  void check(int device);
  // How others opened what show() has shown last.
  const char* way() const { return way_; }

 private:
  static constexpr size_t kMostSegments = 1024;
  struct List {
    struct Entry {
      device::Handle handle;
      uint64_t bytes;  // 0: it cannot be opened
      int64_t device;
    };
    uint64_t count;
    std::array<Entry, kMostSegments> entries;
  };
  struct Blocks {
    std::unique_ptr<device::Block> small, large, trial;
    std::unique_ptr<device::Event> left;  // of the large one: behind what nobody waits for
    bool second = false;                  // half of the small one
  };
  // A segment of another rank's as a device of this one sees it.
  struct Opened {
    std::shared_ptr<std::byte> data;
    uint64_t bytes = 0;
  };
  struct Key {
    int rank, device;
    uint64_t segment;
    auto operator<=>(const Key&) const = default;
  };
  void publish();
  List& own_list() const { return *reinterpret_cast<List*>(list_->data()); }

  Board& board_;
  std::shared_ptr<Window> window_;
  bool keeps_blocks_ = false;
  const char* way_ = "";
  std::map<std::vector<int>, std::vector<size_t>> opened_;  // of the ranks' devices: of how many segments
  std::map<int, Blocks> blocks_;                            // by device
  std::shared_ptr<Memory> list_;
  std::vector<const List*> lists_;  // of the ranks
  std::map<Key, Opened> segments_;
};

}  // namespace dcoll
