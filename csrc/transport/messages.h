// What transports have in common whose medium carries whole messages (MPI, UCX): transfers in queues per peer and
// channel, the transport's own rooms for messages, and the texts that ranks tell each other beside the data.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "transport/transport.h"

namespace dcoll {

struct FreeAligned {
  void operator()(std::byte* p) const { ::operator delete[](p, std::align_val_t{64}); }
};
using Room = std::unique_ptr<std::byte[], FreeAligned>;

struct Link;

struct Transfer {
  enum class Kind : uint8_t { kSend, kReceive, kNoticeSend, kNoticeReceive };
  Kind kind = Kind::kSend;
  bool done = false;
  bool exact = true;  // receives: a message of `bytes`; else of at most so many, and `bytes` becomes its length
  int peer = 0;
  int channel = 0;
  Link* link = nullptr;  // null for notices
  std::byte* data = nullptr;
  size_t bytes = 0;
  Room room{};              // the transport's own memory, when data lies in it
  void* request = nullptr;  // the medium's
};

// A fixed ring: transfers keep their address while they are outstanding, and nothing is allocated per message.
class TransferQueue {
 public:
  explicit TransferQueue(int slots) : ring_(static_cast<size_t>(slots)) {}
  size_t size() const { return count_; }
  bool full() const { return count_ == ring_.size(); }
  Transfer& front() { return ring_[head_]; }
  Transfer& push(Transfer transfer) {
    Transfer& place = ring_[(head_ + count_++) % ring_.size()];
    place = std::move(transfer);
    return place;
  }
  void drop_back() { --count_; }
  template <class F>
  void for_each(F f) {
    for (size_t i = 0; i < count_; ++i) f(ring_[(head_ + i) % ring_.size()]);
  }
  Room pop() {
    Room room = std::move(ring_[head_].room);
    head_ = (head_ + 1) % ring_.size();
    --count_;
    return room;
  }

 private:
  std::vector<Transfer> ring_;
  size_t head_ = 0;
  size_t count_ = 0;
};

// One (peer, channel), both directions. Made when first used: most ranks talk to few peers.
struct Link {
  explicit Link(int slots) : sends(slots), receives(slots) {}
  TransferQueue sends;
  TransferQueue receives;
  Room staged;  // acquired, not yet committed
  size_t staged_bytes = 0;
  uint64_t posted = 0;
  uint64_t sent = 0;
  void* owner = nullptr;  // the transport, for a medium that calls back
};

// Keeps memory until the process ends: the medium may still read or write it, and there is nobody left to ask when it
// is done.
void keep_forever(Room room);
void keep_forever(std::vector<std::byte> memory);

// What a medium's message is "sent" or "received" by: "MPI send to rank 3 (channel 0, 65536 bytes)".
std::string about(const Transfer& op, const char* medium);

class MessageTransport : public Transport {
 public:
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  size_t max_message_bytes() const override { return max_message_bytes_; }

  bool post_send(int peer, int channel, const void* data, size_t bytes) override;
  std::byte* acquire_send(int peer, int channel, size_t bytes) override;
  void commit_send(int peer, int channel) override;
  uint64_t posted(int peer, int channel) const override;
  uint64_t sent(int peer, int channel) override { return link(peer, channel).sent; }
  bool post_recv(int peer, int channel, void* dst, size_t bytes) override {
    return start_receive(peer, channel, dst, bytes, /*exact=*/true);
  }
  bool post_recv_up_to(int peer, int channel, size_t bytes) override {
    return start_receive(peer, channel, nullptr, bytes, /*exact=*/false);
  }
  const std::byte* front(int peer, int channel) override;
  size_t front_bytes(int peer, int channel) const override;
  void pop(int peer, int channel) override;

  uint32_t prepare_wait() override { return wakes_.load(std::memory_order_acquire); }
  void wait(uint32_t ticket, std::chrono::microseconds limit) override;
  bool wait_beside(Bell& bell, uint32_t ticket, std::chrono::microseconds limit) override;
  void wake() override;
  void doze(uint32_t ticket, std::chrono::microseconds limit) override;
  bool alert(bool) override { return false; }
  uint32_t prepare_listen() override { return listener_wakes_.load(std::memory_order_acquire); }
  void listen(uint32_t ticket, std::chrono::microseconds limit) override;
  void wake_listener() override;

 protected:
  // medium: as messages name it, "MPI".
  MessageTransport(const char* medium, int rank, int size, size_t max_message_bytes, int slots);
  // Hands a send or a receive to the medium; what it throws, nothing was started. It may be done at once.
  virtual void start(Transfer& transfer) = 0;
  // Until the medium has news, ring() was called, `bell` was rung (-1: there is none) or `limit` has passed. Runs
  // without the owner's lock.
  virtual void sleep(std::chrono::microseconds limit, int bell) = 0;
  virtual void ring() = 0;
  // Books what the medium has done. bytes: the length of what was received.
  void finish_send(Transfer& transfer);
  void finish_receive(Transfer& transfer, size_t bytes) const;
  template <class F>
  void for_each_link(F f) {
    for (const auto& link : links_) {
      if (link) f(*link);
    }
  }

  const char* const medium_;
  const int rank_;
  const int size_;
  const size_t max_message_bytes_;
  const int slots_;
  bool closed_ = false;
  bool broken_ = false;  // a failure was seen, sent or received: peers may have messages under way to us for ever

 private:
  size_t index(int peer, int channel) const;
  Link& link(int peer, int channel);
  void check_length(int peer, int channel, size_t bytes) const;
  Room take_room();
  void start_send(Link& to, Transfer transfer);
  bool start_receive(int peer, int channel, void* dst, size_t bytes, bool exact);

  std::vector<std::unique_ptr<Link>> links_;
  std::vector<Room> rooms_;  // free ones
  std::atomic<uint32_t> wakes_{0};
  std::atomic<uint32_t> listener_wakes_{0};  // release and acquire: what was done before wake_listener() is seen after
};

// What ranks tell each other beside the data: that one failed, that one waits in vain and for whom, and notes. The part
// of it that is no matter of the medium.
class HeardNotices {
 public:
  enum Topic : int { kFailure, kStall, kNote };
  static constexpr size_t kTopics = 3;
  // A notice fits the eager limit of every medium we know, so it leaves without the receiver's help.
  static constexpr size_t kMostBytes = Transport::kMostNoteBytes;

  static std::vector<std::byte> as_notice(const std::string& text);
  static std::vector<std::byte> as_notice(const std::vector<int>& waits_for);
  void hear(Topic topic, int from, const std::byte* notice, size_t bytes);

  const std::string& failure() const { return failure_; }  // received; empty: none. The first one counts
  // By rank that told so: whom it waits for, and when that was heard.
  const std::vector<StallNote>& stalls() const { return stalls_; }
  std::vector<Note> take_notes() { return std::exchange(notes_, {}); }

 private:
  std::string failure_;
  std::vector<StallNote> stalls_;
  std::vector<Note> notes_;
};

}  // namespace dcoll
