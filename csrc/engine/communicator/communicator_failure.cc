// What a communicator does once it has failed. What has to happen then needs no memory, which may be what is missing.
#include <cstdio>
#include <new>
#include <utility>

#include "base/error.h"
#include "engine/communicator/communicator.h"
#include "engine/watch/failure.h"

namespace dcoll {
namespace {

// What a failed rank gives messages under way to be done, or cancelled, before the caller has its memory back.
constexpr auto kLetGo = std::chrono::milliseconds(200);

}  // namespace

// The first failure wins; it ends everything that is queued, here and (told_peers) everywhere.
// Whatever has to happen does without memory, which may be what is missing.
void Communicator::fail_with(std::exception_ptr error, bool tell_peers) noexcept {
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
  if (tell_peers && members_.size > 1) tell_of_failure();
  try {
    log_(LogLevel::kDebug, "failed: " + failure());
    // Before anybody has their memory back.
    let_go_ = members_.transport->let_go(kLetGo);
  } catch (const std::exception&) {
    let_go_ = false;
  }
  while (!queue_.empty()) finish(queue_.front(), failure_);
  while (!named_queue_.empty()) finish(named_queue_.front(), failure_);
  if (names_ != nullptr) {
    for (const auto& [id, operation] : names_->abandon()) finish(operation, failure_);
  }
  if (points_ != nullptr) points_->abandon(failure_);
  for (; !point_queue_.empty(); point_queue_.pop_front()) {
    if (!point_queue_.front()->done.load()) finish(point_queue_.front(), failure_);
  }
  points_busy_.store(false);
  end_inbox();
}

void Communicator::tell_of_failure() noexcept {
  try {
    std::string text;
    try {
      text = encode_failure(failure_, members_.job_rank(members_.rank));
    } catch (const std::bad_alloc&) {
    }
    members_.transport->post_failure(text.empty() ? out_of_memory_ : text);
    members_.transport->progress();
  } catch (const std::exception& e) {
    std::fprintf(stderr, "[dcoll warning rank %d] could not tell the other ranks of a failure: %s\n",
                 members_.job_rank(members_.rank), e.what());
  }
}

void Communicator::fail(const std::string& text) {
  if (fork_.in_child()) return;
  const MutexLock lock(drive_mutex_);
  take_inbox();
  fail_with(std::make_exception_ptr(PeerError(text)), /*tell_peers=*/true);
  members_.transport->wake();
}

std::string Communicator::failure() const {
  if (fork_.in_child()) return "";
  const MutexLock lock(inbox_mutex_);
  return failure_text_;
}

// After a failure: what was submitted meanwhile ends as what is queued does.
void Communicator::end_inbox() {
  while (true) {
    std::shared_ptr<Operation> operation;
    {
      const MutexLock lock(inbox_mutex_);
      if (inbox_.empty()) return pending_.store(!queue_.empty() || !names_idle());
      operation = std::move(inbox_.front());
      inbox_.pop_front();
    }
    if (!operation->done.load()) finish(std::move(operation), failure_);
  }
}

}  // namespace dcoll
