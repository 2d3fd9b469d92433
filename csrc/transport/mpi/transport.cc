// Messages between nodes: MPI point-to-point, one message per slice, the tag is the channel.
//
// Sends go out of the caller's memory (MPI_Isend), receives are posted ahead into their destination (MPI_Irecv), so the
// library may move the bytes without a copy. FIFO order is MPI's own: messages of one (sender, communicator, tag) do
// not overtake. Notices travel on a second communicator (notices.h).
#include "transport/mpi/transport.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <climits>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/thread_safety.h"
#include "transport/mpi/notices.h"
#include "transport/mpi/requests.h"
#include "transport/mpi_events.h"
#include "transport/os/futex.h"
#include "transport/os/tcp_congestion.h"

namespace dcoll::mpi {

namespace {

using std::chrono::microseconds;

// While nothing but the receives of notices is outstanding, only every 16th progress() asks MPI: a message that never
// comes must not cost a library call per loop.
constexpr uint32_t kIdlePollStride = 16;
// wait(), where nothing announces messages: longer and longer.
constexpr microseconds kShortestNap{20};
constexpr microseconds kLongestNap{100};
// Where messages are announced. Not longer, so that one that came another way for once does not wait for ever.
constexpr microseconds kLongestSleep{2000};
// How long close() helps what is outstanding to finish before it lets go of it.
constexpr std::chrono::milliseconds kCloseLimit{500};

class MpiTransport final : public Transport {
 public:
  MpiTransport(MPI_Comm parent, size_t max_message_bytes, int slots, const std::string& tcp_congestion);
  ~MpiTransport() override;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  const char* name() const override { return "mpi"; }
  size_t max_message_bytes() const override { return max_message_bytes_; }

  bool post_send(int peer, int channel, const void* data, size_t bytes) override;
  std::byte* acquire_send(int peer, int channel, size_t bytes) override;
  void commit_send(int peer, int channel) override;
  uint64_t posted(int peer, int channel) const override;
  uint64_t sent(int peer, int channel) override { return link(peer, channel).sent; }
  bool post_recv(int peer, int channel, void* dst, size_t bytes) override;
  bool post_recv_up_to(int peer, int channel, size_t bytes) override;
  const std::byte* front(int peer, int channel) override;
  size_t front_bytes(int peer, int channel) const override;
  void pop(int peer, int channel) override;
  void progress() override;
  uint32_t prepare_wait() override { return wakes_.load(std::memory_order_acquire); }
  void wait(uint32_t ticket, microseconds limit) override;
  bool wait_beside(Bell& bell, uint32_t ticket, microseconds limit) override;
  bool sleeps_well() const override { return events_.any() && trust_.earned(); }
  void wake() override;
  void doze(uint32_t ticket, std::chrono::microseconds limit) override;
  bool alert(bool) override { return false; }
  // Plain MPI tells nothing about a peer until an operation with it fails, which progress() reports; a silent death is
  // found by the engine's deadline, or by mpirun, which ends the job.
  void check_peers() override {}
  void post_failure(const std::string& text) override;
  bool let_go(std::chrono::milliseconds limit) override;
  std::string poll_failure() override { return notices_->failure(); }
  void post_stall(const std::vector<int>& waits_for) override {
    if (!closed_) notices_->post_stall(waits_for);
  }
  std::vector<StallNote> stall_notes() const override { return notices_->stalls(); }
  void post_note(int peer, const std::string& text) override {
    if (!closed_) notices_->post_note(peer, text);
  }
  std::vector<Note> take_notes() override {
    if (closed_) return {};
    idle_polls_ = kIdlePollStride - 1;  // whoever takes notes does so seldom: MPI is asked in any case
    progress();
    return notices_->take_notes();
  }
  uint32_t prepare_listen() override { return listener_wakes_.load(std::memory_order_acquire); }
  void listen(uint32_t ticket, microseconds limit) override { futex_wait(listener_wakes_, ticket, limit); }
  void wake_listener() override {
    listener_wakes_.fetch_add(1, std::memory_order_release);
    futex_wake_all(listener_wakes_);
  }

  // Ends everything outstanding without waiting for peers longer than kCloseLimit.
  void close() noexcept;

 private:
  size_t index(int peer, int channel) const;
  Link& link(int peer, int channel);
  void check_length(int peer, int channel, size_t bytes) const;
  void sleep(microseconds limit, int bell);
  Room take_room();
  void give_room(Room room) {
    if (room) rooms_.push_back(std::move(room));
  }
  void start_send(Link& to, Operation operation);
  bool start_receive(int peer, int channel, void* dst, size_t bytes, bool exact);
  void finish(const RequestSet::Completed& completed);
  void finish_receive(Operation& operation, const MPI_Status& status);
  bool may_have_connected(const Operation& operation);

  MPI_Comm messages_ = MPI_COMM_NULL;
  int rank_ = 0;
  int size_ = 1;
  size_t max_message_bytes_;
  int slots_;
  bool closed_ = false;
  bool broken_ = false;  // a failure was seen, sent or received: peers may have messages under way to us for ever

  std::vector<std::unique_ptr<Link>> links_;
  std::vector<Room> rooms_;  // free ones
  RequestSet requests_;
  uint32_t idle_polls_ = 0;

  std::unique_ptr<MpiNotices> notices_;

  const MpiEvents events_;
  EventTrust trust_;
  std::atomic<uint32_t> wakes_{0};
  std::atomic<uint32_t> listener_wakes_{0};  // release and acquire: what was done before wake_listener() is seen after
  std::atomic<uint32_t> naps_{0};            // waits since something last completed

  const TcpCongestion congestion_;
  struct Met {
    bool sent = false, received = false;
  };
  std::vector<Met> met_;   // per peer: whether a message was done
  uint64_t num_done_ = 0;  // messages, to and from all peers
};

// Transports not yet closed, for close_mpi_transports(). The lock is taken when one is made or closed, never per
// message.
Mutex open_transports_lock;
std::vector<MpiTransport*> open_transports DCOLL_GUARDED_BY(open_transports_lock);

MpiTransport::MpiTransport(MPI_Comm parent, size_t max_message_bytes, int slots, const std::string& tcp_congestion)
    : max_message_bytes_(max_message_bytes), slots_(slots), congestion_(tcp_congestion) {
  if (max_message_bytes == 0 || max_message_bytes > static_cast<size_t>(INT_MAX) || slots < 1) {
    throw ArgumentError("MPI messages of " + std::to_string(max_message_bytes) + " bytes in " + std::to_string(slots) +
                        " slots are not possible: 1 to " + std::to_string(INT_MAX) +
                        " bytes and at least 1 slot are. Set DCOLL_SLICE_KB and DCOLL_SLOTS accordingly");
  }
  check_mpi(MPI_Comm_rank(parent, &rank_), "MPI_Comm_rank");
  check_mpi(MPI_Comm_size(parent, &size_), "MPI_Comm_size");
  check_mpi(MPI_Comm_dup(parent, &messages_), "MPI_Comm_dup");
  links_.resize(static_cast<size_t>(size_) * kAllChannels);
  met_.resize(static_cast<size_t>(size_));
  notices_ = std::make_unique<MpiNotices>(parent, requests_);
  const MutexLock lock(open_transports_lock);
  open_transports.push_back(this);
}

MpiTransport::~MpiTransport() {
  close();
  const MutexLock lock(open_transports_lock);
  std::erase(open_transports, this);
}

size_t MpiTransport::index(int peer, int channel) const {
  if (peer < 0 || peer >= size_ || channel < 0 || channel >= kAllChannels) {
    throw ArgumentError("peer " + std::to_string(peer) + ", channel " + std::to_string(channel) +
                        " does not exist: ranks are 0.." + std::to_string(size_ - 1) + ", channels 0.." +
                        std::to_string(kAllChannels - 1));
  }
  return static_cast<size_t>(peer) * kAllChannels + static_cast<size_t>(channel);
}

Link& MpiTransport::link(int peer, int channel) {
  std::unique_ptr<Link>& place = links_[index(peer, channel)];
  if (!place) place = std::make_unique<Link>(slots_);
  return *place;
}

void MpiTransport::check_length(int peer, int channel, size_t bytes) const {
  if (closed_) throw TransportError("the MPI transport is closed; MPI was finalized before the communicator was");
  if (bytes >= 1 && bytes <= max_message_bytes_) return;
  throw ArgumentError("a message of " + std::to_string(bytes) + " bytes to or from rank " + std::to_string(peer) +
                      " on channel " + std::to_string(channel) + " is not possible: 1 to " +
                      std::to_string(max_message_bytes_) + " bytes are");
}

Room MpiTransport::take_room() {
  if (rooms_.empty()) {
    return Room(static_cast<std::byte*>(::operator new[](max_message_bytes_, std::align_val_t{64})));
  }
  Room room = std::move(rooms_.back());
  rooms_.pop_back();
  return room;
}

void MpiTransport::start_send(Link& to, Operation operation) {
  operation.link = &to;
  Operation& op = to.sends.push(std::move(operation));
  MPI_Request request = MPI_REQUEST_NULL;
  const int code = MPI_Isend(op.data, static_cast<int>(op.bytes), MPI_BYTE, op.peer, op.channel, messages_, &request);
  if (code != MPI_SUCCESS) {
    to.sends.drop_back();
    broken_ = true;
    check_mpi(code, op);
  }
  ++to.posted;
  requests_.add(request, op);
}

bool MpiTransport::post_send(int peer, int channel, const void* data, size_t bytes) {
  check_length(peer, channel, bytes);
  Link& to = link(peer, channel);
  if (to.sends.size() + (to.staged ? 1 : 0) >= static_cast<size_t>(slots_)) return false;
  Operation op;
  op.peer = peer;
  op.channel = channel;
  op.data = static_cast<std::byte*>(const_cast<void*>(data));
  op.bytes = bytes;
  start_send(to, std::move(op));
  return true;
}

std::byte* MpiTransport::acquire_send(int peer, int channel, size_t bytes) {
  check_length(peer, channel, bytes);
  Link& to = link(peer, channel);
  if (!to.staged) {
    if (to.sends.full()) return nullptr;
    to.staged = take_room();
  }
  to.staged_bytes = bytes;
  return to.staged.get();
}

void MpiTransport::commit_send(int peer, int channel) {
  Link& to = link(peer, channel);
  if (!to.staged) {
    throw ArgumentError("commit_send to rank " + std::to_string(peer) + " on channel " + std::to_string(channel) +
                        " without acquire_send before it");
  }
  Operation op;
  op.peer = peer;
  op.channel = channel;
  op.data = to.staged.get();
  op.bytes = to.staged_bytes;
  op.room = std::move(to.staged);
  start_send(to, std::move(op));
}

uint64_t MpiTransport::posted(int peer, int channel) const {
  const std::unique_ptr<Link>& place = links_[index(peer, channel)];
  return place ? place->posted : 0;
}

bool MpiTransport::post_recv(int peer, int channel, void* dst, size_t bytes) {
  return start_receive(peer, channel, dst, bytes, /*exact=*/true);
}

bool MpiTransport::post_recv_up_to(int peer, int channel, size_t bytes) {
  return start_receive(peer, channel, nullptr, bytes, /*exact=*/false);
}

bool MpiTransport::start_receive(int peer, int channel, void* dst, size_t bytes, bool exact) {
  check_length(peer, channel, bytes);
  Link& from = link(peer, channel);
  if (from.receives.full()) return false;
  Operation fresh;
  fresh.kind = Operation::Kind::kReceive;
  fresh.peer = peer;
  fresh.channel = channel;
  fresh.link = &from;
  fresh.bytes = bytes;
  fresh.exact = exact;
  if (dst == nullptr) fresh.room = take_room();
  fresh.data = dst ? static_cast<std::byte*>(dst) : fresh.room.get();
  Operation& op = from.receives.push(std::move(fresh));
  MPI_Request request = MPI_REQUEST_NULL;
  const int code = MPI_Irecv(op.data, static_cast<int>(bytes), MPI_BYTE, peer, channel, messages_, &request);
  if (code != MPI_SUCCESS) {
    from.receives.drop_back();
    broken_ = true;
    check_mpi(code, op);
  }
  requests_.add(request, op);
  return true;
}

const std::byte* MpiTransport::front(int peer, int channel) {
  Link& from = link(peer, channel);
  if (from.receives.size() == 0 || !from.receives.front().done) return nullptr;
  return from.receives.front().data;
}

size_t MpiTransport::front_bytes(int peer, int channel) const {
  const std::unique_ptr<Link>& place = links_[index(peer, channel)];
  return place && place->receives.size() > 0 ? place->receives.front().bytes : 0;
}

void MpiTransport::pop(int peer, int channel) {
  if (front(peer, channel) == nullptr) {
    throw ArgumentError("pop of a message from rank " + std::to_string(peer) + " on channel " +
                        std::to_string(channel) + " that has not arrived; call front() first");
  }
  give_room(link(peer, channel).receives.pop());
}

void MpiTransport::progress() {
  if (requests_.empty()) return;
  if (requests_.size() <= MpiNotices::kListening && ++idle_polls_ % kIdlePollStride != 0) return;
  // All completions are booked before the first error is thrown, so that the state stays consistent for close().
  std::string first_error;
  bool connected = false;
  for (const RequestSet::Completed& completed : requests_.test()) {
    naps_.store(0, std::memory_order_relaxed);
    if (completed.operation->kind == Operation::Kind::kReceive) trust_.message_found();
    connected |= may_have_connected(*completed.operation);
    try {
      finish(completed);
    } catch (const Error& error) {
      broken_ = true;
      if (first_error.empty()) first_error = error.what();
    }
  }
  if (connected) congestion_.see_to(events_.watched());
  if (!first_error.empty()) throw TransportError(first_error);
}

// MPI connects when it first has something to send, with the first long message perhaps once more (one connection per
// pair of interfaces), and accepts whenever it is asked. So it is looked at with the first message each way of every
// peer, and less and less often afterwards.
bool MpiTransport::may_have_connected(const Operation& op) {
  if (op.link == nullptr) return false;  // a notice
  Met& met = met_[static_cast<size_t>(op.peer)];
  bool& before = op.kind == Operation::Kind::kSend ? met.sent : met.received;
  const bool first = !std::exchange(before, true);
  return std::has_single_bit(++num_done_) || first;
}

void MpiTransport::finish(const RequestSet::Completed& completed) {
  Operation& op = *completed.operation;
  switch (op.kind) {
    case Operation::Kind::kSend:
      check_mpi(completed.code, op);
      op.done = true;
      while (op.link->sends.size() > 0 && op.link->sends.front().done) {
        give_room(op.link->sends.pop());
        ++op.link->sent;
      }
      return;
    case Operation::Kind::kReceive:
      check_mpi(completed.code, op);
      finish_receive(op, completed.status);
      return;
    case Operation::Kind::kNoticeSend:
    case Operation::Kind::kNoticeReceive:
      notices_->finish(completed);
      if (!notices_->failure().empty()) broken_ = true;
      return;
  }
}

void MpiTransport::finish_receive(Operation& op, const MPI_Status& status) {
  int bytes = 0;
  check_mpi(MPI_Get_count(&status, MPI_BYTE, &bytes), op);
  if (!op.exact) op.bytes = static_cast<size_t>(bytes);  // no longer than posted: MPI reports truncation as an error
  if (static_cast<size_t>(bytes) != op.bytes) {
    throw TransportError("rank " + std::to_string(op.peer) + " sent " + std::to_string(bytes) + " bytes on channel " +
                         std::to_string(op.channel) + " where " + std::to_string(op.bytes) +
                         " were expected. Run the same dcoll version with the same DCOLL_* settings on every rank");
  }
  op.done = true;
}

// MPI offers nothing to sleep on. This sleeps on the sockets it listens to where messages come that way (mpi_events.h),
// and otherwise gives time away in small portions; the caller polls again after each. It runs without the owner's lock
// and therefore calls no MPI.
void MpiTransport::wait(uint32_t ticket, microseconds limit) {
  if (wakes_.load(std::memory_order_acquire) == ticket) sleep(limit, /*bell=*/-1);
}

bool MpiTransport::wait_beside(Bell& bell, uint32_t ticket, microseconds limit) {
  if (!bell.begin_wait(ticket)) return true;
  sleep(limit, bell.descriptor());
  bell.end_wait();
  return true;
}

void MpiTransport::sleep(microseconds limit, int bell) {
  if (limit.count() <= 0) return;
  microseconds most = kLongestSleep;
  if (!trust_.earned() || events_.deaf()) {
    const uint32_t naps = naps_.fetch_add(1, std::memory_order_relaxed);
    most = std::min(kLongestNap, kShortestNap + microseconds(naps));
  }
  trust_.waited(events_.wait(std::min(limit, most), bell));
}

void MpiTransport::wake() {
  wakes_.fetch_add(1, std::memory_order_release);
  events_.wake();
  futex_wake_all(wakes_);
}

void MpiTransport::doze(uint32_t ticket, microseconds limit) { futex_wait(wakes_, ticket, limit); }

void MpiTransport::post_failure(const std::string& text) {
  if (closed_) return;
  broken_ = true;
  notices_->post_failure(text);
}

bool MpiTransport::let_go(std::chrono::milliseconds limit) {
  broken_ = true;
  return closed_ || requests_.let_go(limit, [this](const auto& completed) { notices_->finish(completed); });
}

void MpiTransport::close() noexcept {
  if (closed_) return;
  closed_ = true;
  int finalized = 0;
  if (MPI_Finalized(&finalized) != MPI_SUCCESS || finalized != 0) return;
  // After a failure the communicators stay: freed, their identity could be given to a new one, which a late message of
  // the old one would then reach.
  const bool clean = requests_.abandon(kCloseLimit) && !broken_;
  if (clean) MPI_Comm_free(&messages_);
  notices_->close(clean);
}

}  // namespace

std::unique_ptr<Transport> make_mpi_transport(MPI_Comm parent, size_t max_message_bytes, int slots,
                                              const std::string& tcp_congestion) {
  return std::make_unique<MpiTransport>(parent, max_message_bytes, slots, tcp_congestion);
}

void close_mpi_transports() {
  const MutexLock lock(open_transports_lock);
  for (MpiTransport* transport : open_transports) transport->close();
}

}  // namespace dcoll::mpi
