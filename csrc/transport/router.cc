#include "transport/router.h"

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>

#include "base/error.h"

namespace dcoll {
namespace {

using std::chrono::microseconds;

// A rank with peers of both kinds sleeps on the bell (bell.h), which the peers of its node ring, and what the other
// medium has to sleep on, at once. Where it has nothing, or there is no bell, nothing can be slept on that both media
// wake: then the rank sleeps on the one it last looked at in vain, for a short while, and then looks at both. The
// interval doubles while nothing arrives: short in the middle of a collective, cheap in long idle times.
constexpr microseconds kShortestSleep{50};
constexpr microseconds kLongestSleep{200};

class Router final : public Transport {
 public:
  Router(int rank, int size, std::unique_ptr<Transport> local, const std::vector<int>& local_ranks,
         std::unique_ptr<Transport> remote)
      : rank_(rank),
        local_(std::move(local)),
        local_ranks_(local_ranks),
        remote_(std::move(remote)),
        routes_(static_cast<size_t>(size)) {
    for (int peer = 0; peer < size; ++peer) route(peer) = {remote_.get(), peer};
    for (size_t i = 0; i < local_ranks.size(); ++i) route(local_ranks[i]) = {local_.get(), static_cast<int>(i)};
  }

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(routes_.size()); }
  const char* name() const override { return "router"; }
  size_t max_message_bytes() const override {
    return std::min(local_->max_message_bytes(), remote_->max_message_bytes());
  }

  bool post_send(int peer, int channel, const void* data, size_t bytes) override {
    const Route& to = checked_route(peer);
    return to.medium->post_send(to.peer, channel, data, bytes);
  }
  std::byte* acquire_send(int peer, int channel, size_t bytes) override {
    const Route& to = checked_route(peer);
    return to.medium->acquire_send(to.peer, channel, bytes);
  }
  void commit_send(int peer, int channel) override {
    const Route& to = checked_route(peer);
    to.medium->commit_send(to.peer, channel);
  }
  uint64_t posted(int peer, int channel) const override {
    const Route& to = checked_route(peer);
    return to.medium->posted(to.peer, channel);
  }
  uint64_t sent(int peer, int channel) override {
    const Route& to = checked_route(peer);
    return to.medium->sent(to.peer, channel);
  }
  bool post_recv(int peer, int channel, void* dst, size_t bytes) override {
    const Route& from = checked_route(peer);
    return from.medium->post_recv(from.peer, channel, dst, bytes);
  }
  bool post_recv_up_to(int peer, int channel, size_t bytes) override {
    const Route& from = checked_route(peer);
    return from.medium->post_recv_up_to(from.peer, channel, bytes);
  }
  size_t front_bytes(int peer, int channel) const override {
    const Route& from = checked_route(peer);
    return from.medium->front_bytes(from.peer, channel);
  }
  const std::byte* front(int peer, int channel) override {
    const Route& from = checked_route(peer);
    const std::byte* data = from.medium->front(from.peer, channel);
    if (data != nullptr) sleep_us_.store(kShortestSleep.count(), std::memory_order_relaxed);
    if (data == nullptr) missed_remote_.store(from.medium == remote_.get(), std::memory_order_relaxed);
    return data;
  }
  void pop(int peer, int channel) override {
    const Route& from = checked_route(peer);
    from.medium->pop(from.peer, channel);
  }

  void progress() override {
    local_->progress();
    remote_->progress();
  }

  bool connecting() const override { return remote_->connecting(); }
  bool wind_up() override { return remote_->wind_up(); }

  // The ticket is that of the node's memory. The other medium's is drawn late, so a wake-up may be missed: the sleep is
  // short.
  uint32_t prepare_wait() override {
    remote_->prepare_wait();
    return local_->prepare_wait();
  }
  void wait(uint32_t ticket, microseconds limit) override {
    if (Bell* bell = local_->bell(); bell != nullptr && remote_->wait_beside(*bell, ticket, limit)) return;
    const auto sleep = sleep_us_.load(std::memory_order_relaxed);
    sleep_us_.store(std::min<int64_t>(2 * sleep, kLongestSleep.count()), std::memory_order_relaxed);
    limit = std::min(limit, microseconds(sleep));
    if (missed_remote_.load(std::memory_order_relaxed)) {
      remote_->wait(remote_->prepare_wait(), limit);
    } else {
      local_->wait(ticket, limit);
    }
  }
  void wake() override {
    local_->wake();
    remote_->wake();
  }
  void doze(uint32_t ticket, microseconds limit) override { local_->doze(ticket, limit); }
  bool alert(bool on) override {
    local_->alert(on);
    return false;  // those of other nodes cannot nudge
  }
  bool take_nudge() override { return local_->take_nudge(); }
  const void* doorbell() const override { return local_->doorbell(); }
  void nudge() override { local_->nudge(); }

  void check_peers() override {
    local_->check_peers();
    remote_->check_peers();
  }
  void post_failure(const std::string& text) override {
    local_->post_failure(text);
    remote_->post_failure(text);
  }
  bool let_go(std::chrono::milliseconds limit) override {
    const bool gone = local_->let_go(limit);
    return remote_->let_go(limit) && gone;
  }
  // A notice may come through both media; the first that was seen stays the one that is told. One from another node is
  // passed on inside this one, where a peer may see this rank's end before its own notice arrives.
  std::string poll_failure() override {
    if (failure_.empty()) failure_ = local_->poll_failure();
    if (failure_.empty()) {
      failure_ = remote_->poll_failure();
      if (!failure_.empty()) local_->post_failure(failure_);
    }
    return failure_;
  }
  void post_stall(const std::vector<int>& waits_for) override { remote_->post_stall(waits_for); }
  std::vector<StallNote> stall_notes() const override { return remote_->stall_notes(); }
  void post_note(int peer, const std::string& text) override {
    const Route& to = checked_route(peer);
    to.medium->post_note(to.peer, text);
  }
  std::vector<Note> take_notes() override {
    std::vector<Note> notes = local_->take_notes();
    for (Note& note : notes) note.from = local_ranks_[static_cast<size_t>(note.from)];
    for (Note& note : remote_->take_notes()) notes.push_back(std::move(note));
    return notes;
  }
  uint32_t prepare_listen() override { return local_->prepare_listen(); }
  void listen(uint32_t ticket, microseconds limit) override { local_->listen(ticket, limit); }
  void wake_listener() override { local_->wake_listener(); }

 private:
  struct Route {
    Transport* medium = nullptr;
    int peer = 0;  // as that medium numbers it
  };

  Route& route(int peer) { return routes_[static_cast<size_t>(peer)]; }
  const Route& checked_route(int peer) const {
    if (peer < 0 || peer >= size()) {
      throw ArgumentError("no way to rank " + std::to_string(peer) + " of " + std::to_string(size()));
    }
    return routes_[static_cast<size_t>(peer)];
  }

  const int rank_;
  const std::unique_ptr<Transport> local_;
  const std::vector<int> local_ranks_;
  const std::unique_ptr<Transport> remote_;
  std::vector<Route> routes_;
  std::string failure_;
  // Hints, relaxed: wait() runs without the owner's lock.
  std::atomic<int64_t> sleep_us_{kShortestSleep.count()};
  std::atomic<bool> missed_remote_{false};
};

void check_local(int rank, int size, const Transport& local, const std::vector<int>& local_ranks) {
  if (local_ranks.size() != static_cast<size_t>(local.size())) {
    throw ArgumentError(std::to_string(local_ranks.size()) + " local ranks given for a local transport of " +
                        std::to_string(local.size()));
  }
  std::vector<bool> seen(static_cast<size_t>(size));
  for (const int peer : local_ranks) {
    if (peer < 0 || peer >= size || seen[static_cast<size_t>(peer)]) {
      throw ArgumentError("local ranks must be different ranks below " + std::to_string(size) + "; got " +
                          std::to_string(peer));
    }
    seen[static_cast<size_t>(peer)] = true;
  }
  if (local_ranks[static_cast<size_t>(local.rank())] != rank) {
    throw ArgumentError("the local transport belongs to rank " +
                        std::to_string(local_ranks[static_cast<size_t>(local.rank())]) + ", not to rank " +
                        std::to_string(rank));
  }
}

}  // namespace

std::unique_ptr<Transport> make_router(int rank, int size, std::unique_ptr<Transport> local,
                                       std::vector<int> local_ranks, std::unique_ptr<Transport> remote) {
  if (local == nullptr || local->size() == 1) return remote;
  if (size < 1 || rank < 0 || rank >= size) {
    throw ArgumentError("rank " + std::to_string(rank) + " does not exist among " + std::to_string(size));
  }
  check_local(rank, size, *local, local_ranks);
  if (remote->size() != size || remote->rank() != rank) {
    throw ArgumentError("the remote transport is rank " + std::to_string(remote->rank()) + " of " +
                        std::to_string(remote->size()) + ", wanted " + std::to_string(rank) + " of " +
                        std::to_string(size));
  }
  return std::make_unique<Router>(rank, size, std::move(local), local_ranks, std::move(remote));
}

}  // namespace dcoll
