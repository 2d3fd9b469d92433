// Large messages: read by the receiver out of the sender's memory, with the sender's help or without, or sent in slices
// where it cannot.
#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "base/error.h"
#include "engine/p2p/point_to_point.h"
#include "kernels/copy.h"

namespace dcoll {
namespace {

// What is read in one look: others get their turn in between, and the lock.
constexpr size_t kMostAtOnce = size_t{1} << 20;
// What is larger would not stay in a cache.
constexpr size_t kLeastStreamed = size_t{8} << 20;
// From here on the sender may write a part; measured (docs/notebook/one-node.md).
constexpr size_t kLeastShared = size_t{256} << 10;
constexpr size_t kMostShared = 16;  // at once; others are read by the receiver alone

}  // namespace

// ---- In one copy ----

void PointToPoint::begin_reading(Receives& list, Receives::iterator receive, Peer& from, const PointOffer& offer) {
  const int there = ranks_.window == nullptr ? -1 : ranks_.in_window[static_cast<size_t>(from.rank)];
  if (there >= 0 && offer.offset != kUnmappedOffset) {
    const size_t arena = ranks_.window->arena_bytes();
    if (receive->bytes > arena || offer.offset > arena - receive->bytes) {
      throw_damaged(from, "what it offers lies outside its arena");
    }
    receive->mapped = ranks_.window->base(there) + offer.offset;
  } else if (there >= 0 && can_read_private(from, offer.who)) {
    receive->address = offer.address;
  } else {
    return ask(list, receive, from);
  }
  if (receive->bytes >= kLeastShared && receive->operation != nullptr) share(*receive, from);
  reading_.splice(reading_.end(), list, receive);
}

bool PointToPoint::can_read_private(Peer& from, const Introduction& who) {
  if (from.memory == Peer::Memory::kUnknown) {
    from.who = who;
    from.memory = can_read(who) ? Peer::Memory::kReadable : Peer::Memory::kClosed;
  }
  return from.memory == Peer::Memory::kReadable;
}

void PointToPoint::read_on(bool& moved) {
  for (auto receive = reading_.begin(); receive != reading_.end();) {
    const auto now = receive++;
    Peer& from = peer(now->source);
    const size_t before = now->at;
    if (!now->unreadable && !read_some(*now)) {
      now->unreadable = true;
      if (now->shared != nullptr) now->shared->close();
    }
    if (now->unreadable) {
      if (now->shared != nullptr && !now->shared->settled()) continue;
      end_sharing(*now);
      ask(reading_, now, from);
      moved = true;
    } else if (now->at == now->bytes) {
      end_sharing(*now);
      tell(from, {.what = What::kDone, .id = now->id, .key = now->key, .bytes = now->bytes}, nullptr, 0);
      finish(reading_, now, nullptr);
      moved = true;
    } else if (now->at != before) {
      if (now->operation != nullptr) now->operation->last_moved = Clock::now();
      moved = true;
    }
  }
}

// False where the kernel does not let us after all: some memory it reads for its owner alone (a driver's, say).
bool PointToPoint::read_some(Receive& receive) {
  if (receive.shared != nullptr) return read_pieces(receive);
  const size_t bytes = std::min(receive.bytes - receive.at, kMostAtOnce);
  if (!copy(receive, receive.at, bytes)) return false;
  receive.at += bytes;
  return true;
}

bool PointToPoint::copy(Receive& receive, size_t at, size_t bytes) {
  std::byte* to = receive.data + at;
  if (receive.mapped != nullptr) {
    const std::byte* there = receive.mapped + at;
    if (receive.bytes >= kLeastStreamed) {
      kernels::stream_copy(to, there, bytes);
    } else {
      std::memcpy(to, there, bytes);
    }
    return true;
  }
  const int rank = ranks_.job_ranks[static_cast<size_t>(receive.source)];
  try {
    read_peer(peer(receive.source).who, rank, to, receive.address + at, bytes);
    return true;
  } catch (const TransportError&) {
    return false;
  }
}

// ---- In one copy, by both ----

void PointToPoint::share(Receive& receive, Peer& from) {
  if (from.rank == ranks_.transport->rank()) return;
  if (pieces_ == nullptr && !std::exchange(asked_for_pieces_, true)) {
    try {
      pieces_ = Memory::mapped(ranks_.window, kMostShared * sizeof(SharedPieces));
    } catch (const TransportError&) {
      return;  // the arena is full
    }
    auto* const all = new (pieces_->data()) SharedPieces[kMostShared];
    for (size_t i = 0; i < kMostShared; ++i) free_pieces_.push_back(&all[i]);
  }
  if (free_pieces_.empty()) return;
  receive.shared = free_pieces_.back();
  free_pieces_.pop_back();
  receive.shared->begin(++shared_, SharedPieces::count(receive.bytes));
  const PointShare share{.pieces = ranks_.window->offset_of(receive.shared, sizeof(SharedPieces)),
                         .message = shared_,
                         .address = reinterpret_cast<uint64_t>(receive.data),
                         .who = introduce(word_)};
  tell(from, {.what = What::kShare, .id = receive.id, .key = receive.key, .bytes = receive.bytes}, &share,
       sizeof share);
}

void PointToPoint::end_sharing(Receive& receive) {
  if (receive.shared != nullptr) free_pieces_.push_back(std::exchange(receive.shared, nullptr));
}

// Which bytes of the message a piece is.
PointToPoint::Range PointToPoint::range_of(const Peer& other, size_t bytes, size_t piece) const {
  const size_t each = SharedPieces::piece_bytes(bytes);
  if (piece >= SharedPieces::count(bytes)) throw_damaged(other, "a piece behind the end of what is sent");
  return {piece * each, std::min(each, bytes - piece * each)};
}

// As read_some: reads what nobody has taken.
bool PointToPoint::read_pieces(Receive& receive) {
  const auto read = [&](size_t piece) {
    const Range range = range_of(peer(receive.source), receive.bytes, piece);
    receive.at += range.bytes;
    return copy(receive, range.begin, range.bytes);
  };
  for (const size_t end = receive.at + kMostAtOnce; receive.at < end;) {
    const auto piece = receive.shared->take_first();
    if (!piece) break;
    if (!read(*piece)) return false;
  }
  if (!receive.shared->settled()) return true;
  if (const auto piece = receive.shared->given_back(); piece && !read(*piece)) return false;
  receive.at = receive.bytes;
  return true;
}

void PointToPoint::begin_writing(Peer& to, const PointMessage& head, const PointShare& share) {
  const int there = ranks_.window == nullptr ? -1 : ranks_.in_window[static_cast<size_t>(to.rank)];
  if (there < 0 || share.pieces % alignof(SharedPieces) != 0 ||
      share.pieces > ranks_.window->arena_bytes() - sizeof(SharedPieces)) {
    throw_damaged(to, "what it shares lies outside its arena");
  }
  if (ranks_.waiters == nullptr || !can_read_private(to, share.who)) return;
  auto* const pieces = reinterpret_cast<SharedPieces*>(ranks_.window->base(there) + share.pieces);
  to.writing.push_back({head.id, pieces, share});
}

// While a thread of this rank waits. One that computes needs its core, and the receiver gets on without.
void PointToPoint::write_on(Peer& to, bool& moved) {
  if (ranks_.waiters->load(std::memory_order_relaxed) == 0) return;
  for (auto writing = to.writing.begin(); writing != to.writing.end();) {
    const auto now = writing++;
    if (write_some(to, *now, moved)) continue;
    if (now->any) tell(to, {.what = What::kWritten, .id = now->id}, nullptr, 0);
    to.writing.erase(now);
  }
}

// False: nothing is left to write.
bool PointToPoint::write_some(Peer& to, Written& writing, bool& moved) {
  Operation& operation = *to.offered.at(writing.id);
  const Request& r = operation.request;
  for (size_t written = 0; written < kMostAtOnce;) {
    const auto piece = writing.pieces->take_last(static_cast<uint32_t>(writing.share.message));
    if (!piece) return false;
    writing.any = moved = true;
    const Range range = range_of(to, r.count, *piece);
    const auto* from = static_cast<const std::byte*>(r.in) + range.begin;
    if (!write_peer(writing.share.who, writing.share.address + range.begin, from, range.bytes)) {
      writing.pieces->could_not_write();
      return false;
    }
    writing.pieces->wrote();
    written += range.bytes;
    operation.last_moved = Clock::now();
  }
  return true;
}

bool PointToPoint::let_go(Clock::duration limit) {
  const auto end = Clock::now() + limit;
  for (const Receive& receive : reading_) {
    if (receive.shared != nullptr) receive.shared->close();
  }
  for (const Receive& receive : reading_) {
    while (receive.shared != nullptr && !receive.shared->settled()) {
      if (Clock::now() < end) {
        cpu_relax();
        continue;
      }
      // It stopped in the middle of a piece, and may go on: the word it will change stays its.
      new (std::nothrow) std::shared_ptr<Memory>(pieces_);
      return false;
    }
  }
  return true;
}

// ---- In slices ----

void PointToPoint::ask(Receives& list, Receives::iterator receive, Peer& from) {
  receive->at = 0;
  from.coming.splice(from.coming.end(), list, receive);
  tell(from, {.what = What::kAsk, .id = receive->id, .key = receive->key, .bytes = receive->bytes}, nullptr, 0);
}

void PointToPoint::send_slices(Peer& to, bool& moved) {
  Transport& transport = *ranks_.transport;
  const size_t slice = transport.max_message_bytes();
  for (Sliced& message : to.leaving) {
    const Request& r = message.operation->request;
    if (message.at == r.count) continue;
    while (message.at < r.count) {
      const size_t bytes = std::min(slice, r.count - message.at);
      const std::byte* from = static_cast<const std::byte*>(r.in) + message.at;
      if (!transport.post_send(to.rank, kPointDataChannel, from, bytes)) break;
      message.at += bytes;
      message.operation->last_moved = Clock::now();
      moved = true;
    }
    if (message.at < r.count) break;
    message.last = transport.posted(to.rank, kPointDataChannel);
  }
  // Not before the transport needs the caller's memory no more.
  while (!to.leaving.empty() && to.leaving.front().at == to.leaving.front().operation->request.count &&
         transport.sent(to.rank, kPointDataChannel) >= to.leaving.front().last) {
    auto operation = std::move(to.leaving.front().operation);
    to.leaving.pop_front();
    moved = true;
    finish(std::move(operation), nullptr);
  }
}

// Receives are posted ahead, where each slice belongs, over the end of a message too.
void PointToPoint::receive_slices(Peer& from, bool& moved) {
  Transport& transport = *ranks_.transport;
  const size_t slice = transport.max_message_bytes();
  const auto post_ahead = [&] {
    for (Receive& message : from.coming) {
      while (message.expected < message.bytes) {
        const size_t bytes = std::min(slice, message.bytes - message.expected);
        if (!transport.post_recv(from.rank, kPointDataChannel, message.data + message.expected, bytes)) return;
        message.expected += bytes;
      }
    }
  };
  for (;;) {
    post_ahead();
    if (from.coming.empty() || transport.front(from.rank, kPointDataChannel) == nullptr) return;
    const auto front = from.coming.begin();
    front->at += transport.front_bytes(from.rank, kPointDataChannel);
    transport.pop(from.rank, kPointDataChannel);
    moved = true;
    if (front->operation != nullptr) front->operation->last_moved = Clock::now();
    if (front->at == front->bytes) finish(from.coming, front, nullptr);
  }
}

}  // namespace dcoll
