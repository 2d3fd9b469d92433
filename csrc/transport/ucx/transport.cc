#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "base/error.h"
#include "transport/ucx/worker.h"

namespace dcoll::ucx_plugin {

namespace {

// Not longer, should something come that nothing announced.
constexpr microseconds kLongestSleep{2000};
constexpr std::chrono::milliseconds kTellLimit{100};
constexpr int kMostLooks = 16;  // of one progress()

constexpr uint64_t kNoticeBit = uint64_t{1} << 63;

ucp_tag_t tag_of(int channel, int sender) {
  return static_cast<uint64_t>(channel) << 32 | static_cast<uint32_t>(sender);
}

ucp_request_param_t parameters(void* user_data) {
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  param.user_data = user_data;
  param.memory_type = UCS_MEMORY_TYPE_HOST;
  return param;
}

}  // namespace

UcxTransport::UcxTransport(ucp_context_h context, Bootstrap& job, size_t max_message_bytes, int slots,
                           const std::string& tcp_congestion)
    : MessageTransport("UCX", job.rank(), job.size(), max_message_bytes, slots),
      peers_(static_cast<size_t>(job.size())),
      inbox_(HeardNotices::kMostBytes),
      congestion_(tcp_congestion) {
  ucp_worker_params_t params{};
  params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  check_ucx(ucp_worker_create(context, &params, &worker_), "ucp_worker_create");
  try {
    int descriptor = -1;
    check_ucx(ucp_worker_get_efd(worker_, &descriptor), "ucp_worker_get_efd");
    events_ = std::make_unique<MpiEvents>(std::vector<int>{descriptor}, true);
    exchange_addresses(job);
    listen_for_notices();
  } catch (...) {
    ucp_worker_destroy(worker_);
    throw;
  }
}

// In one exchange where no address is longer than most are; in two where one is.
void UcxTransport::exchange_addresses(Bootstrap& job) {
  struct Beginning {
    size_t length;
    std::array<std::byte, 1016> bytes;
  };
  ucp_address_t* own = nullptr;
  Beginning mine{};
  check_ucx(ucp_worker_get_address(worker_, &own, &mine.length), "ucp_worker_get_address");
  const auto release = [this](ucp_address_t* address) { ucp_worker_release_address(worker_, address); };
  const std::unique_ptr<ucp_address_t, decltype(release)> address(own, release);
  std::memcpy(mine.bytes.data(), own, std::min(mine.length, mine.bytes.size()));
  const std::vector<Beginning> beginnings = job.gather(mine);
  const size_t longest = std::ranges::max_element(beginnings, {}, &Beginning::length)->length;
  std::vector<std::byte> whole;
  if (longest > mine.bytes.size()) {
    std::vector<std::byte> padded(longest);
    std::memcpy(padded.data(), own, mine.length);
    whole = job.all_gather(padded.data(), longest);
  }
  for (size_t rank = 0; rank < peers_.size(); ++rank) {
    const std::byte* theirs = whole.empty() ? beginnings[rank].bytes.data() : whole.data() + rank * longest;
    peers_[rank].owner = this;
    peers_[rank].address.assign(theirs, theirs + beginnings[rank].length);
  }
}

// The endpoint, and a first message through it: before that UCX does not connect, and would not hear of an end.
void UcxTransport::connect(int rank) {
  Peer& peer = peer_of(rank);
  if (peer.lost != UCS_OK) {
    throw PeerError("rank " + std::to_string(rank) + (peer.left ? " has closed its communicator" : " died"));
  }
  if (peer.endpoint != nullptr) return;
  ucp_ep_params_t params{};
  params.field_mask =
      UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(peer.address.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.arg = &peer;
  params.err_handler.cb = [](void* arg, ucp_ep_h, ucs_status_t status) {
    auto* lost = static_cast<Peer*>(arg);
    lost->lost = status;
    lost->owner->any_lost_ = true;
  };
  check_ucx(ucp_ep_create(worker_, &params, &peer.endpoint), "connecting to rank " + std::to_string(rank));
  ucp_transport_entry_t entries[8];
  ucp_ep_attr_t attributes{};
  attributes.field_mask = UCP_EP_ATTR_FIELD_TRANSPORTS;
  attributes.transports = {.entries = entries, .num_entries = std::size(entries), .entry_size = sizeof entries[0]};
  if (ucp_ep_query(peer.endpoint, &attributes) == UCS_OK) {
    for (unsigned i = 0; i < attributes.transports.num_entries; ++i) {
      if (std::string(entries[i].transport_name) != "tcp") over_sockets_ = false;
    }
  }
  tell(rank, kHello, {});
}

// What a peer sent before its farewell is here whole, for it waited for that, and needs no endpoint any more.
bool UcxTransport::is_left_behind(const Transfer& op) {
  if (op.kind != Transfer::Kind::kReceive || !peer_of(op.peer).left) return false;
  ucp_tag_recv_info_t info{};
  return ucp_tag_probe_nb(worker_, tag_of(op.channel, op.peer), ~uint64_t{0}, /*remove=*/0, &info) != nullptr;
}

void UcxTransport::start(Transfer& op) {
  if (!is_left_behind(op)) connect(op.peer);
  ucp_request_param_t param = parameters(&op);
  if (op.kind == Transfer::Kind::kReceive) return start_receive_of(op);
  param.cb.send = [](void* request, ucs_status_t status, void* data) {
    auto* transfer = static_cast<Transfer*>(data);
    ucp_request_free(request);
    static_cast<UcxTransport*>(static_cast<MessageTransport*>(transfer->link->owner))->sent(*transfer, status);
  };
  void* request = ucp_tag_send_nbx(peer_of(op.peer).endpoint, op.data, op.bytes, tag_of(op.channel, rank_), &param);
  if (UCS_PTR_IS_ERR(request)) check_ucx(UCS_PTR_STATUS(request), about(op, medium_));
  op.request = request;
  if (request == nullptr) sent(op, UCS_OK);
}

void UcxTransport::start_receive_of(Transfer& op) {
  ucp_request_param_t param = parameters(&op);
  ucp_tag_recv_info_t info{};
  param.op_attr_mask |= UCP_OP_ATTR_FIELD_RECV_INFO;
  param.recv_info.tag_info = &info;
  param.cb.recv = [](void* request, ucs_status_t status, const ucp_tag_recv_info_t* got, void* data) {
    auto* transfer = static_cast<Transfer*>(data);
    const size_t bytes = got->length;
    ucp_request_free(request);
    static_cast<UcxTransport*>(static_cast<MessageTransport*>(transfer->link->owner))
        ->received(*transfer, status, bytes);
  };
  void* request = ucp_tag_recv_nbx(worker_, op.data, op.bytes, tag_of(op.channel, op.peer), ~uint64_t{0}, &param);
  if (UCS_PTR_IS_ERR(request)) check_ucx(UCS_PTR_STATUS(request), about(op, medium_));
  op.request = request;
  if (request == nullptr) received(op, UCS_OK, info.length);
}

void UcxTransport::sent(Transfer& op, ucs_status_t status) {
  op.request = nullptr;
  if (status == UCS_OK) {
    note_done(op);
    return finish_send(op);
  }
  op.done = true;
  // Of a peer that is lost check_peers() tells more.
  if (!letting_go_ && peer_of(op.peer).lost == UCS_OK && error_.empty()) {
    error_ = about(op, medium_) + " failed: UCX: " + ucs_status_string(status);
  }
}

void UcxTransport::received(Transfer& op, ucs_status_t status, size_t bytes) {
  op.request = nullptr;
  if (letting_go_) {
    op.done = true;
    return;
  }
  try {
    check_ucx(status, about(op, medium_));
    finish_receive(op, bytes);
    note_done(op);
  } catch (const Error& error) {
    if (error_.empty()) error_ = error.what();
  }
}

// Connections are looked at with the first message each way of every peer, and less and less often afterwards.
void UcxTransport::note_done(const Transfer& op) {
  Peer& peer = peer_of(op.peer);
  connected_ |= !std::exchange(peer.met, true) || std::has_single_bit(++num_done_);
}

// UCX watches its sockets with an epoll descriptor, and that one with the worker's.
void UcxTransport::see_to_connections() {
  if (!std::exchange(connected_, false)) return;
  congestion_.see_to(MpiEvents(events_->watched(), true).watched());
}

void UcxTransport::look() {
  for (int news = 0; news < kMostLooks && ucp_worker_progress(worker_) != 0; ++news) {
  }
}

void UcxTransport::progress() {
  look();
  if (any_lost_) drop_lost_peers();
  if (closed_) return;
  if (arms_.exchange(false, std::memory_order_relaxed)) arm();
  see_to_connections();
  if (error_.empty()) return;
  broken_ = true;
  throw TransportError(std::exchange(error_, ""));
}

void UcxTransport::drop_lost_peers() {
  any_lost_ = false;
  for (Peer& peer : peers_) {
    if (peer.lost == UCS_OK || peer.endpoint == nullptr) continue;
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = UCP_EP_CLOSE_FLAG_FORCE;
    void* request = ucp_ep_close_nbx(std::exchange(peer.endpoint, nullptr), &param);
    if (UCS_PTR_IS_PTR(request)) ucp_request_free(request);
  }
}

// From here on the worker's descriptor announces what comes. Where there is news already, it is taken first.
void UcxTransport::arm() {
  ucs_status_t status = UCS_ERR_BUSY;
  for (int look = 0; look < kMostLooks && status == UCS_ERR_BUSY; ++look) {
    status = ucp_worker_arm(worker_);
    if (status == UCS_ERR_BUSY) ucp_worker_progress(worker_);
  }
  busy_.store(status != UCS_OK, std::memory_order_relaxed);
}

void UcxTransport::sleep(microseconds limit, int bell) {
  if (limit.count() <= 0 || busy_.exchange(false, std::memory_order_relaxed)) return;
  events_->wait(std::min(limit, kLongestSleep), bell);
}

void UcxTransport::check_peers() {
  if (closed_) return;
  for (int rank = 0; rank < size_; ++rank) {
    const Peer& peer = peer_of(rank);
    if (peer.lost == UCS_OK || peer.left) continue;
    broken_ = true;
    throw PeerError(
        "rank " + std::to_string(rank) +
        " died: its connection ended without its closing its communicator (UCX: " + ucs_status_string(peer.lost) + ")");
  }
}

// Best effort: who cannot be told is gone.
void UcxTransport::tell(int rank, int topic, std::vector<std::byte> notice) noexcept {
  if (closed_ || rank == rank_) return;
  try {
    std::erase_if(notices_sent_, [](const Sent& old) { return old.done; });
    connect(rank);
    Sent& one = notices_sent_.emplace_back();
    one.notice = std::move(notice);
    ucp_request_param_t param = parameters(&one);
    param.cb.send = [](void* request, ucs_status_t, void* data) {
      auto* sent = static_cast<Sent*>(data);
      sent->done = true;
      if (sent->connecting != nullptr) sent->connecting->fetch_sub(1, std::memory_order_relaxed);
      ucp_request_free(request);
    };
    void* request = ucp_tag_send_nbx(peer_of(rank).endpoint, one.notice.data(), one.notice.size(),
                                     kNoticeBit | tag_of(topic, rank_), &param);
    one.done = !UCS_PTR_IS_PTR(request);
    if (topic != kHello || one.done) return;
    one.connecting = &connecting_;
    connecting_.fetch_add(1, std::memory_order_relaxed);
  } catch (const std::exception&) {
  }
}

void UcxTransport::tell_everybody(int topic, const std::vector<std::byte>& notice) {
  for (int rank = 0; rank < size_; ++rank) tell(rank, topic, notice);
}

void UcxTransport::listen_for_notices() {
  for (bool again = true; again;) {
    ucp_request_param_t param = parameters(this);
    ucp_tag_recv_info_t info{};
    param.op_attr_mask |= UCP_OP_ATTR_FIELD_RECV_INFO;
    param.recv_info.tag_info = &info;
    param.cb.recv = [](void* request, ucs_status_t status, const ucp_tag_recv_info_t* got, void* data) {
      auto* self = static_cast<UcxTransport*>(data);
      if (status == UCS_OK) self->hear(*got);
      ucp_request_free(request);
      self->listening_ = nullptr;
      if (status != UCS_ERR_CANCELED) self->listen_for_notices();
    };
    void* request = ucp_tag_recv_nbx(worker_, inbox_.data(), inbox_.size(), kNoticeBit, kNoticeBit, &param);
    if (UCS_PTR_IS_ERR(request)) return;
    again = request == nullptr;
    listening_ = request;
    if (again) hear(info);
  }
}

void UcxTransport::hear(const ucp_tag_recv_info_t& info) {
  const auto from = static_cast<int>(info.sender_tag & 0xffffffff);
  const auto topic = static_cast<int>((info.sender_tag & ~kNoticeBit) >> 32);
  if (from < 0 || from >= size_) return;
  if (topic == kFarewell) peer_of(from).left = true;
  if (topic >= kHello) return;
  notices_.hear(static_cast<HeardNotices::Topic>(topic), from, inbox_.data(), info.length);
  broken_ |= !notices_.failure().empty();
}

bool UcxTransport::has_left(int rank) {
  Peer& peer = peer_of(rank);
  ucp_tag_recv_info_t info{};  // its farewell may have come since this rank no longer listens
  const ucp_tag_t farewell = kNoticeBit | tag_of(kFarewell, rank);
  peer.left |= ucp_tag_probe_nb(worker_, farewell, ~uint64_t{0}, /*remove=*/0, &info) != nullptr;
  return peer.left || peer.lost != UCS_OK;
}

void UcxTransport::post_failure(const std::string& text) {
  if (closed_ || std::exchange(failure_posted_, true)) return;
  broken_ = true;
  tell_everybody(HeardNotices::kFailure, HeardNotices::as_notice(text.empty() ? "unknown failure" : text));
  // A first message needs this rank's help to connect, and who has failed may never look again.
  progress_until(kTellLimit, [this] { return notices_are_sent(); });
}

std::unique_ptr<Transport> make_ucx_transport(ucp_context_h context, Bootstrap& job, size_t max_message_bytes,
                                              int slots, const std::string& tcp_congestion) {
  return std::make_unique<UcxTransport>(context, job, max_message_bytes, slots, tcp_congestion);
}

}  // namespace dcoll::ucx_plugin
