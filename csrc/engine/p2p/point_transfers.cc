// Large messages: read by the receiver out of the sender's memory, with the sender's help or without, or sent in slices
// where it cannot.
#include <algorithm>
#include <utility>

#include "base/error.h"
#include "engine/p2p/point_to_point.h"

namespace dcoll {
namespace {

// From here on the sender may write a part; measured (docs/notebook/one-node.md).
constexpr size_t kLeastShared = size_t{256} << 10;

}  // namespace

// ---- In one copy ----

void PointToPoint::begin_reading(Receives& list, Receives::iterator receive, Peer& from, const PointOffer& offer) {
  const int there = ranks_.window == nullptr ? -1 : ranks_.in_window[static_cast<size_t>(from.rank)];
  Reading& reading = receive->reading;
  reading = {.to = receive->data, .bytes = receive->bytes, .rank = ranks_.job_ranks[static_cast<size_t>(from.rank)]};
  if (there >= 0 && offer.offset != kUnmappedOffset) {
    const size_t arena = ranks_.window->arena_bytes();
    if (receive->bytes > arena || offer.offset > arena - receive->bytes) {
      throw_damaged(from, "what it offers lies outside its arena");
    }
    reading.mapped = ranks_.window->base(there) + offer.offset;
  } else if (there >= 0 && from.can_be_read(offer.who)) {
    reading.address = offer.address;
    reading.who = from.who;
  } else {
    return ask(list, receive, from);
  }
  const bool both = receive->bytes >= kLeastShared && from.rank != ranks_.transport->rank();
  if (both) reading.shared = words_.take(receive->bytes);
  if (reading.shared != nullptr) {
    const PointShare share = words_.share_of(reading.shared, receive->data, introduce(word_));
    tell(from, {.what = What::kShare, .id = receive->id, .key = receive->key, .bytes = receive->bytes}, &share,
         sizeof share);
  }
  reading_.splice(reading_.end(), list, receive);
}

bool PointToPoint::Peer::can_be_read(const Introduction& introduction) {
  if (memory == Memory::kUnknown) {
    who = introduction;
    memory = can_read(who) ? Memory::kReadable : Memory::kClosed;
  }
  return memory == Memory::kReadable;
}

void PointToPoint::read_on(bool& moved) {
  for (auto receive = reading_.begin(); receive != reading_.end();) {
    const auto now = receive++;
    Reading& reading = now->reading;
    const size_t before = reading.at;
    if (!now->unreadable && !reading.some()) {
      now->unreadable = true;
      if (reading.shared != nullptr) reading.shared->close();
    }
    const bool over = now->unreadable ? reading.shared == nullptr || reading.shared->settled() : reading.done();
    if (over) {
      if (reading.shared != nullptr) words_.give_back(std::exchange(reading.shared, nullptr));
      Peer& from = peer(now->source);
      moved = true;
      if (now->unreadable) {
        ask(reading_, now, from);
        continue;
      }
      tell(from, {.what = What::kDone, .id = now->id, .key = now->key, .bytes = now->bytes}, nullptr, 0);
      finish(reading_, now, nullptr);
    } else if (reading.at != before) {
      now->operation->last_moved = Clock::now();
      moved = true;
    }
  }
}

void PointToPoint::begin_writing(Peer& to, const PointMessage& head, const PointShare& share) {
  const int there = ranks_.window == nullptr ? -1 : ranks_.in_window[static_cast<size_t>(to.rank)];
  if (there < 0 || share.pieces % alignof(SharedPieces) != 0 ||
      share.pieces > ranks_.window->arena_bytes() - sizeof(SharedPieces)) {
    throw_damaged(to, "what it shares lies outside its arena");
  }
  if (ranks_.waiters == nullptr || !to.can_be_read(share.who)) return;
  const Request& r = to.offered.at(head.id)->request;
  to.writing.push_back({.id = head.id,
                        .from = static_cast<const std::byte*>(r.in),
                        .bytes = r.count,
                        .pieces = reinterpret_cast<SharedPieces*>(ranks_.window->base(there) + share.pieces),
                        .share = share,
                        .rank = ranks_.job_ranks[static_cast<size_t>(to.rank)]});
}

// While a thread of this rank waits. One that computes needs its core, and the receiver gets on without.
void PointToPoint::write_on(Peer& to, bool& moved) {
  const auto tell_of = [&](Writing& writing) {
    if (std::exchange(writing.any, false)) tell(to, {.what = What::kWritten, .id = writing.id}, nullptr, 0);
  };
  if (ranks_.waiters->load(std::memory_order_relaxed) == 0) {
    std::ranges::for_each(to.writing, tell_of);  // it may sleep, and this may have been all
    return;
  }
  for (auto writing = to.writing.begin(); writing != to.writing.end();) {
    const auto now = writing++;
    moved = true;
    to.offered.at(now->id)->last_moved = Clock::now();
    if (now->some()) continue;
    tell_of(*now);
    to.writing.erase(now);
  }
}

bool PointToPoint::let_go(Clock::duration limit) noexcept {
  const auto end = Clock::now() + limit;
  bool all = true;
  for (const Receive& receive : reading_) {
    if (receive.reading.shared != nullptr) all &= receive.reading.shared->settle_by(end);
  }
  if (!all) words_.keep_for_good();
  return all;
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
    front->operation->last_moved = Clock::now();
    if (front->at == front->bytes) finish(from.coming, front, nullptr);
  }
}

}  // namespace dcoll
