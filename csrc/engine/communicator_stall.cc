// Operations that some ranks have not submitted for long: told to the user, and ended if so configured.
#include <algorithm>

#include "base/error.h"
#include "engine/communicator.h"

namespace dcoll {
namespace {

// What a waiting thread gets to tell the user where the program waits, before the watchdog speaks without knowing that.
constexpr double kWaiterGraceSeconds = 1;

std::string listed(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) text += (i ? ", " : "") + std::to_string(ranks[i]);
  return text;
}

}  // namespace

// Drive lock held.
void Communicator::watch_stall(Operation& operation, double idle, const std::vector<int>& missing) {
  if (settings_.stall_check_disable || idle <= settings_.stall_check_time_s || missing.empty()) return;
  // A joined rank waits for the others to end, however long they train.
  if (operation.request.kind == Kind::kJoin || operation.request.kind == Kind::kShutdown) return;
  operation.stalled.store(true);
  const bool nobody_tells = waiters_.load() == 0 || idle > settings_.stall_check_time_s + kWaiterGraceSeconds;
  if (nobody_tells && !operation.stall_told.exchange(true)) {
    log_(LogLevel::kWarning, stall_text(operation, idle, missing));
  }
  if (settings_.stall_shutdown_time_s > 0 && idle > settings_.stall_shutdown_time_s) {
    throw TimeoutError(stall_text(operation, idle, missing) + " DCOLL_STALL_SHUTDOWN_TIME (seconds, now " +
                       std::to_string(settings_.stall_shutdown_time_s) + ") ends the job.");
  }
}

std::vector<int> Communicator::missing_from(const Operation& operation) const {
  if (operation.started) return operation.task.waiting_for();
  return operation.by_name ? names_->waits_for(NamedLane::id_of(operation.request)) : std::vector<int>{};
}

std::string Communicator::stall_report(Operation& operation) {
  if (!operation.stalled.load() || operation.stall_told.exchange(true)) return {};
  const std::lock_guard lock(drive_mutex_);
  if (operation.done) return {};
  const double idle = seconds_between(operation.last_moved, Clock::now());
  std::vector<int> missing = missing_from(operation);
  std::sort(missing.begin(), missing.end());
  std::vector<int> present;
  for (int rank = 0; rank < members_.size; ++rank) {
    if (!std::binary_search(missing.begin(), missing.end(), rank)) present.push_back(rank);
  }
  return operation.request.describe() + " stalls for " + std::to_string(static_cast<int64_t>(idle)) +
         " s: " + listed(missing) + " did not come" +
         (fabric_.board != nullptr && operation.started ? ", " + listed(present) + " did" : "");
}

}  // namespace dcoll
