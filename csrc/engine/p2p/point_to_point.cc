#include "engine/p2p/point_to_point.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "transport/endpoint.h"

namespace dcoll {
namespace {

// Two copies cost less than the offer and a system call, up to 64 KiB at least (docs/performance.md). But over MPI and
// UCX each peer's receive is posted with room for one such message, and who has no receive for it keeps a copy.
constexpr size_t kMostEager = size_t{16} << 10;
// What a peer's outbox copies of small messages: then their senders wait until the peer takes some.
constexpr size_t kMostOutboxBytes = size_t{4} << 20;
// Bins that are empty are kept up to so many: a program mostly uses the same few tags.
constexpr size_t kMostEmptyBins = 64;

}  // namespace

PointToPoint::PointToPoint(PointRanks ranks, Finish finish)
    : ranks_(std::move(ranks)),
      finish_(std::move(finish)),
      most_eager_(std::min(kMostEager, ranks_.transport->max_message_bytes() - sizeof(PointMessage))),
      word_(unlikely_word(this)),
      peers_(static_cast<size_t>(ranks_.transport->size())),
      words_(ranks_.window) {}

PointToPoint::Peer& PointToPoint::peer(int rank) {
  std::unique_ptr<Peer>& place = peers_[static_cast<size_t>(rank)];
  if (place == nullptr) {
    known_.reserve(peers_.size());
    place = std::make_unique<Peer>();
    place->rank = rank;
    known_.push_back(place.get());
  }
  return *place;
}

void PointToPoint::meet(int rank) {
  if (rank != kAnySource) {
    peer(rank);
    return;
  }
  if (known_.size() == peers_.size()) return;
  for (int every = 0; every < ranks_.transport->size(); ++every) peer(every);
}

std::string PointToPoint::name(int rank) const {
  return "rank " + std::to_string(ranks_.job_ranks[static_cast<size_t>(rank)]);
}

void PointToPoint::submit(std::shared_ptr<Operation> operation) {
  const Request& r = operation->request;
  operation->started = true;
  meet(r.root);
  if (r.kind == Kind::kSend) return begin_send(std::move(operation));
  auto* const data = static_cast<std::byte*>(r.out);
  begin_receive({.key = r.tag, .peer = r.root, .data = data, .bytes = r.count, .operation = operation});
}

// ---- Sending ----

void PointToPoint::begin_send(std::shared_ptr<Operation> operation) {
  const Request& r = operation->request;
  Peer& to = peer(r.root);
  ++open_;
  if (r.count > most_eager_) return offer(to, std::move(operation));
  const PointMessage head{.what = What::kEager, .key = r.tag, .bytes = r.count};
  const bool copies = to.outbox_bytes + r.count <= kMostOutboxBytes;
  tell(to, head, r.in, r.count, copies ? nullptr : operation);
  if (copies) finish(std::move(operation), nullptr);
}

void PointToPoint::offer(Peer& to, std::shared_ptr<Operation> operation) {
  const Request& r = operation->request;
  PointOffer place{.address = reinterpret_cast<uint64_t>(r.in), .who = introduce(word_)};
  if (ranks_.window != nullptr) place.offset = ranks_.window->offset_of(r.in, r.count);
  do {
    ++to.last_offer;
  } while (to.last_offer == 0 || to.offered.contains(to.last_offer));
  const PointMessage head{.what = What::kOffer, .id = to.last_offer, .key = r.tag, .bytes = r.count};
  to.offered.emplace(head.id, std::move(operation));
  tell(to, head, &place, sizeof place);
}

// Now, or behind what waits already. `operation`: whose memory `data` is, which need not be copied.
void PointToPoint::tell(Peer& to, const PointMessage& head, const void* data, size_t bytes,
                        std::shared_ptr<Operation> operation) {
  if (to.outbox.empty() && put(to, head, data, bytes)) return;
  Unsent unsent{head, {}, std::move(operation)};
  const auto* const begin = static_cast<const std::byte*>(data);
  if (unsent.operation == nullptr) unsent.data.assign(begin, begin + bytes);
  to.outbox_bytes += unsent.data.size();
  to.outbox.push_back(std::move(unsent));
  ++unsent_;
}

bool PointToPoint::put(Peer& to, const PointMessage& head, const void* data, size_t bytes) {
  std::byte* room = ranks_.transport->acquire_send(to.rank, kPointChannel, sizeof head + bytes);
  if (room == nullptr) return false;
  std::memcpy(room, &head, sizeof head);
  if (bytes > 0) std::memcpy(room + sizeof head, data, bytes);
  ranks_.transport->commit_send(to.rank, kPointChannel);
  return true;
}

void PointToPoint::empty_outbox(Peer& to, bool& moved) {
  while (!to.outbox.empty()) {
    Unsent& next = to.outbox.front();
    const void* data = next.operation != nullptr ? next.operation->request.in : next.data.data();
    const size_t bytes = next.operation != nullptr ? next.operation->request.count : next.data.size();
    if (!put(to, next.head, data, bytes)) return;
    moved = true;
    to.outbox_bytes -= next.data.size();
    auto operation = std::move(next.operation);
    to.outbox.pop_front();
    --unsent_;
    if (operation != nullptr) finish(std::move(operation), nullptr);
  }
}

// ---- Receiving ----

void PointToPoint::begin_receive(Receive receive) {
  Bin& bin = bins_[receive.key];
  ++open_;
  const auto found = std::find_if(bin.arrived.begin(), bin.arrived.end(), [&](const Arrived& one) {
    return receive.peer == kAnySource || receive.peer == one.source;
  });
  bin.posted.push_back(std::move(receive));
  const auto last = std::prev(bin.posted.end());
  if (found == bin.arrived.end()) {
    if (const Peer* const left = left_waiting_by(last->peer)) {
      finish(bin.posted, last, error_of_leaving(last->operation->request, name(left->rank), *left->left));
    }
    return;
  }
  std::list<Arrived> met;
  met.splice(met.end(), bin.arrived, found);
  const Arrived& message = met.front();
  const bool eager = message.head.what == What::kEager;
  deliver(bin.posted, last, peer(message.source), message.head,
          eager ? message.data.data() : reinterpret_cast<const std::byte*>(&message.offer));
  forget_empty(message.head.key);
}

// What the peer has said since, in order.
void PointToPoint::hear(Peer& from, bool& moved) {
  Transport& transport = *ranks_.transport;
  const size_t most = sizeof(PointMessage) + std::max({most_eager_, sizeof(PointOffer), sizeof(PointShare)});
  for (;;) {
    if (!from.expecting) from.expecting = transport.post_recv_up_to(from.rank, kPointChannel, most);
    const std::byte* data = from.expecting ? transport.front(from.rank, kPointChannel) : nullptr;
    if (data == nullptr) return;
    moved = true;
    take(from, data, transport.front_bytes(from.rank, kPointChannel));
    transport.pop(from.rank, kPointChannel);
    from.expecting = false;
  }
}

void PointToPoint::throw_damaged(const Peer& from, const std::string& what) const {
  throw TransportError(name(from.rank) + " sent a message that makes no sense (" + what +
                       "): something wrote over its memory, or it runs another version of dcoll");
}

void PointToPoint::take(Peer& from, const std::byte* data, size_t bytes) {
  PointMessage head;
  if (bytes < sizeof head) throw_damaged(from, "it is too short");
  std::memcpy(&head, data, sizeof head);
  data += sizeof head;
  bytes -= sizeof head;
  switch (head.what) {
    case What::kEager:
      if (bytes != head.bytes) throw_damaged(from, "its length is not what it says");
      return match(from, head, data, bytes);
    case What::kOffer:
      if (bytes != sizeof(PointOffer)) throw_damaged(from, "an offer of another length");
      return match(from, head, data, bytes);
    case What::kAsk:
    case What::kDone:
    case What::kTooLong:
    case What::kShare:
      return take_answer(from, head, data, bytes);
    case What::kLeaves:
      if (head.id != 0) return take_answer(from, head, data, bytes);
      return take_leaving(from, {reinterpret_cast<const char*>(data), bytes});
    case What::kWaits:
      from.asks = true;
      if (leaves_) tell_of_leaving(from);
      return;
    case What::kWritten:
      return;
  }
  throw_damaged(from, "of no known kind");
}

void PointToPoint::take_answer(Peer& from, const PointMessage& head, const std::byte* data, size_t bytes) {
  uint64_t sent = 0;
  if (head.what == What::kTooLong) {
    if (bytes != sizeof sent) throw_damaged(from, "an answer of another length");
    std::memcpy(&sent, data, sizeof sent);
    if (head.id == 0) {
      from.complaints.push_back(length_text(/*sent_here=*/true, sent, head.bytes, from.rank, head.key));
      ++complaints_;
      return;
    }
  }
  const auto found = from.offered.find(head.id);
  if (found == from.offered.end()) throw_damaged(from, "an answer to what this rank has not sent");
  if (head.what == What::kShare) {
    PointShare share;
    if (bytes != sizeof share) throw_damaged(from, "an answer of another length");
    std::memcpy(&share, data, sizeof share);
    return begin_writing(from, head, share);
  }
  std::erase_if(from.writing, [&](const Writing& one) { return one.id == head.id; });
  auto operation = std::move(found->second);
  from.offered.erase(found);
  if (head.what == What::kAsk) {
    from.leaving.push_back({std::move(operation)});
  } else if (head.what == What::kDone) {
    finish(std::move(operation), nullptr);
  } else if (head.what == What::kLeaves) {
    const std::string why(reinterpret_cast<const char*>(data), bytes);
    const auto error = error_of_leaving(operation->request, name(from.rank), why);
    finish(std::move(operation), error);
  } else {
    const std::string text = length_text(/*sent_here=*/true, sent, head.bytes, from.rank, head.key);
    finish(std::move(operation), std::make_exception_ptr(MismatchError(text)));
  }
}

std::string PointToPoint::take_complaint(int rank) {
  if (rank != kAnySource) {
    bool moved = false;
    if (Peer* known = peers_[static_cast<size_t>(rank)].get(); known != nullptr) hear(*known, moved);
  }
  if (complaints_ == 0) return "";
  for (Peer* known : known_) {
    if (known->complaints.empty() || (rank != kAnySource && rank != known->rank)) continue;
    std::string text = std::move(known->complaints.front());
    known->complaints.pop_front();
    --complaints_;
    return text;
  }
  return "";
}

// A message has come: to the first receive that wants it, or to those that nobody has asked for.
void PointToPoint::match(Peer& from, const PointMessage& head, const std::byte* data, size_t bytes) {
  Bin& bin = bins_[head.key];
  const auto receive = std::ranges::find_if(
      bin.posted, [&](const Receive& one) { return one.peer == kAnySource || one.peer == from.rank; });
  if (receive == bin.posted.end()) {
    Arrived message{.source = from.rank, .head = head, .data = {}, .offer = {}};
    if (head.what == What::kEager) {
      message.data.assign(data, data + bytes);
    } else {
      std::memcpy(&message.offer, data, sizeof message.offer);
    }
    bin.arrived.push_back(std::move(message));
    if (leaves_ && from.asks && head.what == What::kOffer) tell_of_leaving(from);
    return;
  }
  deliver(bin.posted, receive, from, head, data);
  forget_empty(head.key);
}

void PointToPoint::forget_empty(uint64_t key) {
  if (bins_.size() <= kMostEmptyBins) return;
  const auto found = bins_.find(key);
  if (found->second.posted.empty() && found->second.arrived.empty()) bins_.erase(found);
}

void PointToPoint::deliver(Receives& list, Receives::iterator receive, Peer& from, const PointMessage& head,
                           const std::byte* data) {
  receive->source = from.rank;
  receive->id = head.id;
  if (receive->bytes < head.bytes) return refuse(list, receive, from, head);
  receive->bytes = head.bytes;
  if (head.what == What::kOffer) {
    PointOffer offer;
    std::memcpy(&offer, data, sizeof offer);
    return begin_reading(list, receive, from, offer);
  }
  if (head.bytes > 0) std::memcpy(receive->data, data, head.bytes);
  finish(list, receive, nullptr);
}

void PointToPoint::refuse(Receives& list, Receives::iterator receive, Peer& from, const PointMessage& head) {
  const uint64_t sent = head.bytes;
  PointMessage answer{.what = What::kTooLong, .id = head.id, .key = head.key, .bytes = receive->bytes};
  const std::string text = length_text(/*sent_here=*/false, sent, receive->bytes, from.rank, head.key);
  tell(from, answer, &sent, sizeof sent);
  finish(list, receive, std::make_exception_ptr(MismatchError(text)));
}

std::string PointToPoint::length_text(bool sent_here, size_t sent, size_t wanted, int other, uint64_t key) const {
  const int in_job = ranks_.job_ranks[static_cast<size_t>(other)];
  const std::string here =
      sent_here ? describe_point(Kind::kSend, sent, in_job, key) : describe_point(Kind::kReceive, wanted, in_job, key);
  return here + ": " + name(other) + (sent_here ? " has room for " : " sent ") +
         std::to_string(sent_here ? wanted : sent) +
         " bytes. Receive at least as much as is sent; nothing was copied, and other messages are not affected.";
}

// ---- All of it ----

void PointToPoint::advance(bool& moved) {
  for (Peer* known : known_) {
    hear(*known, moved);
    if (!known->coming.empty()) receive_slices(*known, moved);
    if (!known->outbox.empty()) empty_outbox(*known, moved);
    if (!known->leaving.empty()) send_slices(*known, moved);
    if (!known->writing.empty()) write_on(*known, moved);
  }
  if (!reading_.empty()) read_on(moved);
}

void PointToPoint::finish(Receives& list, Receives::iterator receive, std::exception_ptr error) {
  auto operation = std::move(receive->operation);
  operation->source = receive->source;
  if (error == nullptr) operation->request.count = receive->bytes;
  list.erase(receive);
  finish(std::move(operation), error);
}

void PointToPoint::finish(std::shared_ptr<Operation> operation, std::exception_ptr error) {
  --open_;
  finish_(std::move(operation), error);
}

void PointToPoint::for_each(const std::function<void(Operation&)>& look) const {
  const auto look_at = [&](const std::shared_ptr<Operation>& operation) {
    if (operation != nullptr) look(*operation);
  };
  const auto look_at_all = [&](const Receives& receives) {
    for (const Receive& receive : receives) look_at(receive.operation);
  };
  for (const auto& [key, bin] : bins_) look_at_all(bin.posted);
  look_at_all(reading_);
  for (const Peer* known : known_) {
    look_at_all(known->coming);
    for (const Unsent& unsent : known->outbox) look_at(unsent.operation);
    for (const auto& [id, operation] : known->offered) look_at(operation);
    for (const Sliced& sliced : known->leaving) look_at(sliced.operation);
  }
}

void PointToPoint::abandon(std::exception_ptr error) {
  const auto end_all = [&](Receives& receives) {
    while (!receives.empty()) finish(receives, receives.begin(), error);
  };
  for (auto& [key, bin] : bins_) {
    end_all(bin.posted);
    bin.arrived.clear();
  }
  end_all(reading_);
  for (Peer* known : known_) {
    end_all(known->coming);
    known->writing.clear();
    for (; !known->outbox.empty(); known->outbox.pop_front()) {
      if (auto operation = std::move(known->outbox.front().operation)) finish(std::move(operation), error);
    }
    known->outbox_bytes = 0;
    for (auto& [id, operation] : known->offered) finish(std::move(operation), error);
    known->offered.clear();
    for (; !known->leaving.empty(); known->leaving.pop_front()) finish(known->leaving.front().operation, error);
  }
  unsent_ = 0;
}

}  // namespace dcoll
