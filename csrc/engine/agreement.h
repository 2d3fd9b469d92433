// The handshake every collective begins with: all ranks show a fingerprint of what they called, and nothing is moved
// before all were seen to be equal. So a mismatch is found before it can do harm, and the job can go on.
#pragma once

#include <cstdint>

#include "engine/arrival_tree.h"
#include "engine/task.h"
#include "transport/transport.h"
#include "transport/window.h"

namespace dcoll {

// The board of a node as one rank uses it: numbered posts, the same numbers on every rank because every rank makes the
// same sequence of them. Post t may be overwritten by post t+2: a rank that makes post t+2 has seen all ranks make t+1,
// and a rank makes t+1 only after it has read everything of t.
class Board {
 public:
  explicit Board(Window& window) : window_(window), size_(window.local_size()), tree_(window) {}

  // Publishes this rank's next post. Everything this rank wrote before is visible to a rank that has seen the post
  // (release store). Returns its number. The peers are woken by the post that completes the ticket and by no other:
  // with p ranks asleep, p-1 wake-ups instead of p(p-1). So a post can be slept for only until everybody has made it.
  uint64_t post(const BoardEntry::Post& post);
  // Acquire load: what `rank` wrote before its post `ticket` is visible after this returned true.
  bool seen(int rank, uint64_t ticket) { return window_.board(rank).posted.load(std::memory_order_acquire) >= ticket; }
  uint64_t next_ticket() const { return ticket_ + 1; }
  // Whether every rank has made post `ticket`; acquires what all wrote before.
  bool complete(uint64_t ticket);
  // Of a complete post: whether all showed the same fingerprint, and how many ranks have both offsets.
  bool fingerprints_equal(uint64_t ticket);
  int count_mapped(uint64_t ticket);
  const BoardEntry::Post& at(int rank, uint64_t ticket) { return window_.board(rank).post[ticket % 2]; }
  int size() const { return size_; }
  bool has_tree() const { return !tree_.empty(); }
  Window& window() { return window_; }

 private:
  bool is_last_arriver(uint64_t ticket);

  Window& window_;
  int size_;
  uint64_t ticket_ = 0;
  ArrivalTree tree_;  // empty for few ranks, where everybody looks at every record
};

// Until every rank of the board has made post `ticket`: a barrier.
class BoardWait final : public Pollable {
 public:
  BoardWait(Board& board, uint64_t ticket) : board_(board), ticket_(ticket) {}
  bool poll(bool& moved) override;
  void waiting_for(std::vector<int>& ranks) const override;

 private:
  Board& board_;
  uint64_t ticket_;
  int next_ = 0;  // ranks before this one have posted
};

// The same by messages, for ranks that share no memory: the dissemination barrier of Hensgen, Finkel and Manber ("Two
// algorithms for barrier synchronization", 1988), carrying the least and the greatest fingerprint seen. ceil(log2 n)
// rounds; in round k rank r tells r + 2^k. Min and max are idempotent, so n need not be a power of two.
class Dissemination final : public Pollable {
 public:
  Dissemination(Transport& transport, uint64_t fingerprint);
  bool poll(bool& moved) override;
  void waiting_for(std::vector<int>& ranks) const override;
  bool equal() const { return state_.least == state_.greatest; }

 private:
  struct State {
    uint64_t least;
    uint64_t greatest;
  };
  int peer(int sign) const;

  Transport& transport_;
  State state_;
  int distance_ = 1;  // 2^k
  bool told_ = false;
  bool posted_ = false;
};

}  // namespace dcoll
