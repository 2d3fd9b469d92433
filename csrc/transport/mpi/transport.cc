// Messages between nodes: MPI point-to-point, one message per slice, the tag is the channel.
//
// Sends go out of the caller's memory (MPI_Isend), receives are posted ahead into their destination (MPI_Irecv), so the
// library may move the bytes without a copy. FIFO order is MPI's own: messages of one (sender, communicator, tag) do
// not overtake. Notices travel on a second communicator (notices.h).
#include "transport/mpi/transport.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/thread_safety.h"
#include "transport/mpi/notices.h"
#include "transport/mpi/requests.h"
#include "transport/mpi_events.h"
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

class MpiTransport final : public MessageTransport {
 public:
  MpiTransport(MPI_Comm parent, int rank, int size, size_t max_message_bytes, int slots,
               const std::string& tcp_congestion);
  ~MpiTransport() override;

  const char* name() const override { return "mpi"; }
  void progress() override;
  bool sleeps_well() const override { return events_.any() && trust_.earned(); }
  // Plain MPI tells nothing about a peer until an operation with it fails, which progress() reports.
  void check_peers() override { ended_.check(); }
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

  // Ends everything outstanding without waiting for peers longer than kCloseLimit.
  void close() noexcept;

 private:
  void start(Transfer& operation) override;
  void sleep(microseconds limit, int bell) override;
  void ring() override { events_.wake(); }
  void finish(const RequestSet::Completed& completed);
  bool may_have_connected(const Transfer& operation);

  MPI_Comm messages_ = MPI_COMM_NULL;
  ProcessFailure ended_;
  RequestSet requests_;
  uint32_t idle_polls_ = 0;

  std::unique_ptr<MpiNotices> notices_;

  const MpiEvents events_;
  EventTrust trust_;
  std::atomic<uint32_t> naps_{0};  // waits since something last completed

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

MpiTransport::MpiTransport(MPI_Comm parent, int rank, int size, size_t max_message_bytes, int slots,
                           const std::string& tcp_congestion)
    : MessageTransport("MPI", rank, size, max_message_bytes, slots), congestion_(tcp_congestion) {
  check_mpi(MPI_Comm_dup(parent, &messages_), "MPI_Comm_dup");
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

void MpiTransport::start(Transfer& op) {
  MPI_Request request = MPI_REQUEST_NULL;
  const auto bytes = static_cast<int>(op.bytes);
  const int code = op.kind == Transfer::Kind::kSend
                       ? MPI_Isend(op.data, bytes, MPI_BYTE, op.peer, op.channel, messages_, &request)
                       : MPI_Irecv(op.data, bytes, MPI_BYTE, op.peer, op.channel, messages_, &request);
  if (code != MPI_SUCCESS) {
    broken_ = true;
    if (ended_.noted(code, op)) return;  // never done
    check_mpi(code, op);
  }
  requests_.add(request, op);
}

void MpiTransport::progress() {
  if (requests_.empty()) return;
  if (requests_.size() <= MpiNotices::kListening && ++idle_polls_ % kIdlePollStride != 0) return;
  // All completions are booked before the first error is thrown, so that the state stays consistent for close().
  std::string first_error;
  bool connected = false;
  for (const RequestSet::Completed& completed : requests_.test()) {
    naps_.store(0, std::memory_order_relaxed);
    if (completed.operation->kind == Transfer::Kind::kReceive) trust_.message_found();
    connected |= may_have_connected(*completed.operation);
    broken_ |= completed.code != MPI_SUCCESS;
    try {
      if (completed.code == MPI_SUCCESS || !ended_.noted(completed.code, *completed.operation)) finish(completed);
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
bool MpiTransport::may_have_connected(const Transfer& op) {
  if (op.link == nullptr) return false;  // a notice
  Met& met = met_[static_cast<size_t>(op.peer)];
  bool& before = op.kind == Transfer::Kind::kSend ? met.sent : met.received;
  const bool first = !std::exchange(before, true);
  return std::has_single_bit(++num_done_) || first;
}

void MpiTransport::finish(const RequestSet::Completed& completed) {
  Transfer& op = *completed.operation;
  int bytes = 0;
  switch (op.kind) {
    case Transfer::Kind::kSend:
      check_mpi(completed.code, op);
      return finish_send(op);
    case Transfer::Kind::kReceive:
      check_mpi(completed.code, op);
      check_mpi(MPI_Get_count(&completed.status, MPI_BYTE, &bytes), op);
      return finish_receive(op, static_cast<size_t>(bytes));
    case Transfer::Kind::kNoticeSend:
    case Transfer::Kind::kNoticeReceive:
      notices_->finish(completed);
      if (!notices_->failure().empty()) broken_ = true;
      return;
  }
}

// MPI offers nothing to sleep on. This sleeps on the sockets it listens to where messages come that way (mpi_events.h),
// and otherwise gives time away in small portions; the caller polls again after each. It runs without the owner's lock
// and therefore calls no MPI.
void MpiTransport::sleep(microseconds limit, int bell) {
  if (limit.count() <= 0) return;
  microseconds most = kLongestSleep;
  if (!trust_.earned() || events_.deaf()) {
    const uint32_t naps = naps_.fetch_add(1, std::memory_order_relaxed);
    most = std::min(kLongestNap, kShortestNap + microseconds(naps));
  }
  trust_.waited(events_.wait(std::min(limit, most), bell));
}

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
  int rank = 0, size = 1;
  check_mpi(MPI_Comm_rank(parent, &rank), "MPI_Comm_rank");
  check_mpi(MPI_Comm_size(parent, &size), "MPI_Comm_size");
  return std::make_unique<MpiTransport>(parent, rank, size, max_message_bytes, slots, tcp_congestion);
}

void close_mpi_transports() {
  const MutexLock lock(open_transports_lock);
  for (MpiTransport* transport : open_transports) transport->close();
}

}  // namespace dcoll::mpi
