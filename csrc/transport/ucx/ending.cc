// The end of a UCX transport: what is under way is let go of, and the connections are closed.
#include <sched.h>

#include <utility>
#include <vector>

#include "transport/ucx/worker.h"

namespace dcoll::ucx_plugin {
namespace {

constexpr std::chrono::milliseconds kCloseLimit{500};
// After a failure: what is under way, or an end, may wait for a peer that has failed too and looks at nothing any more.
constexpr std::chrono::milliseconds kMostPatience{2000};

}  // namespace

void UcxTransport::cancel_receives(bool only_others_memory) {
  for_each_link([&](Link& link) {
    link.receives.for_each([&](Transfer& op) {
      if (op.request == nullptr || op.done || (only_others_memory && op.room)) return;
      ucp_request_cancel(worker_, op.request);
    });
  });
}

bool UcxTransport::any_outstanding(bool only_others_memory) {
  bool any = false;
  const auto look = [&](Transfer& op) { any |= op.request != nullptr && !op.done && !(only_others_memory && op.room); };
  for_each_link([&](Link& link) {
    link.sends.for_each(look);
    link.receives.for_each(look);
  });
  return any;
}

bool UcxTransport::progress_until(std::chrono::milliseconds limit, const std::function<bool()>& done) noexcept {
  const auto deadline = Clock::now() + limit;
  while (!done()) {
    if (Clock::now() >= deadline) return false;
    ucp_worker_progress(worker_);
    if (any_lost_) drop_lost_peers();
    sched_yield();
  }
  return true;
}

bool UcxTransport::let_go(std::chrono::milliseconds limit) {
  broken_ = true;
  if (closed_) return true;
  letting_go_ = true;
  cancel_receives(/*only_others_memory=*/true);
  const bool gone = progress_until(limit, [this] { return !any_outstanding(/*only_others_memory=*/true); });
  letting_go_ = false;
  return gone;
}

// Messages that nobody asked for, as farewells of those that closed later: UCX warns of what is left.
void UcxTransport::drop_unread() noexcept {
  ucp_tag_recv_info_t info{};
  while (ucp_tag_message_h message = ucp_tag_probe_nb(worker_, 0, 0, /*remove=*/1, &info)) {
    std::vector<std::byte> memory(info.length);
    ucp_request_param_t param{};
    void* request = ucp_tag_msg_recv_nbx(worker_, memory.data(), memory.size(), message, &param);
    if (!UCS_PTR_IS_PTR(request)) continue;
    progress_until(kCloseLimit, [&] { return ucp_request_check_status(request) != UCS_INPROGRESS; });
    if (ucp_request_check_status(request) == UCS_INPROGRESS) keep_forever(std::move(memory));
    ucp_request_free(request);
  }
}

// Says farewell; what is under way may finish.
void UcxTransport::begin_to_close() noexcept {
  if (closed_) return;
  for (int rank = 0; rank < size_; ++rank) {
    if (peer_of(rank).endpoint != nullptr) tell(rank, kFarewell, {});
  }
  closed_ = true;
  closed_at_ = Clock::now();
  letting_go_ = true;
  cancel_receives(/*only_others_memory=*/false);
  if (listening_ != nullptr) ucp_request_cancel(worker_, listening_);
}

void UcxTransport::close_endpoints(bool clean) noexcept {
  if (parted_) return;
  parted_ = Clock::now();
  for (Peer& peer : peers_) {
    if (peer.endpoint == nullptr) continue;
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = clean && peer.lost == UCS_OK ? 0 : UCP_EP_CLOSE_FLAG_FORCE;
    void* request = ucp_ep_close_nbx(std::exchange(peer.endpoint, nullptr), &param);
    if (UCS_PTR_IS_PTR(request)) peer.closing = request;
  }
}

// A connection of which a peer has not seen the end yet waits for that peer to make progress: one that makes the next
// group, say, in which it waits for this rank.
bool UcxTransport::wind_up() {
  begin_to_close();
  look();
  if (any_lost_) drop_lost_peers();
  const bool clean = nothing_is_under_way();
  if (!clean && !(broken_ && Clock::now() - closed_at_ >= kMostPatience)) return false;
  close_endpoints(clean);
  return endpoints_are_closed() || are_left_alone();
}

// Before a connection is closed its peer has to confirm what was sent. One that has closed its side meanwhile does not,
// of which UCX 1.22 does not always tell over TCP: the close then never ends. A peer that leaves needs nothing more.
bool UcxTransport::are_left_alone() {
  const auto waited = Clock::now() - *parted_;
  if (waited < kCloseLimit) return false;
  if (broken_ && waited >= kMostPatience) return true;
  for (int rank = 0; rank < size_; ++rank) {
    if (is_closing(peer_of(rank)) && !has_left(rank)) return false;
  }
  return true;
}

void UcxTransport::close() noexcept {
  begin_to_close();
  const bool clean = progress_until(kCloseLimit, [this] { return nothing_is_under_way(); });
  close_endpoints(clean);
  progress_until(kCloseLimit, [this] { return endpoints_are_closed() || are_left_alone(); });
  for (Peer& peer : peers_) {
    if (peer.closing != nullptr) ucp_request_free(std::exchange(peer.closing, nullptr));
  }
  drop_unread();
  ucp_worker_destroy(worker_);
  // What is left of it UCX may still read, should it have threads that do.
  if (clean) return;
  for_each_link([](Link& link) {
    const auto keep = [](Transfer& op) {
      if (op.request != nullptr && op.room) keep_forever(std::move(op.room));
    };
    link.sends.for_each(keep);
    link.receives.for_each(keep);
  });
  for (Sent& one : notices_sent_) keep_forever(std::move(one.notice));
}

UcxTransport::~UcxTransport() {
  if (!fork_.in_child()) close();
}

}  // namespace dcoll::ucx_plugin
