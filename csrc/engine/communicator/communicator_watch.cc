// The watchdog of a communicator: deadlines, and peers that have ended.
#include <algorithm>

#include "base/error.h"
#include "base/ranks_text.h"
#include "engine/communicator/communicator.h"
#include "engine/core/point.h"
#include "engine/watch/stall.h"

namespace dcoll {
namespace {

constexpr double kPeerCheckSeconds = 0.1;
// How much longer a rank waits for one that may have to name another (Pollable::waits_indirectly).
constexpr double kMostGraceSeconds = 5;

// A rank that waits in vain says so this long before it gives up, in seconds.
double grace(double timeout_s) { return std::min(0.1 * timeout_s, 2.0); }

}  // namespace

// The watchdog, called when a look brought nothing and the driver is about to sleep.
void Communicator::watch(Clock::time_point now) {
  const bool idle = queue_.empty() && names_idle();
  if ((idle || members_.size == 1) && !points_busy_.load()) return;
  if (failed_.load()) return;
  try {
    if (seconds_between(last_peer_check_, now) >= kPeerCheckSeconds) {
      last_peer_check_ = now;
      check_peers();
    }
    if (!queue_.empty()) watch_operation(*queue_.front(), now);
    if (!named_queue_.empty()) watch_operation(*named_queue_.front(), now);
    if (names_ != nullptr) watch_names(now);
    if (points_ != nullptr) watch_points(now);
  } catch (...) {
    // A peer that left may have done its part first: one more look decides.
    const std::exception_ptr error = std::current_exception();
    bool moved = false;
    step(moved);
    if (!moved) fail_with(error, /*tell_peers=*/true);
  }
}

void Communicator::check_peers() {
  members_.transport->check_peers();
  if (members_.processes == nullptr) return;
  members_.processes->check(job_ranks());
}

void Communicator::watch_operation(Operation& running, Clock::time_point now) {
  if (!running.started) return;
  // Ranks that trickle in are movement, though a barrier of many is looked at as a whole (arrival_tree.h).
  std::vector<int> missing = running.task.waiting_for();
  if (missing.size() < running.missing) running.last_moved = now;
  running.missing = missing.size();
  const double idle = seconds_between(running.last_moved, now);
  watch_stall(running, idle, missing);
  tell_of_waiting(running, now, missing);
  if (idle > settings_.timeout_s + patience(running)) throw TimeoutError(timeout_text(running, idle, missing));
}

// Shortly before it gives up.
void Communicator::tell_of_waiting(const Operation& operation, Clock::time_point now, const std::vector<int>& missing) {
  const double idle = seconds_between(operation.last_moved, now);
  if (idle <= settings_.timeout_s - grace(settings_.timeout_s) || stall_told_ >= operation.last_moved) return;
  stall_told_ = now;
  members_.transport->post_stall(missing);
}

// Each message has a deadline of its own. That it waits is told here: the other rank has nothing in common with it that
// it could be asked about.
void Communicator::watch_points(Clock::time_point now) {
  points_->for_each([&](Operation& operation) DCOLL_REQUIRES(drive_mutex_) {
    const double idle = seconds_between(operation.last_moved, now);
    const double limit = settings_.stall_shutdown_time_s;
    const std::vector<int> missing = sources_of(operation.request);
    if (!settings_.stall_check_disable && idle > settings_.stall_check_time_s) {
      if (!operation.stalled.exchange(true)) log_(LogLevel::kWarning, wait_text(operation, idle, missing));
      if (limit > 0 && idle > limit) throw_stall(wait_text(operation, idle, missing));
    }
    tell_of_waiting(operation, now, missing);
    if (idle > settings_.timeout_s + patience(operation)) throw TimeoutError(timeout_text(operation, idle, missing));
  });
}

// Beyond the limit, so that those speak first that see who is missing.
double Communicator::patience(const Operation& operation) const {
  const Request& r = operation.request;
  // Who makes a group waits for its lowest rank, and that one for the others (subset.h).
  const bool makes_group = is_point(r.kind) && static_cast<PointSpace>(r.tag >> 32) == PointSpace::kGroups;
  const bool indirectly = makes_group ? r.root < members_.rank : operation.started && operation.task.waits_indirectly();
  return indirectly ? std::min(kMostGraceSeconds, settings_.timeout_s / 4) : 0;
}

std::string Communicator::wait_text(const Operation& operation, double seconds,
                                    const std::vector<int>& waited_for) const {
  const double recent = 2 * grace(settings_.timeout_s) + patience(operation);
  const auto since = Clock::now() - std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(recent));
  std::vector<int> missing = culprits(members_.rank, waited_for, members_.transport->stall_notes(), since);
  // Unless rank 0 has said that it waits for somebody itself: then that one is missing.
  const bool for_names = operation.by_name && !operation.started && missing == std::vector<int>{0};
  for (int& rank : missing) rank = members_.job_rank(rank);
  return operation.request.describe() + " made no progress for " + std::to_string(static_cast<int64_t>(seconds)) +
         " s, waiting for " + (missing.empty() ? "the network" : ranks_text(missing)) + " of " +
         std::to_string(members_.size) + (for_names ? ", which keeps the list of names." : ".");
}

std::string Communicator::timeout_text(const Operation& operation, double seconds,
                                       const std::vector<int>& waited_for) const {
  return wait_text(operation, seconds, waited_for) +
         " Look there for the cause; if it was only slow, raise DCOLL_TIMEOUT (seconds, now " +
         std::to_string(settings_.timeout_s) + ").";
}

}  // namespace dcoll
