// An ordered set of ranks and the collectives between them. Many can exist at once; nothing here is global.
//
// Threads: any thread may submit and wait. Operations run one after the other in the order submitted, which must be the
// same on every rank; those submitted by name have a sequence of their own (named_lane.h).
//
//   Communicator   what programs call: makes operations of calls, begins and ends
//     OnTheSpot    calls that are finished on the caller's thread, without an operation
//     Turns        who drives, and when: whoever waits, or the background thread
//     Watchdog     deadlines, peers that ended, stalls
//     Progress     what is under way, under the drive lock; failures
//     Setup        who is in it, and what was configured: nothing of it changes
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "engine/communicator/on_the_spot.h"
#include "engine/core/scratch.h"

namespace dcoll {

class Communicator final {
 public:
  // A forked child never destroys its copy: threads, sockets and memory in it are the parent's.
  static std::shared_ptr<Communicator> make(Members members, const Settings& settings);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // kByWaiter: the caller is about to wait, so the background thread need not be told. It takes over all the same if
  // the wait ends early. kSoon: the caller may be about to wait. It enters a small operation on its own thread, and the
  // background thread is woken when a peer waits for more.
  enum class Start { kInBackground, kSoon, kByWaiter };
  // Queues the operation and returns at once. `keep`, if given, lives as long as the operation needs memory. Throws
  // ArgumentError, or the failure of this communicator. A message between two ranks (core/point.h) is kSoon; its
  // MismatchError, and nothing is begun: a small one, sent to this peer before, met a receive without room.
  std::shared_ptr<Operation> submit(Request request, Start start = Start::kInBackground,
                                    std::shared_ptr<Memory> keep = nullptr);
  // The same for an operation that meets those of equal kind and name on the other ranks, whatever the order in which
  // each of them submits. ArgumentError while one of that kind and name is under way here.
  std::shared_ptr<Operation> submit_by_name(Request request, std::shared_ptr<Memory> keep = nullptr);
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
  // How many of them this rank has begun: between them the same number on all ranks.
  size_t joins() const { return joins_.load(std::memory_order_relaxed); }
  // For a caller that is about to wait: finishes the collective on its thread, if the peers are there and nothing is
  // queued, and returns null (which allocates nothing) or, from a Request but for all-reduce, the operation, done.
  // Otherwise as submit(kByWaiter). Null of an all-gather or all-to-all: the result is as large as out_bytes.
  std::shared_ptr<Operation> run_or_submit(const Call& call);
  std::shared_ptr<Operation> run_or_submit(Request request);

  // Waits until `operation` is done, then rethrows what it failed with. timeout_s < 0: no limit but the watchdog's.
  // When timeout_s passes first, TimeoutError is thrown and the operation goes on.
  void wait(Operation& operation, double timeout_s = -1);
  // The waiting alone: whether it is done.
  bool wait_for(Operation& operation, double timeout_s, Spin spin = Spin::kAllowed);
  // Whether it is done. A caller that asks again and again brings it on.
  bool poll(Operation& operation);
  // What wait() says when timeout_s has passed, naming who is missing.
  std::string unfinished_text(const Operation& operation, double timeout_s) {
    return watchdog_.unfinished_text(operation, timeout_s);
  }

  // How long an operation may make no progress, in seconds: DCOLL_TIMEOUT until it is set, alike on all ranks.
  double timeout_s() const { return watchdog_.timeout_s(); }
  void set_timeout(double seconds) { watchdog_.set_timeout(seconds); }

  void fail(const std::string& text);
  std::string failure() const;
  // Waits for what is queued, meets the other ranks (so that nobody leaves while another still needs it), stops.
  void close();
  // The first half of close(), without the waiting: nothing can be called any more, and this rank's memory stays where
  // it is until left(). Then, or to wait after all, close(). Others may use the communicator meanwhile for what does
  // not need this rank, and are told where it does.
  void leave();
  bool left();
  // None of the job's ranks, but a process that one of them forked: every other call but those below throws Error.
  bool in_forked_child() const { return setup_.fork.in_child(); }
  void check_process() const { setup_.check_process(); }

  int rank() const { return setup_.members.rank; }
  int size() const { return setup_.members.size; }
  const Members& members() const { return setup_.members; }
  const Settings& settings() const { return setup_.settings; }
  Timeline& timeline() const { return setup_.timeline(); }
  const Log& log() const { return setup_.log; }
  // What of the fabric never changes, or has a lock of its own.
  const Fabric& as_made() const { return progress_.as_made(); }

  // Zeroed. Where ranks share memory, mapped by those of this node.
  std::shared_ptr<Memory> alloc(size_t bytes) { return setup_.alloc(bytes); }
  // Memory for the inside of a collective: as alloc(), but not zeroed, and used again when it is let go of.
  std::shared_ptr<Memory> scratch(size_t bytes) {
    return scratch_->take(bytes, [this](size_t size) { return alloc(size); });
  }
  // What the cost model works with now, where the numbers are from, and what coding takes, as far as calls have
  // asked whether it pays.
  struct Constants {
    plan::Topology topology;
    std::string source;
    Codings codings;
  };
  Constants constants();
  // How such a call goes, for people. mapped: its memory is, on all ranks.
  std::string describe_path(const Call& call, bool mapped);

 private:
  Communicator(Members members, const Settings& settings);
  std::shared_ptr<Operation> submit_message(Request request, std::shared_ptr<Memory> keep);
  void say_farewell();
  // `meet` them, whatever comes of it.
  template <typename Meet>
  void part(Meet&& meet);
  void stop();

  Setup setup_;
  Progress progress_{setup_};
  Watchdog watchdog_{setup_, progress_};
  Turns turns_{setup_, progress_, watchdog_};
  OnTheSpot on_the_spot_{setup_, progress_, turns_};
  const std::shared_ptr<Scratch> scratch_ = std::make_shared<Scratch>();
  std::shared_ptr<Operation> leaving_;
  std::atomic<size_t> joins_{0};
};

}  // namespace dcoll
