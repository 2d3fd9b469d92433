// An ordered set of ranks and the collectives between them. Many can exist at once; nothing here is global.
//
// Threads: any thread may submit and wait. Operations run one after the other in the order submitted, which must be the
// same on every rank. Whoever waits drives: a thread inside wait() polls the operations itself (spinning while its core
// is its own, yielding it between looks while other ranks need it), and the background thread stands back; while nobody
// waits, the background thread drives and sleeps on a futex whenever there is nothing to do, so that it takes no time
// from the thread that computes.
//
// Failure: the first failure is kept for good. It is sent to every peer (so all ranks fail with the same cause), every
// pending operation ends with it, and every later call throws it at once.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/log.h"
#include "base/settings.h"
#include "engine/collective.h"
#include "engine/operation.h"
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
  LinkConstants links;             // how the constants of the cost model are found
  // Ranks with equal numbers have mapped each other, in ascending order; empty where that is not known of all ranks.
  // With several numbers, collectives work on two levels, and every rank needs a window, if only its own.
  std::vector<int> memory_of_rank{};
  bool own_core = true;  // no other rank needs the core this one runs on, so it may spin while it waits
};

class Communicator {
 public:
  Communicator(Members members, const Settings& settings);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // kByWaiter: the caller is about to wait, so the background thread need not be told. It takes over all the same if
  // the wait ends early.
  enum class Start { kInBackground, kByWaiter };
  // Queues the operation and returns at once. `keep`, if given, lives as long as the operation needs memory. Throws
  // ArgumentError, or the failure of this communicator.
  std::shared_ptr<Operation> submit(Request request, Start start = Start::kInBackground,
                                    std::shared_ptr<Memory> keep = nullptr);
  // For a caller that is about to wait: finishes the collective on its thread, if the peers are there and nothing is
  // queued, and returns null (all-reduce, which allocates nothing then) or the operation, done. Otherwise as
  // submit(kByWaiter).
  std::shared_ptr<Operation> run_or_submit(const ReduceCall& call);
  std::shared_ptr<Operation> run_or_submit(Request request);
  // Waits until `operation` is done, then rethrows what it failed with. timeout_s < 0: no limit but the watchdog's.
  // When timeout_s passes first, TimeoutError is thrown and the operation goes on.
  void wait(Operation& operation, double timeout_s = -1);
  // The waiting alone: whether it is done.
  bool wait_for(Operation& operation, double timeout_s);

  std::shared_ptr<Memory> alloc(size_t bytes);
  void fail(const std::string& text);
  std::string failure() const;
  // Waits for what is queued, meets the other ranks (so that nobody leaves while another still needs it), stops.
  void close();

  int rank() const { return members_.rank; }
  int size() const { return members_.size; }
  int node() const { return members_.node_of_rank[members_.rank]; }
  int local_rank() const;
  int local_size() const;
  int num_nodes() const;
  const std::vector<int>& nodes() const { return members_.node_of_rank; }
  const std::vector<std::string>& transports() const { return members_.transport_of_rank; }
  const Settings& settings() const { return settings_; }
  // What the cost model works with now, and where the numbers are from.
  plan::Topology topology();
  std::string constants_source();

 private:
  enum class Spin { kAllowed, kNever };

  void connect_slots();
  void connect_levels();
  void check_open() const;
  void drive(const std::atomic<bool>& done, Spin spin, Clock::time_point deadline);
  void step(bool& moved);
  void take_inbox();
  bool advance_front(bool& moved);
  void finish(std::shared_ptr<Operation> operation, std::exception_ptr error);
  void watch(Clock::time_point now);
  void fail_with(std::exception_ptr error, bool tell_peers);
  void hand_over();
  bool may_run_on_the_spot() const;
  int polls_on_the_spot() const;
  void pause_between_looks() const;
  bool poll_briefly(NodeAllReduce& all_reduce);
  void go_on(const std::shared_ptr<Operation>& operation, Entry entry);
  bool finish_now(PullNow& pull) const;
  void say_farewell();
  void background();
  std::string stall_text(const Operation& operation, double seconds) const;

  Members members_;
  Settings settings_;
  Log log_;
  Fabric fabric_;
  double spin_s_;

  std::mutex drive_mutex_;                             // held while polling: guards fabric_ and queue_
  std::deque<std::shared_ptr<Operation>> queue_;       // the front one is running
  std::vector<std::shared_ptr<Operation>> abandoned_;  // failed while a transport may still read their memory
  Clock::time_point last_peer_check_;
  std::vector<int> missing_;  // the ranks waited for at that check

  mutable std::mutex inbox_mutex_;  // guards what follows; never held while polling, so submitting does not wait
  std::condition_variable inbox_filled_;
  std::deque<std::shared_ptr<Operation>> inbox_;
  std::exception_ptr failure_;
  std::string failure_text_;
  std::atomic<bool> closing_{false};
  std::atomic<bool> failed_{false};
  std::atomic<int> waiters_{0};  // threads inside wait()/run(): the background thread stands back
  std::atomic<bool> pending_{false};
  std::atomic<bool> stop_{false};
  std::atomic<bool> has_thread_{false};
  std::thread thread_;  // started with the first operation nobody waits for
};

}  // namespace dcoll
