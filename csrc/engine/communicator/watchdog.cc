// Deadlines, and peers that have ended.
#include "engine/communicator/watchdog.h"

#include "base/error.h"
#include "base/number.h"
#include "base/ranks_text.h"
#include "device/device.h"
#include "engine/core/point.h"
#include "engine/core/staging.h"
#include "engine/watch/stall_report.h"

namespace dcoll {
namespace {

constexpr double kPeerCheckSeconds = 0.1;
// After so long a rank asks those whose messages it waits for to tell it when they leave.
constexpr double kAskSeconds = 1;
// How much longer a rank waits for one that may have to name another (Pollable::waits_indirectly).
constexpr double kMostGraceSeconds = 5;

// A rank that waits in vain says so this long before it gives up, in seconds.
double grace(double timeout_s) { return std::min(0.1 * timeout_s, 2.0); }

}  // namespace

// Nothing that waits here has waited while this process did not run.
void Watchdog::forgive(Clock::time_point now, Clock::duration lost) {
  const auto shift = [&](Operation& operation) {
    const Clock::time_point later = std::min(now, operation.last_moved + lost);
    operation.last_moved = std::max(operation.last_moved, later);  // it may just have moved
  };
  for (const OperationQueue* queue : {&all().ordered, &all().named, &all().messages}) {
    for (const auto& operation : *queue) shift(*operation);
  }
  if (all().names != nullptr) {
    for (const auto& [id, operation] : all().names->waiting()) shift(*operation);
  }
  if (all().points != nullptr) all().points->for_each(shift);
}

void Watchdog::watch(Clock::time_point now) {
  progress_.drive_mutex.is_held();
  const bool idle = all().ordered.empty() && all().names_idle();
  if ((idle || setup_.members.size == 1) && !progress_.has_messages()) return;
  if (progress_.has_failed()) return;
  overdue_.clear();
  overdue_untold_ = false;
  try {
    if (seconds_between(last_peer_check_, now) >= kPeerCheckSeconds) {
      last_peer_check_ = now;
      check_peers();
    }
    if (!all().ordered.empty()) watch_operation(*all().ordered.front(), now);
    if (!all().named.empty()) watch_operation(*all().named.front(), now);
    if (all().names != nullptr) watch_names(now);
    if (all().points != nullptr) watch_points(now);
    tell_of_overdue();
  } catch (...) {
    // A peer that left may have done its part first: one more look decides.
    const std::exception_ptr error = std::current_exception();
    bool moved = false;
    progress_.step(moved);
    if (!moved) progress_.fail_with(error, /*tell_peers=*/true);
  }
}

void Watchdog::check_peers() const {
  // A death is the cause, and a closing of another rank may be its consequence: so processes are looked at first.
  if (setup_.members.processes != nullptr) setup_.members.processes->check(job_ranks());
  setup_.transport().check_peers();
}

void Watchdog::watch_operation(Operation& running, Clock::time_point now) {
  if (!running.started || running.patient) return;
  // Ranks that trickle in are movement, though a barrier of many is looked at as a whole (arrival_tree.h).
  std::vector<int> missing = running.task.waiting_for();
  if (missing.size() < running.missing) running.last_moved = now;
  running.missing = missing.size();
  const double idle = seconds_between(running.last_moved, now);
  watch_stall(running, idle, missing);
  note_overdue(running, now, missing);
  const bool for_work = running.request.kind == Kind::kShutdown && waits_for_work(running, now, missing);
  if (idle > timeout_s() + patience(running) && !for_work) time_out(running, idle, missing);
}

// A rank whose program has ended waits for others as long as they compute: rank 0 may evaluate for an hour what all
// have trained. One that hangs, or is stopped, uses no processor in the second half of the timeout. Of other machines'
// ranks it is not known.
bool Watchdog::waits_for_work(Operation& running, Clock::time_point now, const std::vector<int>& missing) {
  const Members& members = setup_.members;
  const double idle = seconds_between(running.last_moved, now);
  if (idle <= timeout_s() / 2) return false;
  if (work_.looked() <= running.last_moved) work_.look();
  if (idle <= timeout_s()) return false;
  std::vector<int> waited_for = missing;
  if (running.task.waits_indirectly()) {  // for any that has not said that it waits itself
    waited_for = culprits_of(others(), timeout_s() + patience(running));
  }
  std::vector<int> at_work = work_.among(waited_for);
  if (at_work.empty()) return false;
  for (int& rank : at_work) rank = members.job_rank(rank);
  setup_.log(LogLevel::kWarning, "this rank has called shutdown (or its program ended); it goes on waiting for " +
                                     ranks_text(at_work) + ", still computing");
  running.last_moved = now;
  return true;
}

// Rank 0 knows who is missing; the others leave it a second to say so.
void Watchdog::watch_names(Clock::time_point now) {
  const NamedLane& names = *all().names;
  const double limit = timeout_s() + (setup_.members.rank == 0 ? 0 : 1);
  for (const auto& [id, operation] : names.waiting()) {
    const double idle = seconds_between(operation->last_moved, now);
    watch_stall(*operation, idle, names.waits_for(id));
    if (idle > limit) time_out(*operation, idle, names.waits_for(id));
  }
}

// Shortly before it gives up.
void Watchdog::note_overdue(const Operation& operation, Clock::time_point now, const std::vector<int>& missing) {
  const double overdue = seconds_between(operation.last_moved, now) - (timeout_s() - grace(timeout_s()));
  if (overdue <= 0) return;
  overdue_untold_ |= seconds_between(overdue_told_, now) > overdue;
  overdue_.insert(overdue_.end(), missing.begin(), missing.end());
}

// The latest word counts: so it is of all that are overdue.
void Watchdog::tell_of_overdue() {
  if (!overdue_untold_) return;
  overdue_untold_ = false;
  overdue_told_ = Clock::now();
  sort_once(overdue_);
  setup_.transport().post_stall(overdue_);
}

void Watchdog::time_out(const Operation& operation, double idle, const std::vector<int>& missing) {
  tell_of_overdue();
  throw TimeoutError(timeout_text(operation, idle, missing));
}

// Each message has a deadline of its own. That it waits is told here: the other rank has nothing in common with it that
// it could be asked about, but whether it leaves.
void Watchdog::watch_points(Clock::time_point now) {
  std::vector<int> asked;
  const auto look = [&](Operation& operation, const std::vector<int>& missing) DCOLL_REQUIRES(progress_.drive_mutex) {
    const double idle = seconds_between(operation.last_moved, now);
    if (idle > kAskSeconds) asked.insert(asked.end(), missing.begin(), missing.end());
    const double limit = setup_.settings.stall_shutdown_time_s;
    if (!setup_.settings.stall_check_disable && idle > setup_.settings.stall_check_time_s) {
      if (!operation.stalled.exchange(true)) setup_.log(LogLevel::kWarning, wait_text(operation, idle, missing));
      if (limit > 0 && idle > limit) throw_stall(wait_text(operation, idle, missing));
    }
    note_overdue(operation, now, missing);
    if (idle > timeout_s() + patience(operation)) time_out(operation, idle, missing);
  };
  all().points->for_each([&](Operation& operation)
                             DCOLL_REQUIRES(progress_.drive_mutex) { look(operation, sources_of(operation.request)); });
  for (const auto& operation : all().messages) look(*operation, {});  // waits for its device
  for (const int rank : asked) all().points->ask_to_be_told(rank);
}

std::vector<int> Watchdog::others() const {
  std::vector<int> others;
  for (int rank = 0; rank < setup_.members.size; ++rank) {
    if (rank != setup_.members.rank) others.push_back(rank);
  }
  return others;
}

std::vector<int> Watchdog::sources_of(const Request& request) const {
  return request.root == kAnySource ? others() : std::vector{request.root};
}

// Beyond the limit, so that those speak first that see who is missing.
double Watchdog::patience(const Operation& operation) const {
  const Request& r = operation.request;
  // Who makes a group waits for its lowest rank, and that one for the others (subset.h).
  const bool makes_group = is_point(r.kind) && static_cast<PointSpace>(r.tag >> 32) == PointSpace::kGroups;
  const bool indirectly =
      makes_group ? r.root < setup_.members.rank : operation.started && operation.task.waits_indirectly();
  return indirectly ? std::min(kMostGraceSeconds, timeout_s() / 4) : 0;
}

// Of these and those that others wait for, who has not said in the last `recent` seconds that it waits itself.
std::vector<int> Watchdog::culprits_of(const std::vector<int>& waited_for, double recent) const {
  const auto since = Clock::now() - duration_of(recent + 2 * grace(timeout_s()));
  std::vector<int> missing = culprits(setup_.members.rank, waited_for, setup_.transport().stall_notes(), since);
  // What a rank noted came as bytes.
  std::erase_if(missing, [&](int rank) { return rank < 0 || rank >= setup_.members.size; });
  return missing;
}

std::string Watchdog::wait_text(const Operation& operation, double seconds, const std::vector<int>& waited_for) const {
  std::vector<int> missing = culprits_of(waited_for, patience(operation));
  // Unless rank 0 has said that it waits for somebody itself: then that one is missing.
  const bool for_names = operation.by_name && !operation.started && missing == std::vector<int>{0};
  for (int& rank : missing) rank = setup_.members.job_rank(rank);
  const std::string begin = operation.request.describe() + " made no progress for " +
                            std::to_string(static_cast<int64_t>(seconds)) + " s, waiting for ";
  if (waited_for.empty() && operation.staging != nullptr && operation.staging->waits()) {
    return begin + "what is under way on " + device::device_of(operation.request.device).name() + " of rank " +
           std::to_string(setup_.job_rank()) + ".";
  }
  return begin + (missing.empty() ? "the network" : ranks_text(missing)) + " of " +
         std::to_string(setup_.members.size) + (for_names ? ", which keeps the list of names." : ".");
}

std::string Watchdog::timeout_text(const Operation& operation, double seconds,
                                   const std::vector<int>& waited_for) const {
  const std::string limit = timeout_s() == setup_.settings.timeout_s ? "DCOLL_TIMEOUT" : "the group's timeout";
  return wait_text(operation, seconds, waited_for) + " Look there for the cause; if it was only slow, raise " + limit +
         " (seconds, now " + text_of(timeout_s(), 10) + ").";
}

}  // namespace dcoll
