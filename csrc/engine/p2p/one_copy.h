// Large messages in one copy: the receiver reads them out of the sender's memory, and a sender that waits writes a part
// of a long one into the receiver's (shared_pieces.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "engine/core/memory.h"
#include "engine/node/peer_memory.h"
#include "engine/p2p/point_message.h"
#include "engine/p2p/shared_pieces.h"
#include "transport/window.h"

namespace dcoll {

// What a receiver reads.
struct Reading {
  std::byte* to = nullptr;
  size_t bytes = 0;
  const std::byte* mapped = nullptr;  // where it lies in the sender's arena,
  uint64_t address = 0;               // or in its private memory:
  Introduction who{};                 // whose that is,
  int rank = -1;                      // and what messages call the sender
  SharedPieces* shared = nullptr;     // the sender writes, too
  size_t at = 0;                      // bytes that are here; with `shared`, that were read here, until it is done

  bool done() const { return at == bytes; }
  // Reads so much that others get their turn in between, and the lock. False where the kernel does not let us after
  // all: some memory it reads for its owner alone (a driver's, say).
  bool some();

 private:
  bool copy(size_t begin, size_t count);
  bool pieces();
};

// What a sender may write of a message of so many bytes.
struct Writing {
  uint32_t id;
  const std::byte* from;
  size_t bytes;
  SharedPieces* pieces;
  PointShare share;
  int rank;          // what messages call the receiver
  bool any = false;  // some was written

  // As Reading. False: nothing is left, or the kernel does not let us.
  bool some();
};

// The words of SharedPieces that a receiver has in its arena.
class PieceWords {
 public:
  explicit PieceWords(std::shared_ptr<Window> window) : window_(std::move(window)) {}
  // One that nobody uses, for a message of so many bytes. Null: there is none, or the arena is full.
  SharedPieces* take(size_t bytes);
  void give_back(SharedPieces* word) { free_.push_back(word); }
  // What the sender is told of it; `who` may be written to.
  PointShare share_of(const SharedPieces* word, const void* to, const Introduction& who) const;
  // A sender has stopped in the middle of a piece, and may go on: the word that it will change stays its.
  void keep_for_good() noexcept;

 private:
  static constexpr size_t kWords = 16;  // more messages at once are read by the receiver alone
  const std::shared_ptr<Window> window_;
  std::shared_ptr<Memory> memory_;
  bool asked_ = false;
  std::vector<SharedPieces*> free_;
};

}  // namespace dcoll
