#include "transport/messages.h"

#include <algorithm>
#include <climits>
#include <cstring>

#include "base/error.h"
#include "base/ranks_text.h"
#include "transport/bell.h"
#include "transport/os/futex.h"

namespace dcoll {

// Reachable from a static, so that leak checkers see it is meant, and never destroyed. Under the owner's lock.
void keep_forever(Room room) {
  static auto* kept = new std::vector<Room>();
  kept->push_back(std::move(room));
}

void keep_forever(std::vector<std::byte> memory) {
  static auto* kept = new std::vector<std::vector<std::byte>>();
  kept->push_back(std::move(memory));
}

std::string about(const Transfer& op, const char* medium) {
  const bool sends = op.kind == Transfer::Kind::kSend || op.kind == Transfer::Kind::kNoticeSend;
  return std::string(medium) + (sends ? " send to rank " : " receive from rank ") +
         (op.peer < 0 ? std::string("any") : std::to_string(op.peer)) + " (channel " + std::to_string(op.channel) +
         ", " + std::to_string(op.bytes) + " bytes)";
}

MessageTransport::MessageTransport(const char* medium, int rank, int size, size_t max_message_bytes, int slots)
    : medium_(medium), rank_(rank), size_(size), max_message_bytes_(max_message_bytes), slots_(slots) {
  if (max_message_bytes == 0 || max_message_bytes > static_cast<size_t>(INT_MAX) || slots < 1) {
    throw ArgumentError(std::string(medium) + " messages of " + std::to_string(max_message_bytes) + " bytes in " +
                        std::to_string(slots) + " slots are not possible: 1 to " + std::to_string(INT_MAX) +
                        " bytes and at least 1 slot are. Set DCOLL_SLICE_KB and DCOLL_SLOTS accordingly");
  }
  links_.resize(static_cast<size_t>(size_) * kAllChannels);
}

size_t MessageTransport::index(int peer, int channel) const {
  if (peer < 0 || peer >= size_ || channel < 0 || channel >= kAllChannels) {
    throw ArgumentError("peer " + std::to_string(peer) + ", channel " + std::to_string(channel) +
                        " does not exist: ranks are 0.." + std::to_string(size_ - 1) + ", channels 0.." +
                        std::to_string(kAllChannels - 1));
  }
  return static_cast<size_t>(peer) * kAllChannels + static_cast<size_t>(channel);
}

Link& MessageTransport::link(int peer, int channel) {
  std::unique_ptr<Link>& place = links_[index(peer, channel)];
  if (!place) {
    place = std::make_unique<Link>(slots_);
    place->owner = this;
  }
  return *place;
}

void MessageTransport::check_length(int peer, int channel, size_t bytes) const {
  if (closed_) {
    throw TransportError("the " + std::string(medium_) + " transport is closed; it ended before the communicator did");
  }
  if (bytes >= 1 && bytes <= max_message_bytes_) return;
  throw ArgumentError("a message of " + std::to_string(bytes) + " bytes to or from rank " + std::to_string(peer) +
                      " on channel " + std::to_string(channel) + " is not possible: 1 to " +
                      std::to_string(max_message_bytes_) + " bytes are");
}

Room MessageTransport::take_room() {
  if (rooms_.empty()) {
    return Room(static_cast<std::byte*>(::operator new[](max_message_bytes_, std::align_val_t{64})));
  }
  Room room = std::move(rooms_.back());
  rooms_.pop_back();
  return room;
}

void MessageTransport::start_send(Link& to, Transfer transfer) {
  transfer.link = &to;
  Transfer& op = to.sends.push(std::move(transfer));
  ++to.posted;
  try {
    start(op);
  } catch (...) {
    to.sends.drop_back();
    --to.posted;
    broken_ = true;
    throw;
  }
}

bool MessageTransport::post_send(int peer, int channel, const void* data, size_t bytes) {
  check_length(peer, channel, bytes);
  Link& to = link(peer, channel);
  if (to.sends.size() + (to.staged ? 1 : 0) >= static_cast<size_t>(slots_)) return false;
  auto* const from = static_cast<std::byte*>(const_cast<void*>(data));
  start_send(to, {.peer = peer, .channel = channel, .data = from, .bytes = bytes});
  return true;
}

std::byte* MessageTransport::acquire_send(int peer, int channel, size_t bytes) {
  check_length(peer, channel, bytes);
  Link& to = link(peer, channel);
  if (!to.staged) {
    if (to.sends.full()) return nullptr;
    to.staged = take_room();
  }
  to.staged_bytes = bytes;
  return to.staged.get();
}

void MessageTransport::commit_send(int peer, int channel) {
  Link& to = link(peer, channel);
  if (!to.staged) {
    throw ArgumentError("commit_send to rank " + std::to_string(peer) + " on channel " + std::to_string(channel) +
                        " without acquire_send before it");
  }
  auto* const from = to.staged.get();
  start_send(to,
             {.peer = peer, .channel = channel, .data = from, .bytes = to.staged_bytes, .room = std::move(to.staged)});
}

uint64_t MessageTransport::posted(int peer, int channel) const {
  const std::unique_ptr<Link>& place = links_[index(peer, channel)];
  return place ? place->posted : 0;
}

bool MessageTransport::start_receive(int peer, int channel, void* dst, size_t bytes, bool exact) {
  check_length(peer, channel, bytes);
  Link& from = link(peer, channel);
  if (from.receives.full()) return false;
  Transfer fresh{.kind = Transfer::Kind::kReceive, .exact = exact, .peer = peer, .channel = channel, .link = &from};
  fresh.bytes = bytes;
  if (dst == nullptr) fresh.room = take_room();
  fresh.data = dst ? static_cast<std::byte*>(dst) : fresh.room.get();
  Transfer& op = from.receives.push(std::move(fresh));
  try {
    start(op);
  } catch (...) {
    from.receives.drop_back();
    broken_ = true;
    throw;
  }
  return true;
}

const std::byte* MessageTransport::front(int peer, int channel) {
  Link& from = link(peer, channel);
  if (from.receives.size() == 0 || !from.receives.front().done) return nullptr;
  return from.receives.front().data;
}

size_t MessageTransport::front_bytes(int peer, int channel) const {
  const std::unique_ptr<Link>& place = links_[index(peer, channel)];
  return place && place->receives.size() > 0 ? place->receives.front().bytes : 0;
}

void MessageTransport::pop(int peer, int channel) {
  if (front(peer, channel) == nullptr) {
    throw ArgumentError("pop of a message from rank " + std::to_string(peer) + " on channel " +
                        std::to_string(channel) + " that has not arrived; call front() first");
  }
  if (Room room = link(peer, channel).receives.pop()) rooms_.push_back(std::move(room));
}

void MessageTransport::wait(uint32_t ticket, std::chrono::microseconds limit) {
  if (wakes_.load(std::memory_order_acquire) == ticket) sleep(limit, /*bell=*/-1);
}

bool MessageTransport::wait_beside(Bell& bell, uint32_t ticket, std::chrono::microseconds limit) {
  if (!bell.begin_wait(ticket)) return true;
  sleep(limit, bell.descriptor());
  bell.end_wait();
  return true;
}

void MessageTransport::wake() {
  wakes_.fetch_add(1, std::memory_order_release);
  ring();
  futex_wake_all(wakes_);
}

void MessageTransport::doze(uint32_t ticket, std::chrono::microseconds limit) { futex_wait(wakes_, ticket, limit); }

void MessageTransport::listen(uint32_t ticket, std::chrono::microseconds limit) {
  futex_wait(listener_wakes_, ticket, limit);
}

void MessageTransport::wake_listener() {
  listener_wakes_.fetch_add(1, std::memory_order_release);
  futex_wake_all(listener_wakes_);
}

void MessageTransport::finish_send(Transfer& op) {
  op.done = true;
  while (op.link->sends.size() > 0 && op.link->sends.front().done) {
    if (Room room = op.link->sends.pop()) rooms_.push_back(std::move(room));
    ++op.link->sent;
  }
}

void MessageTransport::finish_receive(Transfer& op, size_t bytes) const {
  if (!op.exact) op.bytes = bytes;  // no longer than posted: the medium reports truncation as an error
  if (bytes != op.bytes) {
    throw TransportError("rank " + std::to_string(op.peer) + " sent " + std::to_string(bytes) + " bytes on channel " +
                         std::to_string(op.channel) + " where " + std::to_string(op.bytes) +
                         " were expected. Run the same dcoll version with the same DCOLL_* settings on every rank");
  }
  op.done = true;
}

// At most kMostBytes of the text, in whole UTF-8 characters.
std::vector<std::byte> HeardNotices::as_notice(const std::string& text) {
  const auto* characters = reinterpret_cast<const std::byte*>(text.data());
  return {characters, characters + whole_characters(text, kMostBytes)};
}

std::vector<std::byte> HeardNotices::as_notice(const std::vector<int>& waits_for) {
  std::vector<std::byte> notice(std::min(waits_for.size(), kMostBytes / sizeof(int)) * sizeof(int));
  if (!notice.empty()) std::memcpy(notice.data(), waits_for.data(), notice.size());
  return notice;
}

void HeardNotices::hear(Topic topic, int from, const std::byte* notice, size_t bytes) {
  if (topic == kStall) {
    StallNote note{.rank = from, .waits_for = {}, .heard = Clock::now()};
    note.waits_for.resize(bytes / sizeof(int));
    if (!note.waits_for.empty()) std::memcpy(note.waits_for.data(), notice, note.waits_for.size() * sizeof(int));
    std::erase_if(stalls_, [&](const StallNote& old) { return old.rank == from; });
    stalls_.push_back(std::move(note));
    return;
  }
  std::string text(reinterpret_cast<const char*>(notice), bytes);
  if (topic == kNote) {
    notes_.push_back({from, std::move(text)});
  } else if (failure_.empty()) {
    failure_ = std::move(text);
  }
}

}  // namespace dcoll
