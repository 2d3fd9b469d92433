// An ordered set of ranks and the collectives between them. Many can exist at once; nothing here is global.
//
// Threads: any thread may submit and wait. Operations run one after the other in the order submitted, which must be the
// same on every rank; those submitted by name have a sequence of their own (named_lane.h). Whoever waits drives: a
// thread inside wait() polls the operations itself (spinning while its core is its own, yielding it between looks while
// other ranks need it), and the background thread (driver.h) stands back; while nobody waits, that one drives and
// sleeps on a futex whenever there is nothing to do, so that it takes no time from the thread that computes.
//
// Failure: the first failure is kept for good. It is sent to every peer (so all ranks fail with the same cause), every
// pending operation ends with it, and every later call throws it at once.
#pragma once

#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "base/clock.h"
#include "base/fork.h"
#include "base/log.h"
#include "base/settings.h"
#include "base/thread_safety.h"
#include "engine/collective/run_collective.h"
#include "engine/communicator/driver.h"
#include "engine/communicator/named_lane.h"
#include "engine/core/call.h"
#include "engine/core/operation.h"
#include "engine/core/scratch.h"
#include "engine/core/staging.h"
#include "engine/p2p/point_to_point.h"
#include "engine/watch/diagnosis.h"
#include "engine/watch/last_operation.h"
#include "engine/watch/stall_report.h"
#include "engine/watch/timeline.h"
#include "transport/os/processes.h"
#include "transport/transport.h"
#include "transport/window.h"

namespace dcoll {

// Who is in a communicator and how they are reached.
struct Members {
  int rank = 0;
  int size = 1;
  std::vector<int> node_of_rank{0};
  std::vector<std::string> transport_of_rank{"self"};
  std::unique_ptr<Transport> transport;
  std::shared_ptr<Window> window;  // the node's memory; null when it could not be mapped
  LinkConstants links{};           // how the constants of the cost model are found
  // Ranks with equal numbers have mapped each other, in ascending order; empty where that is not known of all ranks.
  // With several numbers, collectives work on two levels, and every rank needs a window, if only its own.
  std::vector<int> memory_of_rank{};
  std::vector<int> job_ranks{};                  // what messages call the ranks; empty: by their numbers here
  std::shared_ptr<const Processes> processes{};  // of the job, where the transport does not see that one ends
  int job_rank(int of) const { return job_ranks.empty() ? of : job_ranks[of]; }
  std::shared_ptr<Timeline> timeline{};    // of the process; null: a new one
  std::shared_ptr<Diagnosis> diagnosis{};  // of the process; null: this communicator makes it
  std::shared_ptr<Driver> driver{};        // of the process; null: a new one
  bool may_listen = true;     // whether a thread of its own may call the transport at any time, under the lock
  bool own_core = true;       // no other rank needs the core this one runs on, so it may spin while it waits
  bool shared_cores = false;  // that is not so of every rank of the job
};

class Communicator final : public Watched, public Notes, public Driven {
 public:
  // A forked child never destroys its copy: threads, sockets and memory in it are the parent's.
  static std::shared_ptr<Communicator> make(Members members, const Settings& settings);
  ~Communicator() override;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // kByWaiter: the caller is about to wait, so the background thread need not be told. It takes over all the same if
  // the wait ends early. kSoon: the caller may be about to wait. It enters a small operation on its own thread, and the
  // background thread is woken when a peer waits for more.
  enum class Start { kInBackground, kSoon, kByWaiter };
  // Queues the operation and returns at once. `keep`, if given, lives as long as the operation needs memory. Throws
  // ArgumentError, or the failure of this communicator.
  std::shared_ptr<Operation> submit(Request request, Start start = Start::kInBackground,
                                    std::shared_ptr<Memory> keep = nullptr);
  // The same for an operation that meets those of equal kind and name on the other ranks, whatever the order in which
  // each of them submits. ArgumentError while one of that kind and name is under way here.
  std::shared_ptr<Operation> submit_by_name(Request request);
  // This rank cannot make its next ordered call. Takes that call's turn and returns at once: what the other ranks
  // call then fails there with a MismatchError that says why. Nothing happens if all ranks refuse.
  void refuse(const std::string& why);
  // A call that would have been ordered was refused here, before the others heard of it. Says so should they turn out
  // to have made it (line_up.h); otherwise nothing comes of it.
  void note_refused(const std::string& why);
  // What was submitted by name here and is not done.
  std::vector<std::shared_ptr<Operation>> named_in_flight();
  // From now on this rank takes part in the others' all-reduces with neutral elements, until all ranks have joined:
  // then the operation is done, and its counts[0] the last one to join. Nothing by name may be in flight here. `note`
  // is logged when the others go on.
  std::shared_ptr<Operation> submit_join(const std::string& note);
  // For a caller that is about to wait: finishes the collective on its thread, if the peers are there and nothing is
  // queued, and returns null (which allocates nothing) or, from a Request but for all-reduce, the operation, done.
  // Otherwise as submit(kByWaiter). Null of an all-gather or all-to-all: the result is as large as out_bytes.
  std::shared_ptr<Operation> run_or_submit(const Call& call);
  std::shared_ptr<Operation> run_or_submit(Request request);
  // A message to or from another rank (p2p/point_to_point.h), or from kAnySource; a tag is a point_key(). The memory is
  // the caller's, and in use until the operation is done. ArgumentError; MismatchError, and nothing is begun: a small
  // message that was sent to this peer before met a receive of another length.
  std::shared_ptr<Operation> isend(const void* data, size_t bytes, int peer, uint64_t tag);
  std::shared_ptr<Operation> irecv(void* data, size_t bytes, int peer, uint64_t tag);
  // For a caller that is about to wait: null if it is done, and `source` who sent it.
  std::shared_ptr<Operation> send_or_submit(const void* data, size_t bytes, int peer, uint64_t tag);
  std::shared_ptr<Operation> recv_or_submit(void* data, size_t bytes, int peer, uint64_t tag, int& source);
  // Waits until `operation` is done, then rethrows what it failed with. timeout_s < 0: no limit but the watchdog's.
  // When timeout_s passes first, TimeoutError is thrown and the operation goes on.
  void wait(Operation& operation, double timeout_s = -1);
  // How a thread that drives waits: kBriefly is for one that is on the core of another thread, which computes.
  enum class Spin { kAllowed, kBriefly };
  // The waiting alone: whether it is done.
  bool wait_for(Operation& operation, double timeout_s, Spin spin = Spin::kAllowed);
  // What wait() says when timeout_s has passed, naming who is missing.
  std::string unfinished_text(const Operation& operation, double timeout_s);

  // Whether it is done. A caller that asks again and again brings it on.
  bool poll(Operation& operation);

  // For the thread of the process's Driver.
  Transport& sleeps_on() override { return *members_.transport; }
  bool take_turn(bool in_turn, bool in_any_case) override;
  Look look() override;

  // For the thread of the job's Diagnosis.
  uint64_t id() const override;
  std::vector<int> job_ranks() const override;
  std::optional<Stall> find_stall(double stagger, bool& later) override;
  uint64_t answer(const Question& question, int asker, Answer& answer) override;
  std::optional<uint64_t> waits_here(std::string& text) override;
  void report_stall(Operation& operation, const std::string& text, const std::map<int, Answer>& answers,
                    const std::vector<int>& silent) override;
  bool take_notes(std::vector<Note>& notes) override;
  void post_note(int peer, const std::string& text) override;
  bool hears_of_notes() const override { return members_.transport->announces_notes(); }
  uint32_t prepare_listen() override { return members_.transport->prepare_listen(); }
  void listen(uint32_t ticket, std::chrono::microseconds limit) override { members_.transport->listen(ticket, limit); }
  void wake_listener() override { members_.transport->wake_listener(); }

  std::shared_ptr<Memory> alloc(size_t bytes);
  void fail(const std::string& text);
  std::string failure() const;
  // Waits for what is queued, meets the other ranks (so that nobody leaves while another still needs it), stops.
  void close();
  // None of the job's ranks, but a process that one of them forked: every other call but those below throws Error.
  // They do so before they take a lock: its copy in the child may be held, by a thread that only the parent has.
  bool in_forked_child() const { return fork_.in_child(); }
  void check_process() const {
    if (fork_.in_child()) [[unlikely]]
      throw_forked();
  }

  int rank() const override { return members_.rank; }
  int size() const { return members_.size; }
  // Whether a codec is ever used here (encodes() in choose_path.h), and whether ranks then encode for each other, each
  // a share of an operand.
  bool shares_encoding() const { return as_made().hierarchy != nullptr; }
  bool encodes() const { return members_.size > 1 && (as_made().board == nullptr || settings_.compress_local); }
  const EncodedCosts& encoded_costs() const {
    check_process();
    return as_made().encoded_costs;
  }
  int node() const { return members_.node_of_rank[members_.rank]; }
  int local_rank() const;
  int local_size() const;
  int num_nodes() const;
  const std::vector<int>& nodes() const { return members_.node_of_rank; }
  const std::vector<std::string>& transports() const { return members_.transport_of_rank; }
  const Settings& settings() const { return settings_; }
  Timeline& timeline() const { return *timeline_; }
  const Log& log() const { return log_; }
  const Members& members() const { return members_; }
  // Memory for the inside of a collective: as alloc(), but not zeroed, and used again when it is let go of.
  std::shared_ptr<Memory> scratch(size_t bytes) {
    return scratch_->take(bytes, [this](size_t size) { return alloc(size); });
  }
  // What of the memory of a packed operand no other rank reads: it may stay in Call::tensors.
  TwoShot::Slice own_slice(const Call& call) const { return dcoll::own_slice(as_made(), call); }
  // What the cost model works with now, and where the numbers are from.
  plan::Topology topology();
  std::string constants_source();
  // What its coding takes, where a call has asked whether this codec pays.
  std::optional<plan::Coding> coding(kernels::Codec codec);
  // How such a call goes, for people. mapped: its memory is, on all ranks.
  std::string describe_path(const Call& call, bool mapped);
  std::shared_ptr<KnownLinks> known_links() const { return as_made().links.of_the_job; }  // never another one

 private:
  Communicator(Members members, const Settings& settings);
  using Queue = std::deque<std::shared_ptr<Operation>>;

  // For what of it never changes, or has a lock of its own.
  const Fabric& as_made() const DCOLL_UNCHECKED { return fabric_; }
  void connect_levels() DCOLL_UNCHECKED;  // by the constructor
  void check_open() const DCOLL_REQUIRES(inbox_mutex_);
  [[noreturn]] void throw_forked() const;
  // Validates; and what messages call the root.
  void accept(Request& request) const;
  // Has an operation on memory of a device begin its copy.
  void stage(Operation& operation);
  bool awaits_copies() const DCOLL_REQUIRES(drive_mutex_);
  void drive(const std::atomic<bool>& done, Spin spin, Clock::time_point deadline);
  double longest_spin_s(Spin spin) const;
  void step(bool& moved) noexcept DCOLL_REQUIRES(drive_mutex_);
  void take_inbox() DCOLL_REQUIRES(drive_mutex_);
  bool advance_front(Queue& queue, Fabric& fabric, bool& moved) DCOLL_REQUIRES(drive_mutex_);
  void exchange_names(bool& moved) DCOLL_REQUIRES(drive_mutex_);
  void advance_names(bool& moved) DCOLL_REQUIRES(drive_mutex_);
  bool names_idle() const DCOLL_REQUIRES(drive_mutex_);
  void make_names();
  void count_named_round() DCOLL_REQUIRES(drive_mutex_);
  void forget_name(const Operation& operation);
  void free_last_name() {
    if (last_name_taken_.load(std::memory_order_relaxed)) [[unlikely]]
      last_name_taken_.store(false, std::memory_order_relaxed);
  }
  void update_pending() DCOLL_REQUIRES(drive_mutex_);
  double patience(const Operation& operation) const DCOLL_REQUIRES(drive_mutex_);
  void watch_operation(Operation& running, Clock::time_point now) DCOLL_REQUIRES(drive_mutex_);
  void watch_names(Clock::time_point now) DCOLL_REQUIRES(drive_mutex_);
  void tell_of_waiting(const Operation& operation, Clock::time_point now, const std::vector<int>& missing)
      DCOLL_REQUIRES(drive_mutex_);
  [[noreturn]] void throw_stall(const std::string& what) const;
  void watch_stall(Operation& operation, double idle, const std::vector<int>& missing) DCOLL_REQUIRES(drive_mutex_);
  std::shared_ptr<Operation> find(const Question& question) const DCOLL_REQUIRES(drive_mutex_);
  std::vector<std::shared_ptr<Operation>> untold_names() const DCOLL_REQUIRES(drive_mutex_);
  std::string last_operation() const DCOLL_REQUIRES(drive_mutex_);
  bool given_up() DCOLL_REQUIRES(drive_mutex_);
  bool heard_of_failure() const {
    return failure_flag_ != nullptr && failure_flag_->load(std::memory_order_relaxed) != 0;
  }
  void listen_for_stalls();
  void stop_listening();
  void finish(std::shared_ptr<Operation> operation, std::exception_ptr error) noexcept DCOLL_REQUIRES(drive_mutex_);
  void end_inbox() DCOLL_REQUIRES(drive_mutex_);
  void watch(Clock::time_point now) DCOLL_REQUIRES(drive_mutex_);
  void check_peers() DCOLL_REQUIRES(drive_mutex_);
  void fail_with(std::exception_ptr error, bool tell_peers) noexcept DCOLL_REQUIRES(drive_mutex_);
  void tell_of_failure() noexcept DCOLL_REQUIRES(drive_mutex_);
  // Whether the background thread goes on at once, or when a peer waits for it.
  enum class Wake { kNow, kByPeers };
  void hand_over(Wake wake);
  void set_alert(bool on);
  void begin_here();
  void stand_back();
  bool may_run_on_the_spot() DCOLL_REQUIRES(drive_mutex_);
  int polls_on_the_spot() const;
  void pause_between_looks() const;
  template <typename Poll>
  bool look_briefly(Poll&& poll) const DCOLL_REQUIRES(drive_mutex_);
  std::shared_ptr<Operation> reduce_on_the_spot(const Call& call) DCOLL_REQUIRES(drive_mutex_);
  std::shared_ptr<Operation> pull_on_the_spot(const Call& call) DCOLL_REQUIRES(drive_mutex_);
  std::shared_ptr<Operation> pull_on_the_spot(std::shared_ptr<Operation> operation) DCOLL_REQUIRES(drive_mutex_);
  void go_on(const std::shared_ptr<Operation>& operation, Entry entry) DCOLL_REQUIRES(drive_mutex_);
  void go_on_briefly(const std::shared_ptr<Operation>& operation, const PullNow& pull) DCOLL_REQUIRES(drive_mutex_);
  template <typename Rest>
  auto entered(Rest&& rest) DCOLL_REQUIRES(drive_mutex_);
  void say_farewell();
  void finish_names();
  void abandon_rest();
  std::shared_ptr<Operation> point_operation(Request request) const;
  std::shared_ptr<Operation> submit_point(Request request, bool waits);
  void make_points();
  void throw_complaint(int peer) DCOLL_REQUIRES(drive_mutex_);
  bool recv_briefly(Request& request, int& source, std::shared_ptr<Operation>& rest);
  bool points_are_free() DCOLL_REQUIRES(drive_mutex_);
  void advance_points(bool& moved) DCOLL_REQUIRES(drive_mutex_);
  void watch_points(Clock::time_point now) DCOLL_REQUIRES(drive_mutex_);
  std::vector<int> sources_of(const Request& request) const;
  // Whether a driver has anything to do.
  bool has_work() const {
    return pending_.load() || points_busy_.load() || (members_.transport->connecting() && !failed_.load());
  }
  std::string wait_text(const Operation& operation, double seconds, const std::vector<int>& waited_for) const
      DCOLL_REQUIRES(drive_mutex_);
  std::string timeout_text(const Operation& operation, double seconds, const std::vector<int>& waited_for) const
      DCOLL_REQUIRES(drive_mutex_);

  const ForkGuard fork_;
  Members members_;
  Settings settings_;
  Log log_;
  double spin_s_;
  std::shared_ptr<Timeline> timeline_;
  int number_;                                       // in the timeline
  const std::atomic<uint32_t>* const failure_flag_;  // Transport::failure_flag
  const std::string out_of_memory_;                  // what to tell the others when there is no memory for more
  const std::shared_ptr<Scratch> scratch_ = std::make_shared<Scratch>();
  Mutex lanes_mutex_;
  std::map<int, std::shared_ptr<StagingLane>> lanes_ DCOLL_GUARDED_BY(lanes_mutex_);  // of the devices used so far

  Mutex drive_mutex_;  // held while polling
  Fabric fabric_ DCOLL_GUARDED_BY(drive_mutex_);
  Queue queue_ DCOLL_GUARDED_BY(drive_mutex_);                           // the front one is running
  std::unique_ptr<NamedLane> names_ DCOLL_GUARDED_BY(drive_mutex_);      // made when a name is first used
  std::unique_ptr<PointToPoint> points_ DCOLL_GUARDED_BY(drive_mutex_);  // made with the first message
  Queue point_queue_ DCOLL_GUARDED_BY(drive_mutex_);                     // what is on its way there
  Queue named_queue_ DCOLL_GUARDED_BY(drive_mutex_);  // in the agreed order; the front one is running
  // Operations so far, of either order: the same on every rank.
  uint64_t started_ DCOLL_GUARDED_BY(drive_mutex_) = 0, named_started_ DCOLL_GUARDED_BY(drive_mutex_) = 0;
  LastOperation last_ DCOLL_GUARDED_BY(drive_mutex_);  // of those
  // Failed, with what they had of their own: a list.
  std::shared_ptr<Operation> abandoned_ DCOLL_GUARDED_BY(drive_mutex_);
  bool let_go_ DCOLL_GUARDED_BY(drive_mutex_) = true;  // after a failure: the transport needs no operation's memory
  Clock::time_point last_peer_check_ DCOLL_GUARDED_BY(drive_mutex_);
  // When the others were last told that this rank waits in vain.
  Clock::time_point stall_told_ DCOLL_GUARDED_BY(drive_mutex_);

  mutable Mutex inbox_mutex_;  // never held while polling, so submitting does not wait
  Queue inbox_ DCOLL_GUARDED_BY(inbox_mutex_);
  std::unordered_set<uint64_t> names_in_flight_ DCOLL_GUARDED_BY(inbox_mutex_);  // NamedLane::id_of
  uint64_t last_name_ DCOLL_GUARDED_BY(inbox_mutex_) = 0;  // the one submitted last, as in names_in_flight_
  std::exception_ptr failure_;                             // written once, before failed_, and read after it
  std::string failure_text_ DCOLL_GUARDED_BY(inbox_mutex_);
  std::atomic<bool> closing_{false};
  std::atomic<bool> failed_{false};
  std::atomic<int> waiters_{0};  // threads inside wait()/run(): the background thread stands back
  // Peers that wait in vain wake the driver: something is pending and nobody waits. See hand_over().
  std::atomic<bool> alert_{false};
  Mutex alert_mutex_;                    // held while alert_ and the transport's change together
  std::atomic<bool> peers_wake_{false};  // as alert() said
  std::atomic<bool> turn_wanted_{false};
  // The driver's, from when it takes it until somebody waits. Otherwise a driver woken in the middle of things would
  // take the next operation from the thread that is about to wait for it, and sleep on it, again and again.
  std::atomic<bool> drivers_turn_{false};
  bool driver_is_idle_ = false;  // its last look of this turn was in vain; the driver's own
  std::atomic<bool> pending_{false};
  std::atomic<bool> uses_names_{false};
  std::atomic<bool> uses_points_{false};
  uint64_t points_started_ DCOLL_GUARDED_BY(inbox_mutex_) = 0;  // submitted so far
  std::atomic<bool> points_busy_{false};  // PointToPoint::busy(): apart, as it keeps no collective from its fast path
  // Since last_name_ was submitted this rank has neither waited nor begun anything else. Its name is not free then,
  // even if the others were so quick that it is done: whether a name may be used twice must not depend on who comes
  // first.
  std::atomic<bool> last_name_taken_{false};
};

// What follows once peers have this rank's part: whatever keeps it from taking theirs fails the communicator, or the
// next call would meet what is left of this one.
template <typename Rest>
auto Communicator::entered(Rest&& rest) {
  try {
    return rest();
  } catch (...) {
    fail_with(std::current_exception(), /*tell_peers=*/true);
    throw;
  }
}

// Looks again and again, not for longer than the collective takes and some 10 us of waiting for a peer. True once
// `poll` is.
template <typename Poll>
bool Communicator::look_briefly(Poll&& poll) const {
  for (int in_vain = 0; in_vain < polls_on_the_spot();) {
    bool moved = false;
    if (poll(moved)) return true;
    if (moved) {
      in_vain = 0;
    } else {
      ++in_vain;
      pause_between_looks();
    }
  }
  return false;
}

}  // namespace dcoll
