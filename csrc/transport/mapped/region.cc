#include "transport/mapped/region.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <new>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "transport/bell.h"
#include "transport/os/futex.h"

namespace dcoll {
namespace {

// Of all local ranks: a quarter of x86's user address space. It is in pieces, between the program and its libraries.
constexpr size_t kMaxArenaBytes = size_t{1} << 45;

}  // namespace

size_t arena_bytes_of_each(size_t wanted, size_t local_ranks) {
  constexpr size_t kMiB = size_t{1} << 20;
  return std::min(wanted, kMaxArenaBytes / local_ranks / kMiB * kMiB);
}

size_t page_bytes() {
  static const size_t bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

std::string errno_text(const std::string& what, int error) {
  return what + ": " + std::generic_category().message(error);
}

RegionLayout::RegionLayout(int size_in, const MappedOptions& options)
    : size(size_in), slots(options.slots), flat_ranks(options.flat_ranks), slot_bytes(options.slot_bytes) {
  constexpr int kMaxRanks = 4096;
  constexpr int kMaxSlots = 1 << 16;
  constexpr size_t kMaxSlotBytes = size_t{1} << 30;  // lengths travel as 32 bits
  auto reject = [](const char* what, size_t got, size_t least, size_t most) {
    throw ArgumentError(std::string(what) + " is " + std::to_string(got) + "; allowed are " + std::to_string(least) +
                        " to " + std::to_string(most));
  };
  auto as_size = [](int value) { return value < 0 ? size_t{0} : static_cast<size_t>(value); };
  if (size < 1 || size > kMaxRanks) reject("number of local ranks", as_size(size), 1, kMaxRanks);
  if (slots < 1 || slots > kMaxSlots) reject("number of slots (DCOLL_SLOTS)", as_size(slots), 1, kMaxSlots);
  if (slot_bytes < 1 || slot_bytes > kMaxSlotBytes) reject("slot bytes (DCOLL_SLICE_KB)", slot_bytes, 1, kMaxSlotBytes);
  if (options.arena_bytes > kMaxArenaBytes) {
    reject("arena bytes (DCOLL_ARENA_MB)", options.arena_bytes, 0, kMaxArenaBytes);
  }
  arena_bytes = round_up(options.arena_bytes, page_bytes());
  slot_stride = round_up(sizeof(SlotHeader) + slot_bytes, kLinePair);
  ring_bytes = round_up(sizeof(RingHead) + slot_stride * static_cast<size_t>(slots), page_bytes());
  rings_offset = round_up(sizeof(RegionHeader), page_bytes());
  arena_offset = ring_offset(size, 0);
  region_bytes = arena_offset + arena_bytes;
}

Region::Region(int fd, size_t bytes) : bytes_(bytes), whole_(*this) {
  const int flags = MAP_SHARED | MAP_NORESERVE | (fd < 0 ? MAP_ANONYMOUS : 0);
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
  if (at == MAP_FAILED) {
    throw TransportError(errno_text("cannot map " + std::to_string(bytes) + " bytes of shared memory", errno) +
                         "; lower DCOLL_ARENA_MB, or raise the limit on address space (ulimit -v)");
  }
  base_ = static_cast<std::byte*>(at);
  door_ = &header();
  // A core dump of one rank would otherwise hold every rank's gradients. Failure only makes dumps larger.
  madvise(at, bytes, MADV_DONTDUMP);
}

Region::Region(std::byte* base, size_t bytes, std::shared_ptr<const void> owner, const Region& whole)
    : base_(base), bytes_(bytes), owner_(std::move(owner)), whole_(whole.whole_), door_(whole.door_) {}

Region::~Region() {
  if (owner_ == nullptr) munmap(base_, bytes_);
}

void Region::initialize(int local_rank, int numa_node) const {
  auto* header = new (base_) RegionHeader();
  header->magic = RegionHeader::kMagic;
  header->local_rank = static_cast<uint32_t>(local_rank);
  header->pid = static_cast<uint32_t>(getpid());
  header->numa_node = numa_node;
  header->state.store(RegionHeader::kOpen, std::memory_order_release);
}

void Region::ring() const {
  RegionHeader& to = door();
  to.doorbell.fetch_add(1, std::memory_order_seq_cst);
  const uint32_t sleepers = to.sleepers.load(std::memory_order_seq_cst);
  if (sleepers == 0) return;
  if (sleepers % RegionHeader::kOnBell != 0) futex_wake_waiters(to.doorbell);
  if (sleepers >= RegionHeader::kOnBell) ring_bell(bell().get());
}

void Region::wake() const {
  ring();
  futex_wake_all(door().doorbell);
}

void Region::nudge() const {
  uint32_t expected = RegionHeader::kAlert;
  if (header().alert.load(std::memory_order_relaxed) != expected) return;
  if (header().alert.compare_exchange_strong(expected, RegionHeader::kNudged, std::memory_order_seq_cst)) wake();
}

}  // namespace dcoll
