// What a communicator does for operations that meet by name (named_lane.h).
#include "base/error.h"
#include "engine/communicator/communicator.h"

namespace dcoll {

std::shared_ptr<Operation> Communicator::submit_by_name(Request request) {
  check_process();
  accept(request);
  if (request.name.empty()) throw ArgumentError(request.describe() + " needs a name to meet the other ranks by.");
  auto operation = std::make_shared<Operation>(std::move(request));
  operation->by_name = true;
  operation->last_moved = Clock::now();
  operation->phases.on = timeline_->on();
  operation->phases.enter(Phase::kQueue);
  stage(*operation);
  make_names();
  {
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
  if (operation->staging != nullptr || !operation->request.call().is_small()) {
    hand_over(Wake::kNow);
  } else {
    begin_here();
  }
  return operation;
}

void Communicator::make_names() {
  if (uses_names_) return;
  const MutexLock lock(drive_mutex_);
  if (names_ == nullptr) names_ = std::make_unique<NamedLane>(fabric_);
  uses_names_ = true;
}

std::vector<std::shared_ptr<Operation>> Communicator::named_in_flight() {
  check_process();
  const MutexLock lock(drive_mutex_);
  take_inbox();
  std::vector<std::shared_ptr<Operation>> found;
  for (const auto& operation : named_queue_) {
    if (operation->by_name) found.push_back(operation);
  }
  if (names_ == nullptr) return found;
  for (const auto& [id, operation] : names_->waiting()) found.push_back(operation);
  return found;
}

std::shared_ptr<Operation> Communicator::submit_join(const std::string& note) {
  check_process();
  make_names();
  auto operation = std::make_shared<Operation>(Request{.kind = Kind::kJoin});
  operation->note = note;
  const MutexLock driving(drive_mutex_);
  const MutexLock lock(inbox_mutex_);
  check_open();
  inbox_.push_back(operation);
  try {
    names_->join();
  } catch (...) {
    inbox_.pop_back();
    throw;
  }
  pending_.store(true);
  return operation;
}

// Before the farewell, which is not in their order: what every rank has submitted is done in no time, and what some
// rank never submits is not worth waiting for.
void Communicator::finish_names() {
  constexpr double kPatienceSeconds = 5;
  const auto begin = Clock::now();
  if (!uses_names_) return;
  for (const auto& operation : named_in_flight()) {
    const double left = kPatienceSeconds - seconds_between(begin, Clock::now());
    if (left <= 0 || !wait_for(*operation, left)) return;
  }
}

// This rank has joined and takes part in an operation that the others submitted by name: one more of the rounds by
// which the ranks find out who joined last.
void Communicator::count_named_round() {
  for (const auto& operation : queue_) {
    if (operation->request.kind != Kind::kJoin) continue;
    if (operation->rounds + operation->named_rounds++ == 0) log_(LogLevel::kInfo, operation->note);
    return;
  }
}

bool Communicator::names_idle() const { return names_ == nullptr || (named_queue_.empty() && names_->idle()); }

void Communicator::forget_name(const Operation& operation) {
  const MutexLock lock(inbox_mutex_);
  names_in_flight_.erase(NamedLane::id_of(operation.request));
}

void Communicator::update_pending() {
  const MutexLock lock(inbox_mutex_);
  pending_.store(!queue_.empty() || !inbox_.empty() || !names_idle());
}

void Communicator::exchange_names(bool& moved) {
  if (failed_.load(std::memory_order_acquire)) return;
  try {
    names_->exchange(named_queue_, moved);
  } catch (...) {
    fail_with(std::current_exception(), /*tell_peers=*/true);
  }
}

void Communicator::advance_names(bool& moved) {
  if (named_queue_.empty() && names_->asleep()) return;
  exchange_names(moved);
  while (!named_queue_.empty() && advance_front(named_queue_, names_->fabric(), moved)) {
  }
  if (queue_.empty()) update_pending();
}

// Rank 0 knows who is missing; the others leave it a second to say so.
void Communicator::watch_names(Clock::time_point now) {
  const double limit = settings_.timeout_s + (members_.rank == 0 ? 0 : 1);
  for (const auto& [id, operation] : names_->waiting()) {
    const double idle = seconds_between(operation->last_moved, now);
    watch_stall(*operation, idle, names_->waits_for(id));
    if (idle > limit) throw TimeoutError(timeout_text(*operation, idle, names_->waits_for(id)));
  }
}

}  // namespace dcoll
