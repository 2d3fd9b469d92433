#include "engine/communicator/progress.h"

#include <algorithm>
#include <new>
#include <utility>

#include "base/error.h"
#include "engine/collective/join.h"
#include "engine/collective/on_device.h"
#include "engine/core/staging.h"
#include "engine/watch/failure.h"

namespace dcoll {
namespace {

// Where the numbers of operations begin in the timeline that are not of the ordered sequence: by name; and messages
// between two ranks, of which no two ranks have the same.
constexpr uint64_t kFirstNamed = uint64_t{1} << 40, kFirstPoint = uint64_t{1} << 41;
// A rank that leaves, and waits so long for others, listens to those that wait for its messages.
constexpr double kListenSeconds = 0.3;

}  // namespace

bool UnderWay::awaits_copies() const {
  const auto awaits = [](const OperationQueue& queue) {
    return !queue.empty() && queue.front()->staging != nullptr && queue.front()->staging->waits();
  };
  return awaits(ordered) || awaits(named) || awaits(messages);
}

Progress::Progress(Setup& setup)
    : setup_(setup), out_of_memory_(encode_failure(std::make_exception_ptr(std::bad_alloc()), setup.job_rank())) {
  Members& members = setup.members;
  const Settings& settings = setup.settings;
  fabric.transport = members.transport.get();
  fabric.window = members.window;
  static_cast<FabricSettings&>(fabric) = {
      .rank = members.rank,
      .job_rank = setup.job_rank(),
      .size = members.size,
      .slice_bytes = std::min<size_t>(settings.slice_kb << 10, members.transport->max_message_bytes()),
      .algo = settings.algo,
      .compress_local = settings.compress_local,
      .by_host = settings.gpu_engine == "host",
      .log = &setup.log,
      .told_uncompressed = &setup.told_uncompressed};
  if (setup.may_use_nccl())
    fabric.nccl = std::make_unique<NcclState>(settings.gpu_engine == "nccl", settings.timeout_s);
  fabric.links = std::move(members.links);
  fabric.topology.num_ranks = static_cast<uint32_t>(members.size);
  fabric.topology.node_of_rank.assign(members.node_of_rank.begin(), members.node_of_rank.end());
  fabric.topology.shared_cores = members.shared_cores;
  if (members.window != nullptr && members.window->local_size() == members.size && members.size > 1)
    fabric.connect_slots();
  if (!members.memory_of_rank.empty()) connect_levels(setup);
}

// Some ranks share memory, on several nodes.
void Progress::connect_levels(Setup& setup) {
  Members& members = setup.members;
  NodeMap map = NodeMap::of(members.memory_of_rank, members.rank);
  if (!map.has_two_levels()) return;
  constexpr int64_t kLittleMb = 128;
  const bool little_memory = setup.settings.arena_mb > 0 && setup.settings.arena_mb < kLittleMb;
  fabric.hierarchy = std::make_unique<Hierarchy>(*members.transport, members.window, std::move(map), fabric.topology,
                                                 fabric.slice_bytes, little_memory);
}

void Progress::check_open() const {
  if (failed_.load(std::memory_order_acquire)) std::rethrow_exception(failure_);
  if (closing_) {
    throw Error(
        "This communicator was closed, by dcoll.shutdown() or, where it is a process set's, by remove_process_set(); "
        "no collective can be started on it.");
  }
}

bool Progress::submit(std::shared_ptr<Operation> operation, bool is_farewell) {
  operation->phases.enter(Phase::kQueue);
  const MutexLock lock(inbox_mutex_);
  if (!is_farewell) check_open();
  if (is_point(operation->request.kind)) {
    operation->phases.number = kFirstPoint + ++points_started_;
    operation->last_moved = Clock::now();
  }
  const bool had_work = pending_.load();
  inbox_.push_back(std::move(operation));
  pending_.store(true);
  return had_work;
}

bool Progress::close() {
  const MutexLock lock(inbox_mutex_);
  return !closing_.exchange(true);
}

// One look at everything. Throws nothing: failures end in the operations.
void Progress::step(bool& moved) noexcept {
  const bool listens = setup_.members.size > 1 && !failed_.load(std::memory_order_relaxed);
  try {
    take_inbox();
    // After a failure too: its notice may wait for a connection.
    if (listens || setup_.transport().connecting()) setup_.transport().progress();
  } catch (...) {
    fail_with(std::current_exception(), /*tell_peers=*/true);
  }
  const auto look = [this, &moved]() DCOLL_REQUIRES(drive_mutex) {
    bool advanced = false;
    while (!under_way.ordered.empty() && advance_front(under_way.ordered, fabric, advanced)) {
    }
    if (under_way.names != nullptr) advance_names(advanced);
    if (under_way.points != nullptr) advance_points(advanced);
    moved |= advanced;
    return advanced;
  };
  // A peer's failure counts once nothing moves any more: what that peer did before it failed is still completed. It may
  // have done that since it was looked, so one more look decides.
  if (look() || !listens) return;
  try {
    const std::string notice = setup_.transport().poll_failure();
    if (notice.empty()) return;
    setup_.transport().progress();
    if (!look()) fail_with(decode_failure(notice), /*tell_peers=*/false);
  } catch (...) {
    fail_with(std::current_exception(), /*tell_peers=*/true);
  }
}

void Progress::take_inbox() {
  if (!pending_.load(std::memory_order_acquire)) return;
  if (failed_.load()) return end_inbox();
  {
    const MutexLock lock(inbox_mutex_);
    for (; !inbox_.empty(); inbox_.pop_front()) {  // without memory, what was not taken is still there
      const std::shared_ptr<Operation>& operation = inbox_.front();
      if (operation->by_name) {
        under_way.names->submit(operation);
      } else {
        (is_point(operation->request.kind) ? under_way.messages : under_way.ordered).push_back(operation);
      }
    }
    if (!under_way.messages.empty()) points_busy_.store(true);
    pending_.store(!under_way.ordered.empty() || !under_way.names_idle());
  }
  submit_messages();
}

bool Progress::advance_front(OperationQueue& queue, Fabric& of, bool& moved) {
  const std::shared_ptr<Operation> operation = queue.front();
  const bool named = &queue == &under_way.named, joins = operation->request.kind == Kind::kJoin;
  if (failed_.load(std::memory_order_acquire)) {
    finish(operation, failure_);
    return true;
  }
  try {
    if (!operation->started) {
      if (given_up()) return false;  // step() ends it with all others, once nothing moves any more
      if (named && joins) count_named_round();
      operation->phases.number = named ? kFirstNamed + under_way.named_started++ : ++under_way.started;
      if (operation->staging != nullptr) {
        operation->task = on_device(of, *operation);
      } else {
        const bool all_rounds = joins && operation->request.count != kOneRound;
        operation->task = all_rounds ? run_join(of, *operation) : run_collective(of, *operation);
      }
      operation->started = true;
      operation->last_moved = Clock::now();
    }
    bool advanced = false;
    const bool ended = operation->task.advance(advanced);
    if (advanced) {
      moved = true;
      operation->last_moved = Clock::now();
    }
    if (!ended) {
      if (operation->request.kind == Kind::kShutdown) [[unlikely]] {
        if (operation->patient) only_leaves.store(queue.size() == 1);
        // Whoever waits for a message of this rank does not come to the farewell. Mostly all come: nobody is told then.
        if (seconds_between(operation->last_moved, Clock::now()) >= kListenSeconds && under_way.messages.empty()) {
          make_points_here();
          under_way.points->leave(fabric.out_of_step.reason_of(operation->phases.number));
        }
      }
      return false;
    }
    if (joins && !named) {
      under_way.names->join_ended();
      under_way.started += operation->rounds;  // what the others did meanwhile
    }
    finish(operation, nullptr);
  } catch (const MismatchError&) {
    if (!std::exchange(operation->counts_in_order, true)) --under_way.started;
    if (operation->patient) {  // some member still calls something, and was told; once more
      operation->task = {};
      operation->started = false;
    } else {
      finish(operation, std::current_exception());  // nothing was moved: the communicator is fine
    }
  } catch (...) {
    fail_with(std::current_exception(), /*tell_peers=*/true);
  }
  moved = true;
  return true;
}

void Progress::go_on(const std::shared_ptr<Operation>& operation, Entry entry) {
  operation->task = run_collective(fabric, *operation, entry);
  operation->started = true;
  operation->last_moved = Clock::now();
  under_way.ordered.push_back(operation);
  pending_.store(true, std::memory_order_release);
}

void Progress::finish(std::shared_ptr<Operation> operation, std::exception_ptr error) noexcept {
  if (failed_.load() && operation->started) {
    operation->next_abandoned = std::exchange(abandoned_, operation);
    operation->in_use = !let_go_ || (operation->staging != nullptr && operation->staging->is_shown());
  }
  for (OperationQueue* queue : {&under_way.ordered, &under_way.named}) {
    if (!queue->empty() && queue->front() == operation) queue->pop_front();
  }
  operation->error = error;
  if (error == nullptr && !is_point(operation->request.kind)) under_way.last.note(operation->request);
  if (operation->phases.on) [[unlikely]]
    setup_.timeline().record(setup_.number, *operation);
  if (operation->by_name) {
    const MutexLock lock(inbox_mutex_);
    names_in_flight_.erase(NamedLane::id_of(operation->request));
  }
  operation->done.store(true, std::memory_order_release);
  if (under_way.ordered.empty()) update_pending();
  if (waiters.load() > 1) setup_.transport().wake();
}

void Progress::update_pending() {
  const MutexLock lock(inbox_mutex_);
  pending_.store(!under_way.ordered.empty() || !inbox_.empty() || !under_way.names_idle());
}

void Progress::make_points() {
  if (uses_points_) return;
  const MutexLock lock(drive_mutex);
  make_points_here();
}

void Progress::make_points_here() {
  if (under_way.points == nullptr) {
    const Members& members = setup_.members;
    PointRanks ranks{.transport = members.transport.get(), .waiters = &waiters};
    ranks.job_ranks = members.all_job_ranks();
    const std::vector<int>& memory = members.memory_of_rank;
    const bool all_share = members.window != nullptr && members.window->local_size() == members.size;
    int local = 0;
    for (int rank = 0; rank < members.size; ++rank) {
      const bool shares = all_share || (!memory.empty() && memory[rank] == memory[members.rank]);
      ranks.in_window.push_back(shares ? local++ : -1);
    }
    if (members.window != nullptr && members.window->local_size() == local) ranks.window = members.window;
    under_way.points = std::make_unique<PointToPoint>(
        std::move(ranks), [this](auto operation, auto error)
                              DCOLL_REQUIRES(drive_mutex) { finish_message(std::move(operation), std::move(error)); });
  }
  uses_points_ = true;
}

void Progress::advance_points(bool& moved) {
  if (failed_.load(std::memory_order_acquire)) return;
  try {
    submit_messages();
    under_way.points->advance(moved);
    if (lost_) std::rethrow_exception(lost_);
  } catch (...) {
    fail_with(std::current_exception(), /*tell_peers=*/true);
  }
  points_busy_.store(under_way.points->busy() || !under_way.messages.empty());
}

// In the order in which the program has them sent: what waits for its copy holds up those behind it.
void Progress::submit_messages() {
  OperationQueue& messages = under_way.messages;
  for (; !messages.empty(); messages.pop_front()) {
    Staging* const staging = messages.front()->staging.get();
    if (staging != nullptr && !staging->arrived()) return;
    under_way.points->submit(messages.front());
  }
}

void Progress::finish_message(std::shared_ptr<Operation> operation, std::exception_ptr error) noexcept {
  if (error == nullptr && operation->staging != nullptr) {
    try {
      operation->staging->send_back(*operation);
    } catch (...) {
      error = lost_ = std::current_exception();
    }
  }
  finish(std::move(operation), std::move(error));
}

}  // namespace dcoll
