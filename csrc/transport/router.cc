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
    if (remote_) {
      for (int peer = 0; peer < size; ++peer) route(peer) = {remote_.get(), peer};
    }
    if (local_) {
      for (size_t i = 0; i < local_ranks.size(); ++i) route(local_ranks[i]) = {local_.get(), static_cast<int>(i)};
    }
    remote_used_ = std::any_of(routes_.begin(), routes_.end(),
                               [&](const Route& r) { return r.medium != nullptr && r.medium == remote_.get(); });
    sleeps_on_ = local_ ? local_.get() : remote_.get();
  }

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(routes_.size()); }
  const char* name() const override { return "router"; }
  size_t max_message_bytes() const override {
    size_t least = SIZE_MAX;
    for_each([&](const Transport& medium) { least = std::min(least, medium.max_message_bytes()); });
    return least;
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
    for_each([](Transport& medium) { medium.progress(); });
  }

  bool connecting() const override { return remote_ && remote_->connecting(); }
  bool wind_up() override { return !remote_ || remote_->wind_up(); }

  // The ticket is that of one medium. The other's, if any, is drawn late, so a wake-up may be missed: the sleep is
  // short.
  uint32_t prepare_wait() override {
    if (remote_used_) remote_->prepare_wait();
    return sleeps_on_->prepare_wait();
  }
  void wait(uint32_t ticket, microseconds limit) override {
    if (sleeps_on_ == remote_.get() || !remote_used_) return sleeps_on_->wait(ticket, limit);
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
    for_each([](Transport& medium) { medium.wake(); });
  }
  void doze(uint32_t ticket, microseconds limit) override { sleeps_on_->doze(ticket, limit); }
  bool alert(bool on) override { return sleeps_on_->alert(on) && !remote_used_; }
  bool take_nudge() override { return sleeps_on_->take_nudge(); }
  const void* doorbell() const override { return sleeps_on_->doorbell(); }
  bool wakes_by_doorbell() const override { return sleeps_on_->wakes_by_doorbell() && !remote_used_; }
  void nudge() override { sleeps_on_->nudge(); }

  void check_peers() override {
    for_each([](Transport& medium) { medium.check_peers(); });
  }
  void post_failure(const std::string& text) override {
    for_each([&](Transport& medium) { medium.post_failure(text); });
  }
  bool let_go(std::chrono::milliseconds limit) override {
    bool gone = true;
    for_each([&](Transport& medium) { gone &= medium.let_go(limit); });
    return gone;
  }
  // A notice may come through both media; the first that was seen stays the one that is told. One from another node is
  // passed on inside this one, where a peer may see this rank's end before its own notice arrives.
  std::string poll_failure() override {
    if (failure_.empty() && local_) failure_ = local_->poll_failure();
    if (failure_.empty() && remote_) {
      failure_ = remote_->poll_failure();
      if (!failure_.empty() && local_) local_->post_failure(failure_);
    }
    return failure_;
  }
  void post_stall(const std::vector<int>& waits_for) override {
    if (remote_) remote_->post_stall(waits_for);
  }
  std::vector<StallNote> stall_notes() const override {
    return remote_ ? remote_->stall_notes() : std::vector<StallNote>{};
  }
  void post_note(int peer, const std::string& text) override {
    const Route& to = checked_route(peer);
    to.medium->post_note(to.peer, text);
  }
  std::vector<Note> take_notes() override {
    std::vector<Note> notes;
    if (local_) notes = local_->take_notes();
    for (Note& note : notes) note.from = local_ranks_[static_cast<size_t>(note.from)];
    if (!remote_) return notes;
    for (Note& note : remote_->take_notes()) notes.push_back(std::move(note));
    return notes;
  }
  bool announces_notes() const override { return sleeps_on_->announces_notes() && !remote_used_; }
  uint32_t prepare_listen() override { return sleeps_on_->prepare_listen(); }
  void listen(uint32_t ticket, microseconds limit) override { sleeps_on_->listen(ticket, limit); }
  void wake_listener() override { sleeps_on_->wake_listener(); }

 private:
  struct Route {
    Transport* medium = nullptr;
    int peer = 0;  // as that medium numbers it
  };

  template <class F>
  void for_each(F f) const {
    if (local_) f(*local_);
    if (remote_) f(*remote_);
  }
  Route& route(int peer) { return routes_[static_cast<size_t>(peer)]; }
  const Route& checked_route(int peer) const {
    if (peer < 0 || peer >= size() || routes_[static_cast<size_t>(peer)].medium == nullptr) {
      throw ArgumentError("no way to rank " + std::to_string(peer) + " of " + std::to_string(size()));
    }
    return routes_[static_cast<size_t>(peer)];
  }

  const int rank_;
  const std::unique_ptr<Transport> local_;
  const std::vector<int> local_ranks_;
  const std::unique_ptr<Transport> remote_;
  std::vector<Route> routes_;
  bool remote_used_ = false;
  Transport* sleeps_on_ = nullptr;
  std::string failure_;
  // Hints, relaxed: wait() runs without the owner's lock.
  std::atomic<int64_t> sleep_us_{kShortestSleep.count()};
  std::atomic<bool> missed_remote_{false};
};

void check_local(int rank, int size, const Transport* local, const std::vector<int>& local_ranks) {
  if (local == nullptr) {
    if (!local_ranks.empty()) throw ArgumentError("local ranks given, but no local transport");
    return;
  }
  if (local_ranks.size() != static_cast<size_t>(local->size())) {
    throw ArgumentError(std::to_string(local_ranks.size()) + " local ranks given for a local transport of " +
                        std::to_string(local->size()));
  }
  std::vector<bool> seen(static_cast<size_t>(size));
  for (const int peer : local_ranks) {
    if (peer < 0 || peer >= size || seen[static_cast<size_t>(peer)]) {
      throw ArgumentError("local ranks must be different ranks below " + std::to_string(size) + "; got " +
                          std::to_string(peer));
    }
    seen[static_cast<size_t>(peer)] = true;
  }
  if (local_ranks[static_cast<size_t>(local->rank())] != rank) {
    throw ArgumentError("the local transport belongs to rank " +
                        std::to_string(local_ranks[static_cast<size_t>(local->rank())]) + ", not to rank " +
                        std::to_string(rank));
  }
}

}  // namespace

std::unique_ptr<Transport> make_router(int rank, int size, std::unique_ptr<Transport> local,
                                       std::vector<int> local_ranks, std::unique_ptr<Transport> remote) {
  if (size < 1 || rank < 0 || rank >= size) {
    throw ArgumentError("rank " + std::to_string(rank) + " does not exist among " + std::to_string(size));
  }
  check_local(rank, size, local.get(), local_ranks);
  if (remote && (remote->size() != size || remote->rank() != rank)) {
    throw ArgumentError("the remote transport is rank " + std::to_string(remote->rank()) + " of " +
                        std::to_string(remote->size()) + ", wanted " + std::to_string(rank) + " of " +
                        std::to_string(size));
  }
  if (!remote && (!local || local->size() != size)) {
    throw ArgumentError("without a remote transport every one of the " + std::to_string(size) + " ranks must be local");
  }
  return std::make_unique<Router>(rank, size, std::move(local), local_ranks, std::move(remote));
}

}  // namespace dcoll
