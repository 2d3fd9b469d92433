#include "engine/p2p/one_copy.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <string>
#include <utility>

#include "base/error.h"
#include "engine/core/layout.h"
#include "kernels/copy.h"

namespace dcoll {
namespace {

// What is read or written in one look.
constexpr size_t kMostAtOnce = size_t{1} << 20;
// What is larger would not stay in a cache.
constexpr size_t kLeastStreamed = size_t{8} << 20;

// Which bytes of the message a piece is.
ChunkRange range_of(size_t bytes, size_t piece, int rank) {
  const size_t each = SharedPieces::piece_bytes(bytes);
  if (piece < SharedPieces::count(bytes)) return {piece * each, std::min(each, bytes - piece * each)};
  throw TransportError("rank " + std::to_string(rank) + " took a piece behind the end of a message of " +
                       std::to_string(bytes) + " bytes: something wrote over its memory");
}

// Of this process, from an unlikely one on: a sender that has not heard of a failure may look at the word when another
// communicator has its memory, or a program's tensor.
uint32_t next_message() {
  static std::atomic<uint32_t> last{static_cast<uint32_t>(unlikely_word(&last))};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

}  // namespace

bool Reading::some() {
  if (shared != nullptr) return pieces();
  const size_t count = std::min(bytes - at, kMostAtOnce);
  if (!copy(at, count)) return false;
  at += count;
  return true;
}

bool Reading::copy(size_t begin, size_t count) {
  if (mapped != nullptr) {
    if (bytes >= kLeastStreamed) {
      kernels::stream_copy(to + begin, mapped + begin, count);
    } else {
      std::memcpy(to + begin, mapped + begin, count);
    }
    return true;
  }
  try {
    read_peer(who, rank, to + begin, address + begin, count);
    return true;
  } catch (const TransportError&) {
    return false;
  }
}

// What nobody has taken.
bool Reading::pieces() {
  const auto read = [this](size_t piece) {
    const ChunkRange range = range_of(bytes, piece, rank);
    at += range.len;
    return copy(range.begin, range.len);
  };
  for (const size_t end = at + kMostAtOnce; at < end;) {
    const auto piece = shared->take_first();
    if (!piece) break;
    if (!read(*piece)) return false;
  }
  if (!shared->settled()) return true;
  if (const auto piece = shared->given_back(); piece && !read(*piece)) return false;
  at = bytes;
  return true;
}

bool Writing::some() {
  for (size_t written = 0; written < kMostAtOnce;) {
    const auto piece = pieces->take_last(static_cast<uint32_t>(share.message));
    if (!piece) return false;
    any = true;
    const ChunkRange range = range_of(bytes, *piece, rank);
    if (!write_peer(share.who, share.address + range.begin, from + range.begin, range.len)) {
      pieces->could_not_write();
      return false;
    }
    pieces->wrote();
    written += range.len;
  }
  return true;
}

SharedPieces* PieceWords::take(size_t bytes) {
  if (memory_ == nullptr && !std::exchange(asked_, true)) {
    try {
      memory_ = Memory::mapped(window_, kWords * sizeof(SharedPieces));
    } catch (const TransportError&) {
      return nullptr;
    }
    auto* const words = new (memory_->data()) SharedPieces[kWords];
    for (size_t i = 0; i < kWords; ++i) free_.push_back(&words[i]);
  }
  if (free_.empty()) return nullptr;
  SharedPieces* const word = free_.back();
  free_.pop_back();
  word->begin(next_message(), SharedPieces::count(bytes));
  return word;
}

PointShare PieceWords::share_of(const SharedPieces* word, const void* to, const Introduction& who) const {
  return {.pieces = window_->offset_of(word, sizeof *word),
          .message = word->message(),
          .address = reinterpret_cast<uint64_t>(to),
          .who = who};
}

void PieceWords::keep_for_good() noexcept { new (std::nothrow) std::shared_ptr<Memory>(memory_); }

}  // namespace dcoll
