// How many ranks learn that everybody has posted, without everybody looking at everybody's record: a software combining
// tree (Yew, Tzeng and Lawrie, "Distributing hot-spot addressing in large-scale multiprocessors", 1987, section 3) of
// two levels, over groups of about sqrt(p) ranks.
//
//   1. A rank that has written its record counts itself in its group. The last one of the group reads the group's
//      records, keeps the least and the greatest fingerprint, and counts the group at the root.
//   2. The last group's last rank reads the groups' summaries and releases every group: one line each, which the
//      group's members watch.
//
// Nobody waits on the way up, so a rank that posted may sleep or compute; only the last arriver wakes anybody.
//
// Cache misses of one barrier, on paper, when every rank has a core. Flat: each of p records is read by p-1 others and
// then taken back by its owner. Tree, with groups of g ranks: p records taken back and read by one, p counts, p/g
// counts at the root, p/g summaries written and read, p/g lines released, p looks at them.
//
//      p    flat, all   most readers of one line    tree, all   most on one line   longest chain of dependent misses
//      2        4            1                         -             -             2
//      8       64            7                         -             -             8 (the 7 reads overlap)
//    128   16,384          127                       556            12             12 counts + 12 reads (overlapping)
//                                                                                  + 11 counts + 11 reads
//                                                                                  + 11 stores + 1
//
// The offsets of p operands still have to be read by all where a collective reads all operands (two-shot): p-1 misses
// per rank, but each behind the barrier, on p different lines, and all under way at once.
//
// Memory order: records and data are written before the count (acq_rel), summaries before the count at the root
// (acq_rel), the outcome before `released` (seq_cst store, acquire load). So what any rank wrote before its post is
// visible to every rank that has seen the release. Counts and summaries alternate by the parity of the post; as with
// records, post t+2 is made only after t was seen complete and has been read.
#pragma once

#include <cstdint>
#include <vector>

#include "transport/window.h"

namespace dcoll {

class ArrivalTree {
 public:
  explicit ArrivalTree(Window& window);

  bool empty() const { return groups_.empty(); }
  // This rank has written its record of post `ticket`. Returns -1, or the rank in whose memory a count is that no ranks
  // can have made.
  int arrive(uint64_t ticket);
  // The last post that everybody made.
  uint64_t released() const { return own_->released.load(std::memory_order_acquire); }
  // Of all ranks' records; valid from released() == ticket until this rank's next post.
  const ArrivalGroup::Summary& outcome(uint64_t ticket) const { return own_->outcome[ticket % 2]; }
  // The rank in whose memory these words are.
  int keeper() const { return members_->front(); }

 private:
  ArrivalGroup::Summary summarize_members(uint64_t ticket);

  Window& window_;
  std::vector<ArrivalGroup*> groups_;
  const std::vector<int>* members_ = nullptr;  // of this rank's group
  ArrivalGroup* own_ = nullptr;
};

}  // namespace dcoll
