// Messages between nodes over UCX: tag matching, the tag is what kind of message, its channel and its sender. Messages
// of one sender with one tag are matched in the order in which they were sent (UCP's own promise).
//
// A transport is a worker of UCX's with an endpoint to each peer that it has to do with, made when that begins. Each
// side makes one, whoever sends, because only who has an endpoint hears of the peer's end. A rank that goes says so
// first: a connection that ends without that is a death.
#pragma once

#include <atomic>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/fork.h"
#include "transport/messages.h"
#include "transport/mpi_events.h"
#include "transport/os/tcp_congestion.h"
#include "transport/ucx/transport.h"

namespace dcoll::ucx_plugin {

using std::chrono::microseconds;

// Notices beside those of HeardNotices::Topic.
inline constexpr int kHello = static_cast<int>(HeardNotices::kTopics), kFarewell = kHello + 1;

class UcxTransport final : public MessageTransport {
 public:
  UcxTransport(ucp_context_h context, Bootstrap& job, size_t max_message_bytes, int slots,
               const std::string& tcp_congestion);
  ~UcxTransport() override;

  const char* name() const override { return "ucx"; }
  void progress() override;
  bool connecting() const override { return connecting_.load(std::memory_order_relaxed) > 0; }
  uint32_t prepare_wait() override {
    arms_.store(true, std::memory_order_relaxed);  // the next look, which has the lock
    return MessageTransport::prepare_wait();
  }
  bool sleeps_well() const override { return over_sockets_; }
  void check_peers() override;
  void post_failure(const std::string& text) override;
  bool let_go(std::chrono::milliseconds limit) override;
  bool wind_up() override;
  std::string poll_failure() override { return notices_.failure(); }
  void post_stall(const std::vector<int>& waits_for) override {
    if (!waits_for.empty()) tell_everybody(HeardNotices::kStall, HeardNotices::as_notice(waits_for));
  }
  std::vector<StallNote> stall_notes() const override { return notices_.stalls(); }
  void post_note(int peer, const std::string& text) override {
    if (!text.empty()) tell(peer, HeardNotices::kNote, HeardNotices::as_notice(text));
  }
  std::vector<Note> take_notes() override {
    if (closed_) return {};
    progress();
    return notices_.take_notes();
  }

 private:
  struct Peer {
    UcxTransport* owner = nullptr;
    std::vector<std::byte> address;
    ucp_ep_h endpoint = nullptr;
    ucs_status_t lost = UCS_OK;  // why it cannot be reached any more
    bool left = false;           // it has said that it goes
    bool met = false;            // a message was done
    void* closing = nullptr;     // the endpoint's close, where that waits for something
  };
  struct Sent {
    std::vector<std::byte> notice;
    std::atomic<int>* connecting = nullptr;  // of a first message
    bool done = false;
  };

  void exchange_addresses(Bootstrap& job);
  void start(Transfer& op) override;
  void start_receive_of(Transfer& op);
  bool is_left_behind(const Transfer& op);
  void connect(int peer);
  Peer& peer_of(int rank) { return peers_[static_cast<size_t>(rank)]; }
  void tell(int peer, int topic, std::vector<std::byte> notice) noexcept;
  void tell_everybody(int topic, const std::vector<std::byte>& notice);
  bool notices_are_sent() const {
    return std::ranges::all_of(notices_sent_, [](const Sent& one) { return one.done; });
  }
  void hear(const ucp_tag_recv_info_t& info);
  void listen_for_notices();
  void sent(Transfer& op, ucs_status_t status);
  void received(Transfer& op, ucs_status_t status, size_t bytes);
  void note_done(const Transfer& op);
  void see_to_connections();
  void look();
  void drop_lost_peers();
  void arm();
  void sleep(microseconds limit, int bell) override;
  void ring() override { events_->wake(); }
  void cancel_receives(bool only_others_memory);
  bool progress_until(std::chrono::milliseconds limit, const std::function<bool()>& done) noexcept;
  bool any_outstanding(bool only_others_memory);
  void drop_unread() noexcept;
  void begin_to_close() noexcept;
  bool nothing_is_under_way() {
    return !any_outstanding(/*only_others_memory=*/false) && listening_ == nullptr && notices_are_sent();
  }
  void close_endpoints(bool clean) noexcept;
  static bool is_closing(const Peer& peer) {
    return peer.closing != nullptr && ucp_request_check_status(peer.closing) == UCS_INPROGRESS;
  }
  bool has_left(int rank);
  bool are_left_alone();
  bool endpoints_are_closed() const { return std::ranges::none_of(peers_, is_closing); }
  void close() noexcept;

  const ForkGuard fork_;
  ucp_worker_h worker_ = nullptr;
  std::vector<Peer> peers_;
  HeardNotices notices_;
  std::vector<std::byte> inbox_;  // of the next notice
  void* listening_ = nullptr;     // the receive of it
  std::list<Sent> notices_sent_;
  std::string error_;  // the first that a callback met, which cannot throw
  bool any_lost_ = false;
  bool letting_go_ = false;
  Clock::time_point closed_at_;
  std::optional<Clock::time_point> parted_;  // when the endpoints began to be closed
  bool failure_posted_ = false;
  std::atomic<bool> over_sockets_ = true;
  uint64_t num_done_ = 0;
  std::atomic<int> connecting_{0};  // peers whose first message waits

  std::unique_ptr<MpiEvents> events_;  // of the worker's own descriptor
  std::atomic<bool> arms_{false};
  std::atomic<bool> busy_{false};  // there was news that no descriptor will announce
  const TcpCongestion congestion_;
  bool connected_ = false;  // since the congestion control was last seen to
};

}  // namespace dcoll::ucx_plugin
