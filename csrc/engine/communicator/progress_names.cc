// Operations that meet by name (named_lane.h), as far as they are under way.
#include "base/error.h"
#include "engine/communicator/progress.h"

namespace dcoll {

void Progress::make_names() {
  if (uses_names_) return;
  const MutexLock lock(drive_mutex);
  if (under_way.names == nullptr) under_way.names = std::make_unique<NamedLane>(fabric);
  uses_names_ = true;
}

void Progress::submit_by_name(const std::shared_ptr<Operation>& operation) {
  operation->phases.enter(Phase::kQueue);
  operation->last_moved = Clock::now();
  const MutexLock lock(inbox_mutex_);
  check_open();
  const uint64_t id = NamedLane::id_of(operation->request);
  if ((id == last_name_ && last_name_taken_.load()) || !names_in_flight_.insert(id).second) {
    throw ArgumentError(operation->request.describe() +
                        ": an operation of this kind and name is still under way on this rank. Wait for it first "
                        "(dcoll.synchronize), or give each operation in flight a name of its own.");
  }
  try {
    inbox_.push_back(operation);
  } catch (...) {
    names_in_flight_.erase(id);
    throw;
  }
  last_name_ = id;
  last_name_taken_.store(true);
  pending_.store(true);
}

void Progress::submit_join(const std::shared_ptr<Operation>& join) {
  const MutexLock driving(drive_mutex);
  const MutexLock lock(inbox_mutex_);
  check_open();
  inbox_.push_back(join);
  try {
    under_way.names->join();
  } catch (...) {
    inbox_.pop_back();
    throw;
  }
  pending_.store(true);
}

std::vector<std::shared_ptr<Operation>> Progress::named_in_flight() {
  take_inbox();
  std::vector<std::shared_ptr<Operation>> found;
  for (const auto& operation : under_way.named) {
    if (operation->by_name) found.push_back(operation);
  }
  if (under_way.names == nullptr) return found;
  for (const auto& [id, operation] : under_way.names->waiting()) found.push_back(operation);
  return found;
}

// This rank has joined and takes part in an operation that the others submitted by name: one more of the rounds by
// which the ranks find out who joined last.
void Progress::count_named_round() {
  for (const auto& operation : under_way.ordered) {
    if (operation->request.kind != Kind::kJoin) continue;
    if (operation->rounds + operation->named_rounds++ == 0) setup_.log(LogLevel::kInfo, operation->note);
    return;
  }
}

void Progress::advance_names(bool& moved) {
  if (under_way.named.empty() && under_way.names->asleep()) return;
  if (!failed_.load(std::memory_order_acquire)) {
    try {
      under_way.names->exchange(under_way.named, moved);
    } catch (...) {
      fail_with(std::current_exception(), /*tell_peers=*/true);
    }
  }
  while (!under_way.named.empty() && advance_front(under_way.named, under_way.names->fabric(), moved)) {
  }
  if (under_way.ordered.empty()) update_pending();
}

}  // namespace dcoll
