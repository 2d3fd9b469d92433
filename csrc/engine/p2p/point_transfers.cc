// Large messages: read by the receiver out of the sender's memory, or sent in slices where it cannot.
#include <algorithm>
#include <cstring>
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
    moved = true;
    Peer& from = peer(now->source);
    if (!read_some(*now)) {
      ask(reading_, now, from);
    } else if (now->at == now->bytes) {
      tell(from, {.what = What::kDone, .id = now->id, .key = now->key, .bytes = now->bytes}, nullptr, 0);
      finish(reading_, now, nullptr);
    } else if (now->operation != nullptr) {
      now->operation->last_moved = Clock::now();
    }
  }
}

// False where the kernel does not let us after all: some memory it reads for its owner alone (a driver's, say).
bool PointToPoint::read_some(Receive& receive) {
  const size_t bytes = std::min(receive.bytes - receive.at, kMostAtOnce);
  std::byte* to = receive.data + receive.at;
  if (receive.mapped != nullptr) {
    const std::byte* there = receive.mapped + receive.at;
    if (receive.bytes >= kLeastStreamed) {
      kernels::stream_copy(to, there, bytes);
    } else {
      std::memcpy(to, there, bytes);
    }
  } else {
    const int rank = ranks_.job_ranks[static_cast<size_t>(receive.source)];
    try {
      read_peer(peer(receive.source).who, rank, to, receive.address + receive.at, bytes);
    } catch (const TransportError&) {
      return false;
    }
  }
  receive.at += bytes;
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
