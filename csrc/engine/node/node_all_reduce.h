// All-reduce between ranks that all share memory: which of the direct forms it takes, as a state machine. A synchronous
// call polls it on its own thread; if the peers are late, the coroutine run_collective awaits the same object, and so
// goes on from whatever was reached.
//
//   bytes          operands        how                                                                     barriers
//   up to 88       anywhere        beside the post, on the board                                           1
//   up to 1 Ki     anywhere        in the slots when the ranks post                                        1
//   above          all mapped      two-shot, in place                                                      2
//   up to 16 Ki    none mapped     in the slots when the ranks post, where ranks share cores               1
//   up to 16 Ki    some mapped     in the slots with a second post, where ranks share cores                2
//   above          not all mapped  staged                                                                  1 a piece
//
// All ranks take the same row: the size is part of the fingerprint, and every rank sees every post.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "engine/board/agreement.h"
#include "engine/core/operation.h"
#include "engine/core/task.h"
#include "engine/node/slots.h"
#include "engine/node/staged.h"
#include "engine/node/two_shot.h"
#include "kernels/reduce.h"

namespace dcoll {

class NodeAllReduce final : public Pollable {
 public:
  // Where two-shot in place begins to pay; measured (docs/notebook/one-node.md).
  static constexpr size_t kInPlaceBytes = 1 << 10;

  enum class Outcome {
    kNone,      // not entered, or not finished
    kDone,      // the result is there
    kMismatch,  // the ranks called different things; nothing was moved
  };

  NodeAllReduce(Board& board, Slots& slots)
      : board_(board),
        slots_(slots),
        two_shot_(board, job_, reduction_),
        staged_(board, slots, job_),
        sources_(board.size()) {}
  NodeAllReduce(const NodeAllReduce&) = delete;  // its forms refer to its job

  // Of an operand that is packed everywhere: the slice that no peer reads, for which Call::tensors may stand.
  Span own_slice(const Call& call) const;

  // What enter() begins, to be set before it, here where it is read: copying what has just been written field by field
  // waits for those writes (docs/notebook/small-calls.md), which a call of a few bytes feels.
  ReduceJob& job() { return job_; }
  // Shows the peers what this rank called, as one post on the board, with the operand or where it lies.
  void enter(uint64_t fingerprint);
  bool poll(bool& moved) override;  // true: finished, with this outcome:
  Outcome outcome() const { return outcome_; }
  void waiting_for(std::vector<int>& ranks) const override;

  // Of a timed job: when this rank entered, noted before any peer can see it, and once it is done, when everybody had.
  int64_t entered_ns() const { return entered_ns_; }
  int64_t agreed_ns() const { return agreed_ns_; }
  const char* form() const;  // that the operands took, once it is done
  // What that is for so many bytes, mapped on all ranks or on none.
  const char* form_of(size_t bytes, bool mapped) const;

 private:
  enum class Phase { kEntered, kInSlots, kFirstPieces, kTwoShot, kStaged };

  void choose_form();  // everybody has entered
  void fill_and_post();
  void fill_first_pieces_and_post();
  void stage();
  void show_operand(std::byte* place) const;
  void prepare();  // what can be looked up while the peers are waited for
  void reduce_all();
  void done();

  Board& board_;
  Slots& slots_;
  ReduceJob job_;
  kernels::Reduction reduction_{DType::kFloat32, ReduceOp::kSum};
  TwoShot two_shot_;
  Staged staged_;
  Phase phase_ = Phase::kEntered;
  Outcome outcome_ = Outcome::kNone;
  int64_t entered_ns_ = 0;
  int64_t agreed_ns_ = 0;
  uint64_t ticket_ = 0;  // this rank's last post, but for those of two_shot_ and staged_
  std::optional<BoardWait> everybody_;
  std::vector<const void*> sources_;  // per rank: where it shows its operand, if that is small
};

}  // namespace dcoll
