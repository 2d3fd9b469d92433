#include "engine/communicator/communicator.h"

#include <algorithm>
#include <new>
#include <utility>

#include "base/error.h"
#include "engine/collective/choose_path.h"
#include "engine/communicator/cores.h"
#include "engine/watch/failure.h"

namespace dcoll {
namespace {

constexpr auto kLongestSleep = std::chrono::milliseconds(20);
constexpr auto kCopySleep = std::chrono::microseconds(50);  // while a device copies: nobody wakes us for that
constexpr double kWatchSeconds = 0.02;  // between two looks at deadlines and peers, while a wait does not sleep yet
// Where the numbers of operations by name begin in the timeline: a sequence beside that of the ordered ones.
constexpr uint64_t kFirstNamed = uint64_t{1} << 40;

// How long a wait looks again and again before it sleeps. On a shared core it yields between looks: where ranks
// outnumber cores, a yield hands the core to a rank that is awake and costs one context switch, while sleeping costs
// two, a system call of the waker and, on a core gone idle, an interrupt (measured on 2 cores: a barrier of 4 takes 4
// us by yielding, 25 to 40 us by sleeping). But yielding keeps a core looking busy, so a rank that computes longer than
// this gets all of the core.
constexpr double kSpinUs = 2000;
constexpr double kYieldUs = 1000;
// Where looking takes the core from somebody who needs it: from the kernel that brings the message
// (Transport::sleeps_well), from another thread of this rank (Spin::kBriefly), from another program (Interruptions).
constexpr double kBriefSpinS = 50e-6;

// A rank that waits for so long wakes those peers that have left things to their background threads, and again whenever
// it has waited twice as long as then. They may just be about to wait themselves, which is cheaper than being woken.
constexpr double kNudgeSeconds = 30e-6;

}  // namespace

Communicator::Communicator(Members members, const Settings& settings)
    : members_(std::move(members)),
      settings_(settings),
      log_{log_level_from(settings.log_level), members_.job_rank(members_.rank), settings.log_hide_time},
      spin_s_((settings.spin_us >= 0 ? settings.spin_us
               : members_.own_core   ? kSpinUs
                                     : kYieldUs) *
              1e-6),
      timeline_(members_.timeline != nullptr ? members_.timeline
                                             : std::make_shared<Timeline>(members_.rank, node(), 0, log_)),
      number_(timeline_->add_communicator()),
      failure_flag_(members_.transport->failure_flag()),
      out_of_memory_(encode_failure(std::make_exception_ptr(std::bad_alloc()), members_.job_rank(members_.rank))) {
  members_.timeline = timeline_;
  if (members_.driver == nullptr) {
    const auto& cores = settings_.thread_affinity;
    members_.driver = std::make_shared<Driver>(cores.empty() ? -1 : cores.front(), log_);
  }
  fabric_.transport = members_.transport.get();
  fabric_.window = members_.window;
  fabric_.rank = members_.rank;
  fabric_.job_rank = members_.job_rank(members_.rank);
  fabric_.size = members_.size;
  fabric_.algo = settings.algo;
  fabric_.compress_local = settings.compress_local;
  fabric_.links = std::move(members_.links);
  fabric_.log = &log_;
  fabric_.slice_bytes = std::min<size_t>(settings.slice_kb << 10, members_.transport->max_message_bytes());
  fabric_.topology.num_ranks = static_cast<uint32_t>(members_.size);
  fabric_.topology.node_of_rank.assign(members_.node_of_rank.begin(), members_.node_of_rank.end());
  fabric_.topology.shared_cores = members_.shared_cores;
  if (members_.window != nullptr && members_.window->local_size() == members_.size && members_.size > 1)
    fabric_.connect_slots();
  if (!members_.memory_of_rank.empty()) connect_levels();
  listen_for_stalls();
  members_.driver->attach(*this);
}

// Some ranks share memory, on several nodes.
void Communicator::connect_levels() {
  NodeMap map = NodeMap::of(members_.memory_of_rank, members_.rank);
  if (!map.has_two_levels()) return;
  constexpr int64_t kLittleMb = 128;
  const bool little_memory = settings_.arena_mb > 0 && settings_.arena_mb < kLittleMb;
  fabric_.hierarchy = std::make_unique<Hierarchy>(*members_.transport, members_.window, std::move(map),
                                                  fabric_.topology, fabric_.slice_bytes, little_memory);
  // On shared cores a rank that waits sleeps at once, not for long (router.cc). It is woken on a core that is free;
  // ranks that yield make a core look as busy as one full of ranks that work, and those are not moved to it.
  if (settings_.spin_us < 0 && !members_.own_core) spin_s_ = 0;
}

void Communicator::check_open() const {
  if (failed_.load(std::memory_order_acquire)) std::rethrow_exception(failure_);
  if (closing_) {
    throw Error(
        "This communicator was closed, by dcoll.shutdown() or, where it is a process set's, by remove_process_set(); "
        "no collective can be started on it.");
  }
}

void Communicator::accept(Request& request) const {
  request.validate(members_.size);
  request.root_in_job = members_.job_rank(request.root);
}

std::shared_ptr<Operation> Communicator::submit(Request request, Start start, std::shared_ptr<Memory> keep) {
  check_process();
  accept(request);
  auto operation = std::make_shared<Operation>(std::move(request));
  operation->keep = std::move(keep);
  bool had_work = false;
  free_last_name();
  operation->phases.on = timeline_->on();
  operation->phases.enter(Phase::kQueue);
  stage(*operation);
  {
    const MutexLock lock(inbox_mutex_);
    check_open();
    had_work = pending_.load();
    inbox_.push_back(operation);
    pending_.store(true);
  }
  if (start == Start::kInBackground ||
      (start == Start::kSoon && (operation->staging != nullptr || !operation->request.call().is_small()))) {
    hand_over(Wake::kNow);
  } else if (start == Start::kSoon && !had_work) {
    begin_here();
  }  // what comes behind other operations begins when they end: somebody sees to them already
  return operation;
}

void Communicator::stage(Operation& operation) {
  const int number = operation.request.device;
  if (number == device::kHost) return;
  std::shared_ptr<StagingLane> lane;
  {
    const MutexLock lock(lanes_mutex_);
    std::shared_ptr<StagingLane>& known = lanes_[number];
    if (known == nullptr) {
      known = std::make_shared<StagingLane>(device::device_of(number), [this](size_t bytes) {
        try {
          return alloc(bytes);
        } catch (const Error&) {  // the arena is full: the engine copies once more
          return Memory::uninitialized(bytes);
        }
      });
    }
    lane = known;
  }
  operation.staging = std::make_shared<Staging>(std::move(lane), operation.request, members_.rank, members_.size,
                                                members_.job_rank(members_.rank));
}

bool Communicator::awaits_copies() const {
  const auto awaits = [](const Queue& queue) {
    return !queue.empty() && queue.front()->staging != nullptr && queue.front()->staging->waits();
  };
  return awaits(queue_) || awaits(named_queue_);
}

void Communicator::refuse(const std::string& why) {
  submit({.kind = Kind::kBarrier, .refusal = why.empty() ? "no reason was given" : why});
}

void Communicator::note_refused(const std::string& why) {
  if (fork_.in_child()) return;
  const MutexLock lock(drive_mutex_);
  take_inbox();
  const auto waiting = std::ranges::count(queue_, false, [](const auto& operation) { return operation->started; });
  fabric_.out_of_step.refuse(started_ + static_cast<uint64_t>(waiting) + 1, why);
}

void Communicator::wait(Operation& operation, double timeout_s) {
  if (!wait_for(operation, timeout_s)) throw TimeoutError(unfinished_text(operation, timeout_s));
  if (operation.error) std::rethrow_exception(operation.error);
}

bool Communicator::wait_for(Operation& operation, double timeout_s, Spin spin) {
  free_last_name();
  if (!operation.done.load(std::memory_order_acquire)) {
    check_process();
    struct Waiter {  // tells the background thread to stand back, and gives it its work back
      // It is not woken for that: should it be asleep in the middle of an operation, it sees it when that moves.
      explicit Waiter(Communicator& c) : comm(c) {
        comm.waiters_.fetch_add(1);
        comm.stand_back();
      }
      ~Waiter() {
        if (comm.waiters_.fetch_sub(1) == 1 && comm.has_work()) comm.begin_here();
      }
      Communicator& comm;
    } waiter(*this);
    const auto deadline =
        timeout_s < 0
            ? Clock::time_point::max()
            : Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_s));
    drive(operation.done, spin, deadline);
  }
  return operation.done.load(std::memory_order_acquire);
}

double Communicator::longest_spin_s(Spin spin) const {
  const bool brief = spin == Spin::kBriefly || (settings_.spin_us < 0 && members_.transport->sleeps_well());
  return brief ? std::min(spin_s_, kBriefSpinS) : spin_s_;
}

// Polls until `done` is set or the deadline passes; sleeps when spinning brought nothing.
void Communicator::drive(const std::atomic<bool>& done, Spin spin, Clock::time_point deadline) {
  double spin_s = longest_spin_s(spin);
  Clock::time_point idle_since = Clock::now();
  double next_nudge_s = 0, next_watch_s = 0;
  bool idle = false;
  while (!done.load(std::memory_order_acquire)) {
    const auto now = idle ? Clock::now() : idle_since;
    if (idle && now >= deadline) return;
    const double idle_s = idle ? seconds_between(idle_since, now) : 0;
    // Ranks that share a core yield it between looks, which counts as an interruption and takes nothing from anybody.
    if (idle_s >= kBriefSpinS && idle_s < spin_s && settings_.spin_us < 0 && members_.own_core &&
        Interruptions::are_frequent(now)) {
      spin_s = kBriefSpinS;
    }
    const bool sleepy = idle && idle_s >= spin_s;
    const bool watches = sleepy || idle_s >= next_watch_s;  // however long it looks before it sleeps
    if (idle && (sleepy || idle_s >= next_nudge_s)) {
      members_.transport->nudge();
      next_nudge_s = 2 * idle_s;
    }
    // The ticket is drawn before the last look, so whatever happens after that look ends the sleep at once.
    const uint32_t ticket = sleepy ? members_.transport->prepare_wait() : 0;
    bool moved = false, copying = false;
    {
      const MutexLock lock(drive_mutex_);
      step(moved);
      copying = sleepy && awaits_copies();
      if (idle && watches && !moved) {
        watch(now);
        next_watch_s = idle_s + kWatchSeconds;
      }
    }
    if (moved || done.load(std::memory_order_acquire)) {
      idle = false;
      continue;
    }
    if (!idle) {
      idle = true;
      idle_since = Clock::now();
      next_nudge_s = kNudgeSeconds;
      next_watch_s = kWatchSeconds;
    }
    if (!sleepy) {
      pause_between_looks();
      continue;
    }
    const auto limit = std::min<Clock::duration>(copying ? kCopySleep : kLongestSleep, deadline - now);
    members_.transport->wait(
        ticket, std::chrono::duration_cast<std::chrono::microseconds>(limit) + std::chrono::microseconds(1));
  }
}

// One look at everything. Throws nothing: failures end in the operations.
void Communicator::step(bool& moved) noexcept {
  const bool listens = members_.size > 1 && !failed_.load(std::memory_order_relaxed);
  try {
    take_inbox();
    if (listens) members_.transport->progress();
  } catch (...) {
    fail_with(std::current_exception(), /*tell_peers=*/true);
  }
  const auto look = [this, &moved]() DCOLL_REQUIRES(drive_mutex_) {
    bool advanced = false;
    while (!queue_.empty() && advance_front(queue_, fabric_, advanced)) {
    }
    if (names_ != nullptr) advance_names(advanced);
    if (points_ != nullptr) advance_points(advanced);
    moved |= advanced;
    return advanced;
  };
  // A peer's failure counts once nothing moves any more: what that peer did before it failed is still completed. It may
  // have done that since it was looked, so one more look decides.
  if (look() || !listens) return;
  try {
    const std::string notice = members_.transport->poll_failure();
    if (notice.empty()) return;
    members_.transport->progress();
    if (!look()) fail_with(decode_failure(notice), /*tell_peers=*/false);
  } catch (...) {
    fail_with(std::current_exception(), /*tell_peers=*/true);
  }
}

void Communicator::take_inbox() {
  if (!pending_.load(std::memory_order_acquire)) return;
  if (failed_.load()) return end_inbox();
  {
    const MutexLock lock(inbox_mutex_);
    for (; !inbox_.empty(); inbox_.pop_front()) {  // without memory, what was not taken is still there
      const std::shared_ptr<Operation>& operation = inbox_.front();
      if (operation->by_name) {
        names_->submit(operation);
      } else {
        (is_point(operation->request.kind) ? point_queue_ : queue_).push_back(operation);
      }
    }
    if (!point_queue_.empty()) points_busy_.store(true);
    pending_.store(!queue_.empty() || !names_idle());
  }
  for (; !point_queue_.empty(); point_queue_.pop_front()) points_->submit(point_queue_.front());
}

// Advances the running operation. True when it ended and the next one may start.
bool Communicator::advance_front(Queue& queue, Fabric& fabric, bool& moved) {
  const std::shared_ptr<Operation> operation = queue.front();
  if (failed_.load(std::memory_order_acquire)) {
    finish(operation, failure_);
    return true;
  }
  try {
    if (!operation->started) {
      if (given_up()) {
        fail_with(decode_failure(members_.transport->poll_failure()), /*tell_peers=*/false);
        return moved = true;
      }
      if (&queue == &named_queue_) {
        operation->phases.number = kFirstNamed + named_started_++;
        if (operation->request.kind == Kind::kJoin) count_named_round();
      } else {
        operation->phases.number = ++started_;
      }
      operation->task = start_collective(fabric, *operation);
      operation->started = true;
      operation->last_moved = Clock::now();
    }
    bool advanced = false;
    const bool ended = operation->task.advance(advanced);
    if (advanced) {
      moved = true;
      operation->last_moved = Clock::now();
    }
    if (!ended) return false;
    if (operation->request.kind == Kind::kJoin && &queue == &queue_) {
      names_->join_ended();
      started_ += operation->rounds;  // what the others did meanwhile
    }
    finish(operation, nullptr);
  } catch (const MismatchError&) {
    if (!operation->counts_in_order) --started_;
    finish(operation, std::current_exception());  // nothing was moved: the communicator is fine
  } catch (...) {
    fail_with(std::current_exception(), /*tell_peers=*/true);
  }
  moved = true;
  return true;
}

void Communicator::finish(std::shared_ptr<Operation> operation, std::exception_ptr error) noexcept {
  if (failed_.load() && operation->started) {
    operation->next_abandoned = std::exchange(abandoned_, operation);
    operation->in_use = !let_go_;
  }
  for (Queue* queue : {&queue_, &named_queue_}) {
    if (!queue->empty() && queue->front() == operation) queue->pop_front();
  }
  operation->error = error;
  if (error == nullptr && !is_point(operation->request.kind)) last_.note(operation->request);
  if (operation->phases.on) [[unlikely]]
    timeline_->record(number_, *operation);
  if (operation->by_name) forget_name(*operation);
  operation->done.store(true, std::memory_order_release);
  if (queue_.empty()) update_pending();
  if (waiters_.load() > 1) members_.transport->wake();
}

plan::Topology Communicator::topology() {
  check_process();
  const MutexLock lock(drive_mutex_);
  return fabric_.topology;
}

std::string Communicator::describe_path(const Call& call, bool mapped) {
  check_process();
  const MutexLock lock(drive_mutex_);
  const Path path = choose_path(fabric_, call);
  std::string text(path_text(path));
  if (path == Path::kNodeDirect) text += std::string(", form: ") + fabric_.all_reduce->form_of(call.bytes(), mapped);
  return text;
}

std::optional<plan::Coding> Communicator::coding(kernels::Codec codec) {
  check_process();
  const MutexLock lock(drive_mutex_);
  return fabric_.codings[static_cast<size_t>(codec)];
}

std::string Communicator::constants_source() {
  check_process();
  const MutexLock lock(drive_mutex_);
  return fabric_.links.source;
}

std::shared_ptr<Memory> Communicator::alloc(size_t bytes) {
  check_process();
  if (members_.window != nullptr && members_.window->local_size() > 1) return Memory::mapped(members_.window, bytes);
  return Memory::plain(bytes);
}

int Communicator::local_rank() const {
  const auto begin = members_.node_of_rank.begin();
  return static_cast<int>(std::count(begin, begin + members_.rank, node()));
}

int Communicator::local_size() const {
  return static_cast<int>(std::count(members_.node_of_rank.begin(), members_.node_of_rank.end(), node()));
}

int Communicator::num_nodes() const {
  return 1 + *std::max_element(members_.node_of_rank.begin(), members_.node_of_rank.end());
}

}  // namespace dcoll
