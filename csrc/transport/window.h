// Memory of peers, mapped here: what the direct collectives read and write in place.
//
// Every rank of a node owns one arena (a large sparse mapping); every other rank of the node maps it too. A buffer is
// then (rank, offset), and offsets are meaningful everywhere, so allocating needs no agreement between ranks.
//
// The board is one pair of records per local rank, for posting "my operand is at offset X, for post number T with
// fingerprint F" and waiting until everybody did. A record lies on one pair of cache lines, ticket first, so a post and
// an operand of a few bytes reach a peer in one cache-line transfer.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace dcoll {

inline constexpr uint64_t kUnmappedOffset = ~uint64_t{0};

// A word that another process may write to at any time: what is checked and what is used must be one load.
inline uint64_t read_once(const uint64_t& word) { return __atomic_load_n(&word, __ATOMIC_RELAXED); }
inline void write_once(uint64_t& word, uint64_t value) { __atomic_store_n(&word, value, __ATOMIC_RELAXED); }

struct BoardEntry {
  struct Post {
    uint64_t fingerprint = 0;
    uint64_t offset_in = 0;  // in this rank's arena; kUnmapped when the buffer is not in it
    uint64_t offset_out = 0;
    uint64_t value = 0;  // free for the collective (e.g. a count for ragged all-gather)

    bool mapped() const { return offset_in != kUnmappedOffset && offset_out != kUnmappedOffset; }
    Post read() const {
      return {read_once(fingerprint), read_once(offset_in), read_once(offset_out), read_once(value)};
    }
  };
  struct alignas(128) Record {
    static constexpr size_t kInlineBytes = 128 - sizeof(uint64_t) - sizeof(Post);
    // The number of the post this record holds, 0 before the first. Memory order: written last (release), read first
    // (acquire), so whatever the owner wrote before it, here and elsewhere, is visible to a rank that saw the ticket.
    std::atomic<uint64_t> ticket{0};
    Post post;
    std::byte inline_data[kInlineBytes] = {};
  };
  // Post t is in record t % 2: a fast rank may make post t+1 while a slow one still reads t.
  Record record[2];
};
static_assert(sizeof(BoardEntry::Record) == 128);

// Where some ranks of a node count their arrivals when there are too many ranks for everybody to look at every record:
// the shared part of engine/board/arrival_tree.h, which says who writes what when. In memory of the group's first rank.
struct ArrivalGroup {
  // What a group, or everybody, posted.
  struct Summary {
    uint64_t least = ~uint64_t{0};  // fingerprint
    uint64_t greatest = 0;          // equal to `least` when all called the same
    uint64_t mapped = 0;            // ranks with both offsets
  };
  // Written by those who arrive. Counts and summaries are per parity of the post, as the records are. Memory order:
  // acq_rel increments, so the one that completes a count sees what all the others wrote before they arrived.
  alignas(128) std::atomic<uint64_t> arrived[2]{};
  Summary summary[2];                                      // of this group, by its last arriver
  alignas(128) std::atomic<uint64_t> groups_arrived[2]{};  // in use in the first group only: the root
  // Read by those who wait, on lines that nobody writes to while they wait.
  alignas(128) std::atomic<uint64_t> released{0};  // post that everybody made; release store, acquire load
  std::atomic<uint32_t> sleepers{0};               // members in Transport::wait; see "Sleeping" in mapped.h
  Summary outcome[2];                              // of all groups
};

class Window {
 public:
  static constexpr uint64_t kUnmapped = kUnmappedOffset;
  virtual ~Window() = default;

  virtual int local_rank() const = 0;
  virtual int local_size() const = 0;
  virtual std::byte* base(int local_rank) const = 0;        // of that rank's arena, in this process's address space
  virtual size_t arena_bytes() const = 0;                   // the same on every rank
  virtual std::string rank_name(int local_rank) const = 0;  // for messages
  virtual BoardEntry& board(int local_rank) = 0;
  virtual BoardEntry& lane_board(int local_rank) = 0;  // of the second sequence of collectives (named_lane.h)
  // Wakes every peer that sleeps in Transport::wait. Call after completing a post on the board (the last arriver does:
  // nobody can go on before, so waking anybody earlier only costs system calls and context switches).
  virtual void notify_all() = 0;
  // The groups of the arrival tree, ranks of one NUMA node together; none when every rank looks at every record.
  virtual const std::vector<std::vector<int>>& groups() const = 0;
  virtual ArrivalGroup& group(int group) = 0;
  // Publishes that post `ticket` is complete to all groups, and wakes those of their members that sleep.
  virtual void release_groups(uint64_t ticket) = 0;

  // Own arena: page-aligned blocks. alloc throws TransportError when full, saying how large it is and which setting
  // enlarges it. free returns the pages to the system.
  virtual std::byte* alloc(size_t bytes) = 0;
  virtual void free(std::byte* block) = 0;

  // Offset of p in the own arena, or kUnmapped if [p, p+bytes) does not lie in it.
  uint64_t offset_of(const void* p, size_t bytes) const {
    const auto* b = static_cast<const std::byte*>(p);
    const std::byte* own = base(local_rank());
    if (b < own || b + bytes > own + arena_bytes()) return kUnmapped;
    return static_cast<uint64_t>(b - own);
  }
};

}  // namespace dcoll
