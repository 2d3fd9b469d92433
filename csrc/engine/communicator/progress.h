// What is under way in a communicator, and how it goes on: the queue of its ordered operations, those by name
// (named_lane.h), messages between two ranks (p2p/point_to_point.h), and what was submitted and not taken up yet. Who
// polls, and when, is turns.h.
//
// Failure: the first failure is kept for good. It is sent to every peer (so all ranks fail with the same cause), every
// pending operation ends with it, and every later call throws it at once.
#pragma once

#include <atomic>
#include <deque>
#include <exception>
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include "base/thread_safety.h"
#include "engine/collective/run_collective.h"
#include "engine/communicator/members.h"
#include "engine/communicator/named_lane.h"
#include "engine/core/operation.h"
#include "engine/p2p/point_to_point.h"
#include "engine/watch/last_operation.h"

namespace dcoll {

using OperationQueue = std::deque<std::shared_ptr<Operation>>;

// What was taken up.
struct UnderWay {
  OperationQueue ordered;                // the front one is running
  OperationQueue named;                  // in the agreed order; the front one is running
  std::unique_ptr<NamedLane> names;      // made when a name is first used
  std::unique_ptr<PointToPoint> points;  // made with the first message
  OperationQueue messages;               // what is on its way there: the front one may wait for a device's copy
  // Operations so far, of either order: the same on every rank.
  uint64_t started = 0, named_started = 0;
  LastOperation last;  // of those

  bool names_idle() const { return names == nullptr || (named.empty() && names->idle()); }
  // Whether what goes on next waits for a device's copy.
  bool awaits_copies() const;
};

class Progress {
 public:
  explicit Progress(Setup& setup);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  Mutex drive_mutex;  // held while polling
  Fabric fabric DCOLL_GUARDED_BY(drive_mutex);
  UnderWay under_way DCOLL_GUARDED_BY(drive_mutex);
  std::atomic<int> waiters{0};  // threads that drive while they wait: the background thread stands back
  // What is pending is only to answer members who leave as this rank has, or still call something. Beside messages.
  std::atomic<bool> only_leaves{false};
  // For what of the fabric never changes, or has a lock of its own.
  const Fabric& as_made() const DCOLL_UNCHECKED { return fabric; }

  // ---- Any thread ----

  // Queues it. Whether something was queued or running then. Throws the failure, or Error once the communicator closes,
  // which only its farewell may still come after.
  bool submit(std::shared_ptr<Operation> operation, bool is_farewell = false);
  // The same by name: ArgumentError while one of that kind and name is under way here.
  void submit_by_name(const std::shared_ptr<Operation>& operation);
  void submit_join(const std::shared_ptr<Operation>& join) DCOLL_EXCLUDES(drive_mutex);
  // Before the first of their kind.
  void make_names() DCOLL_EXCLUDES(drive_mutex);
  void make_points() DCOLL_EXCLUDES(drive_mutex);
  bool uses_names() const { return uses_names_; }
  // Nothing is submitted any more. False: that was said before.
  bool close();
  bool has_failed() const { return failed_.load(std::memory_order_acquire); }
  std::string failure() const;
  // Whether a driver has anything to do.
  bool has_work() const { return pending_.load() || points_busy_.load() || setup_.transport().connecting(); }
  bool has_messages() const { return points_busy_.load(); }
  bool is_pending() const { return pending_.load(); }
  // Whether a collective, or a message, may go on the spot as far as failures and peers are concerned.
  bool is_sound() const { return !failed_.load() && !closing_.load() && !heard_of_failure(); }
  // This rank waits or begins something: see last_name_taken_.
  void free_last_name() {
    if (last_name_taken_.load(std::memory_order_relaxed)) [[unlikely]]
      last_name_taken_.store(false, std::memory_order_relaxed);
  }

  // ---- Who drives ----

  // One look at everything. Throws nothing: failures end in the operations.
  void step(bool& moved) noexcept DCOLL_REQUIRES(drive_mutex);
  void take_inbox() DCOLL_REQUIRES(drive_mutex);
  // Takes over an operation that has entered and could not be finished on the spot. Nothing is queued.
  void go_on(const std::shared_ptr<Operation>& operation, Entry entry) DCOLL_REQUIRES(drive_mutex);
  // Advances the running operation of either order. True when it ended and the next one may start.
  bool advance_front(OperationQueue& queue, Fabric& of, bool& moved) DCOLL_REQUIRES(drive_mutex);
  std::vector<std::shared_ptr<Operation>> named_in_flight() DCOLL_REQUIRES(drive_mutex);
  // The first failure wins; it ends everything that is queued, here and (tell_peers) everywhere.
  void fail_with(std::exception_ptr error, bool tell_peers) noexcept DCOLL_REQUIRES(drive_mutex);
  // After the farewell nobody submits anything any more: handles that are still waited for must not wait for ever.
  void abandon_rest() DCOLL_REQUIRES(drive_mutex);
  // What follows once peers have this rank's part: whatever keeps it from taking theirs fails the communicator, or the
  // next call would meet what is left of this one.
  template <typename Rest>
  auto entered(Rest&& rest) DCOLL_REQUIRES(drive_mutex) {
    try {
      return rest();
    } catch (...) {
      fail_with(std::current_exception(), /*tell_peers=*/true);
      throw;
    }
  }

 private:
  void connect_levels(Setup& setup) DCOLL_UNCHECKED;  // by the constructor
  void make_points_here() DCOLL_REQUIRES(drive_mutex);
  void check_open() const DCOLL_REQUIRES(inbox_mutex_);
  void advance_names(bool& moved) DCOLL_REQUIRES(drive_mutex);
  void advance_points(bool& moved) DCOLL_REQUIRES(drive_mutex);
  void submit_messages() DCOLL_REQUIRES(drive_mutex);
  void finish_message(std::shared_ptr<Operation> operation, std::exception_ptr error) noexcept
      DCOLL_REQUIRES(drive_mutex);
  void count_named_round() DCOLL_REQUIRES(drive_mutex);
  void update_pending() DCOLL_REQUIRES(drive_mutex);
  void finish(std::shared_ptr<Operation> operation, std::exception_ptr error) noexcept DCOLL_REQUIRES(drive_mutex);
  void end_inbox() DCOLL_REQUIRES(drive_mutex);
  bool given_up() DCOLL_REQUIRES(drive_mutex);
  bool heard_of_failure() const {
    return setup_.failure_flag != nullptr && setup_.failure_flag->load(std::memory_order_relaxed) != 0;
  }
  void tell_of_failure() noexcept DCOLL_REQUIRES(drive_mutex);

  const Setup& setup_;
  const std::string out_of_memory_;  // what to tell the others when there is no memory for more

  std::exception_ptr lost_ DCOLL_GUARDED_BY(drive_mutex);  // why a message that came could not be copied to its device
  // Failed, with what they had of their own: a list.
  std::shared_ptr<Operation> abandoned_ DCOLL_GUARDED_BY(drive_mutex);
  bool let_go_ DCOLL_GUARDED_BY(drive_mutex) = true;  // after a failure: the transport needs no operation's memory

  mutable Mutex inbox_mutex_;  // never held while polling, so submitting does not wait
  OperationQueue inbox_ DCOLL_GUARDED_BY(inbox_mutex_);
  std::unordered_set<uint64_t> names_in_flight_ DCOLL_GUARDED_BY(inbox_mutex_);  // NamedLane::id_of
  uint64_t last_name_ DCOLL_GUARDED_BY(inbox_mutex_) = 0;       // the one submitted last, as in names_in_flight_
  uint64_t points_started_ DCOLL_GUARDED_BY(inbox_mutex_) = 0;  // submitted so far
  std::exception_ptr failure_;                                  // written once, before failed_, and read after it
  std::string failure_text_ DCOLL_GUARDED_BY(inbox_mutex_);
  std::atomic<bool> closing_{false};
  std::atomic<bool> failed_{false};
  std::atomic<bool> pending_{false};
  std::atomic<bool> uses_names_{false};
  std::atomic<bool> uses_points_{false};
  std::atomic<bool> points_busy_{false};  // PointToPoint::busy(): apart, as it keeps no collective from its fast path
  // Since last_name_ was submitted this rank has neither waited nor begun anything else. Its name is not free then,
  // even if the others were so quick that it is done: whether a name may be used twice must not depend on who comes
  // first.
  std::atomic<bool> last_name_taken_{false};
};

}  // namespace dcoll
