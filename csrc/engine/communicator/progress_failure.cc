// What happens once a communicator has failed. What has to happen then needs no memory, which may be what is missing.
#include <cstdio>
#include <new>
#include <utility>

#include "base/error.h"
#include "engine/communicator/progress.h"
#include "engine/watch/failure.h"

namespace dcoll {
namespace {

// What a failed rank gives messages under way to be done, or cancelled, before the caller has its memory back.
constexpr auto kLetGo = std::chrono::milliseconds(200);

// Never freed: a transport may still need memory of theirs. Takes no memory itself.
void keep_for_good(std::shared_ptr<Operation> abandoned) {
  static Mutex mutex;
  static union Kept {
    std::shared_ptr<Operation> first;
    Kept() : first() {}
    ~Kept() {}
  } kept;
  const MutexLock lock(mutex);
  Operation* last = abandoned.get();
  while (last->next_abandoned != nullptr) last = last->next_abandoned.get();
  last->next_abandoned = std::move(kept.first);
  kept.first = std::move(abandoned);
}

}  // namespace

Progress::~Progress() {
  if (!let_go_ && abandoned_ != nullptr) keep_for_good(std::move(abandoned_));
  while (abandoned_ != nullptr) abandoned_ = std::exchange(abandoned_->next_abandoned, nullptr);  // one by one
}

void Progress::fail_with(std::exception_ptr error, bool tell_peers) noexcept {
  {
    const MutexLock lock(inbox_mutex_);
    if (failed_.load()) return;
    failure_ = error;
    try {
      failure_text_ = failure_text(error);
    } catch (const std::bad_alloc&) {
      failure_text_ = "out of memory";  // no longer than a string is without allocating
    }
    failed_.store(true, std::memory_order_release);
  }
  if (tell_peers && setup_.members.size > 1) tell_of_failure();
  for (const Fabric* one : {&fabric, under_way.names != nullptr ? &under_way.names->fabric() : nullptr}) {
    if (one != nullptr && one->device_memory != nullptr) one->device_memory->keep_blocks();
    if (one != nullptr && one->nccl != nullptr && one->nccl->comm != nullptr) one->nccl->comm->abort();
  }
  try {
    setup_.log(LogLevel::kDebug, "failed: " + failure());
    // Before anybody has their memory back.
    let_go_ = setup_.transport().let_go(kLetGo);
  } catch (const std::exception&) {
    let_go_ = false;
  }
  if (under_way.points != nullptr) let_go_ &= under_way.points->let_go(kLetGo);
  while (!under_way.ordered.empty()) finish(under_way.ordered.front(), failure_);
  while (!under_way.named.empty()) finish(under_way.named.front(), failure_);
  if (under_way.names != nullptr) {
    for (const auto& [id, operation] : under_way.names->abandon()) finish(operation, failure_);
  }
  if (under_way.points != nullptr) under_way.points->abandon(failure_);
  for (OperationQueue& messages = under_way.messages; !messages.empty(); messages.pop_front()) {
    if (!messages.front()->done.load()) finish(messages.front(), failure_);
  }
  points_busy_.store(false);
  end_inbox();
}

void Progress::tell_of_failure() noexcept {
  try {
    std::string text;
    try {
      text = encode_failure(failure_, setup_.job_rank());
    } catch (const std::bad_alloc&) {
    }
    setup_.transport().post_failure(text.empty() ? out_of_memory_ : text);
    setup_.transport().progress();
  } catch (const std::exception& e) {
    std::fprintf(stderr, "[dcoll warning rank %d] could not tell the other ranks of a failure: %s\n", setup_.job_rank(),
                 e.what());
  }
}

std::string Progress::failure() const {
  const MutexLock lock(inbox_mutex_);
  return failure_text_;
}

// The other ranks gave up on an operation that this rank has not begun: it must not finish it alone, with memory that
// they have taken back. None of them has finished it, for every collective begins by meeting all ranks.
bool Progress::given_up() {
  if (setup_.members.size == 1 || (setup_.failure_flag != nullptr && !heard_of_failure())) return false;
  return !setup_.transport().poll_failure().empty();
}

// After a failure: what was submitted meanwhile ends as what is queued does.
void Progress::end_inbox() {
  while (true) {
    std::shared_ptr<Operation> operation;
    {
      const MutexLock lock(inbox_mutex_);
      if (inbox_.empty()) return pending_.store(!under_way.ordered.empty() || !under_way.names_idle());
      operation = std::move(inbox_.front());
      inbox_.pop_front();
    }
    if (!operation->done.load()) finish(std::move(operation), failure_);
  }
}

void Progress::abandon_rest() {
  if (failed_.load() || !(uses_names_ || uses_points_)) return;
  const auto named = named_in_flight();
  std::string what = named.empty() ? "" : named.front()->request.describe();
  if (what.empty() && under_way.points != nullptr) {
    under_way.points->for_each([&](const Operation& operation) { what = operation.request.describe(); });
  }
  if (what.empty()) return;
  const std::string why = named.empty() ? "the other rank had done its part." : "every rank had submitted it.";
  const std::string text = what + " was given up: dcoll.shutdown() came before " + why;
  fail_with(std::make_exception_ptr(Error(text)), /*tell_peers=*/false);
  if (!named.empty()) return;
  // A message that nobody took is its own failure, not the job's: programs end so with MPI and with Gloo.
  setup_.log(LogLevel::kWarning, text);
  const MutexLock lock(inbox_mutex_);
  failure_text_.clear();
}

}  // namespace dcoll
