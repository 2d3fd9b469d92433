// What a communicator does for messages between two ranks (p2p/point_to_point.h).
#include <utility>

#include "base/error.h"
#include "engine/communicator/communicator.h"

namespace dcoll {
namespace {

// Where their numbers begin in the timeline: no rank has the same.
constexpr uint64_t kFirstPoint = uint64_t{1} << 41;

void check_peer(Kind kind, int peer, int size) {
  const int least = kind == Kind::kReceive ? kAnySource : 0;
  if (peer >= least && peer < size) return;
  throw ArgumentError(std::string(kind_name(kind)) + ": rank " + std::to_string(peer) +
                      " does not exist; allowed are " + std::to_string(least) + " to " + std::to_string(size - 1) +
                      (least < 0 ? " (-1: any rank)." : "."));
}

}  // namespace

void Communicator::make_points() {
  if (uses_points_) return;
  const MutexLock lock(drive_mutex_);
  if (points_ == nullptr) {
    PointRanks ranks{.transport = members_.transport.get()};
    ranks.job_ranks = job_ranks();
    const std::vector<int>& memory = members_.memory_of_rank;
    const bool all_share = members_.window != nullptr && members_.window->local_size() == members_.size;
    int local = 0;
    for (int rank = 0; rank < members_.size; ++rank) {
      const bool shares = all_share || (!memory.empty() && memory[rank] == memory[members_.rank]);
      ranks.in_window.push_back(shares ? local++ : -1);
    }
    if (members_.window != nullptr && members_.window->local_size() == local) ranks.window = members_.window;
    points_ = std::make_unique<PointToPoint>(
        std::move(ranks), [this](auto operation, auto error)
                              DCOLL_REQUIRES(drive_mutex_) { finish(std::move(operation), std::move(error)); });
  }
  uses_points_ = true;
}

std::shared_ptr<Operation> Communicator::isend(const void* data, size_t bytes, int peer, uint64_t tag) {
  check_peer(Kind::kSend, peer, members_.size);
  return submit_point({.kind = Kind::kSend, .in = data, .count = bytes, .root = peer, .tag = tag}, /*waits=*/false);
}

std::shared_ptr<Operation> Communicator::irecv(void* data, size_t bytes, int peer, uint64_t tag) {
  check_peer(Kind::kReceive, peer, members_.size);
  return submit_point({.kind = Kind::kReceive, .out = data, .count = bytes, .root = peer, .tag = tag}, false);
}

std::shared_ptr<Operation> Communicator::point_operation(Request request) const {
  request.dtype = DType::kUInt8;
  request.root_in_job = request.root < 0 ? -1 : members_.job_rank(request.root);
  auto operation = std::make_shared<Operation>(std::move(request));
  operation->last_moved = Clock::now();
  operation->phases.on = timeline_->on();
  operation->phases.enter(Phase::kQueue);
  return operation;
}

// waits: the caller is about to wait, and drives then.
std::shared_ptr<Operation> Communicator::submit_point(Request request, bool waits) {
  check_process();
  make_points();
  free_last_name();
  if (drive_mutex_.try_lock()) {
    const MutexLock lock(drive_mutex_, std::adopt_lock);
    throw_complaint(request.root);
  }
  auto operation = point_operation(std::move(request));
  {
    const MutexLock lock(inbox_mutex_);
    check_open();
    operation->phases.number = kFirstPoint + ++points_started_;
    inbox_.push_back(operation);
    pending_.store(true);
  }
  if (waits) return operation;
  if (operation->request.kind == Kind::kReceive && operation->request.count > Call::kSmallBytes) {
    hand_over(Wake::kNow);  // to copy it takes longer than to wake somebody who does
  } else {
    begin_here();
  }
  return operation;
}

// Throws what became of an earlier message.
void Communicator::throw_complaint(int peer) {
  if (failed_.load()) return;
  const std::string text = entered([&]() DCOLL_REQUIRES(drive_mutex_) { return points_->take_complaint(peer); });
  if (!text.empty()) throw MismatchError(text);
}

// Whether a message may go or come at once, behind those that were submitted before.
bool Communicator::points_are_free() {
  if (alert_.load(std::memory_order_relaxed)) drivers_turn_.store(false);
  entered([this]() DCOLL_REQUIRES(drive_mutex_) { take_inbox(); });
  return !failed_.load() && !closing_.load() && !heard_of_failure();
}

std::shared_ptr<Operation> Communicator::send_or_submit(const void* data, size_t bytes, int peer, uint64_t tag) {
  check_process();
  check_peer(Kind::kSend, peer, members_.size);
  make_points();
  free_last_name();
  {
    const MutexLock lock(drive_mutex_);
    if (points_are_free()) {
      throw_complaint(peer);
      if (entered([&]() DCOLL_REQUIRES(drive_mutex_) { return points_->send_now(peer, tag, data, bytes); }))
        return nullptr;
    }
  }
  return submit_point({.kind = Kind::kSend, .in = data, .count = bytes, .root = peer, .tag = tag}, /*waits=*/true);
}

std::shared_ptr<Operation> Communicator::recv_or_submit(void* data, size_t bytes, int peer, uint64_t tag, int& source) {
  check_process();
  check_peer(Kind::kReceive, peer, members_.size);
  make_points();
  free_last_name();
  Request request{.kind = Kind::kReceive, .out = data, .count = bytes, .root = peer, .tag = tag};
  // Over MPI a look costs so much that the lock is not held for many of them.
  const bool looks = bytes <= Call::kSmallBytes && spin_s_ > 0 && (as_made().board != nullptr || members_.size == 1);
  std::shared_ptr<Operation> rest;
  if (looks && recv_briefly(request, source, rest)) return rest;
  return submit_point(std::move(request), /*waits=*/true);
}

// False: nothing was begun. `rest`: what is left of it, null if it is done.
bool Communicator::recv_briefly(Request& request, int& source, std::shared_ptr<Operation>& rest) {
  PointToPoint::Now now;
  {
    const MutexLock lock(drive_mutex_);
    if (!points_are_free()) return false;
    throw_complaint(request.root);
    entered([&]() DCOLL_REQUIRES(drive_mutex_) {
      points_->receive_now(request.root, request.tag, request.out, request.count, now);
      look_briefly([&](bool& moved) DCOLL_REQUIRES(drive_mutex_) {
        if (!now.done) points_->advance(moved);
        return now.done;
      });
    });
    if (!now.done) {
      rest = point_operation(std::move(request));
      points_->go_on(now, rest);
    }
    points_busy_.store(points_->busy());
  }
  if (now.error) std::rethrow_exception(now.error);
  source = now.source;
  return true;
}

void Communicator::advance_points(bool& moved) {
  if (failed_.load(std::memory_order_acquire)) return;
  try {
    points_->advance(moved);
  } catch (...) {
    fail_with(std::current_exception(), /*tell_peers=*/true);
  }
  points_busy_.store(points_->busy());
}

std::vector<int> Communicator::sources_of(const Request& request) const {
  if (request.root != kAnySource) return {request.root};
  std::vector<int> others;
  for (int rank = 0; rank < members_.size; ++rank) {
    if (rank != members_.rank) others.push_back(rank);
  }
  return others;
}

}  // namespace dcoll
