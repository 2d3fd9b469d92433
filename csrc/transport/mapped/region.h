// The memory one rank shares with the ranks of its node, and how it is divided:
//
//   offset 0        RegionHeader   doorbell, state, failure notice, board entries, arrival group
//   rings_offset    rings          one per (sender, channel): what others send to the owner of the region
//   arena_offset    arena          Window::alloc
//
// A ring is a RingHead (written by the receiver) followed by `slots` slots; a slot is a SlotHeader and room for
// slot_bytes. The whole region is address space: only pages somebody touched are memory, and fresh pages are zero.
// All-zero memory is a valid empty ring.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/types.h"
#include "transport/endpoint.h"
#include "transport/os/fd.h"
#include "transport/transport.h"
#include "transport/window.h"

namespace dcoll {

static_assert(std::atomic<uint64_t>::is_always_lock_free, "shared memory needs atomics without hidden locks");

// 128, not 64: the hardware prefetches lines in pairs, so neighbours on one pair would still fight for it.
inline constexpr size_t kLinePair = 128;

struct FailureNotice {
  static constexpr size_t kTextBytes = 1000;
  enum State : uint32_t { kNone = 0, kWriting = 1, kReady = 2 };
  // kNone -> kWriting by compare-and-swap: the first writer wins. kWriting -> kReady by release store after the text.
  std::atomic<uint32_t> state;
  uint32_t length;
  char text[kTextBytes];
};

struct RegionHeader {
  static constexpr uint64_t kMagic = 0x31304c4c4f4344ull;  // "DCOLL01"
  enum State : uint32_t { kOpen = 1, kClosed = 2 };
  enum Alert : uint32_t { kQuiet = 0, kAlert = 1, kNudged = 2 };

  uint64_t magic;
  uint32_t local_rank;
  uint32_t pid;       // of the owner, in the owner's pid namespace
  int32_t numa_node;  // the only one the owner may run on, or -1
  std::atomic<uint32_t> state;
  // Of a subset's region: members that have not let go of it. The last thing a member does with a region is to take
  // itself away (release); at 0 (acquire) the owner may use the memory for another subset.
  std::atomic<uint32_t> users;

  // Rung (incremented) by everybody who acted towards the owner, but for regions that lie in another one, where that
  // one's is rung (Region::door); `sleepers` counts the threads of the owner that wait for it to change: by 1 those
  // that sleep on the doorbell, by kOnBell those that sleep on the bell (bell.h). On one line, so that ringing takes
  // one cache miss.
  static constexpr uint32_t kOnBell = 1 << 16;
  alignas(kLinePair) std::atomic<uint32_t> doorbell;
  std::atomic<uint32_t> sleepers;
  // An Alert: whether the owner has left something to a thread that dozes on the doorbell without being a sleeper.
  std::atomic<uint32_t> alert;

  // Rung by whoever posted a note; the owner's listener sleeps on it. Incremented (release) after the note was posted
  // and read (acquire) before notes are looked for. On a line of its own: nothing else touches it.
  alignas(kLinePair) std::atomic<uint32_t> notes;

  alignas(kLinePair) FailureNotice failure;
  alignas(kLinePair) BoardEntry board;
  alignas(kLinePair) BoardEntry lane_board;
  alignas(kLinePair) ArrivalGroup group;  // in use where the owner is the first rank of a group
};

struct alignas(kLinePair) RingHead {
  std::atomic<uint64_t> popped;  // messages the receiver let go of
};

// `stamp` publishes a message: its sequence number (from 1, modulo 2^32) in the upper half, its length in the lower. A
// receiver that waits for message k sees it in slot k % slots as soon as the stamp's upper half is k, so a message
// short enough to lie beside its stamp arrives in one cache-line transfer; a shared tail index would cost another one.
struct alignas(64) SlotHeader {
  static constexpr size_t kInlineBytes = 48;
  std::atomic<uint64_t> stamp;
  uint64_t unused;
  std::byte inline_data[kInlineBytes];
};
static_assert(sizeof(SlotHeader) == 64);

// Offsets within a region; the same on every rank of the node.
struct RegionLayout {
  int size;
  int slots;
  int flat_ranks;
  size_t slot_bytes;
  size_t arena_bytes;  // whole pages

  size_t slot_stride;
  size_t ring_bytes;
  size_t rings_offset;
  size_t arena_offset;
  size_t region_bytes;

  // Throws ArgumentError when a value is out of range.
  RegionLayout(int size, const MappedOptions& options);

  size_t ring_offset(int sender, int channel) const {
    return rings_offset + ring_bytes * (static_cast<size_t>(sender) * kAllChannels + static_cast<size_t>(channel));
  }
};

// Of the `wanted` address space, what each of a node's ranks can have when all map all: together at most half of what
// x86 gives a process, in whole MiB.
size_t arena_bytes_of_each(size_t wanted, size_t local_ranks);

size_t page_bytes();
// "what: No such file or directory"
std::string errno_text(const std::string& what, int error);

// One mapping of one rank's region; unmaps when destroyed, unless it is part of another mapping.
class Region {
 public:
  // Maps `bytes` of `fd`, or anonymous shared memory when fd is -1.
  Region(int fd, size_t bytes);
  // Memory in `whole`, which `owner` keeps mapped. Its owner's threads sleep on the doorbell of the whole.
  Region(std::byte* base, size_t bytes, std::shared_ptr<const void> owner, const Region& whole);
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  // The owner fills in its header before any other rank can see the region.
  void initialize(int local_rank, int numa_node) const;
  // Before anybody may ring: the owner's bell. Without one nobody sleeps on it.
  void set_bell(Fd bell) { bell_ = std::move(bell); }
  const Fd& bell() const { return whole_.bell_; }

  std::byte* base() const { return base_; }
  size_t bytes() const { return bytes_; }
  RegionHeader& header() const { return *reinterpret_cast<RegionHeader*>(base_); }
  // Where the owner is rung for, whatever region of it is meant: one thread can sleep on all of them.
  RegionHeader& door() const { return *door_; }

  // Memory order: what the caller wrote before ring() is visible to a thread of the owner whose prepare_wait() returned
  // the new value, and to one that such a wait() woke. See "Sleeping" in mapped.h.
  void ring() const;
  // Wakes those that doze on the doorbell too. nudge(): if the owner is alert, for this region.
  void wake() const;
  void nudge() const;

 private:
  std::byte* base_;
  size_t bytes_;
  std::shared_ptr<const void> owner_;  // null: this object
  const Region& whole_;                // what it lies in, or itself
  RegionHeader* door_;                 // of that
  Fd bell_;
};

}  // namespace dcoll
