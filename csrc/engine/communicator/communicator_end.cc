// How a communicator ends: together with the other ranks', or not at all, in a process that this rank forked.
#include "base/error.h"
#include "engine/communicator/communicator.h"

namespace dcoll {
namespace {

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

std::shared_ptr<Communicator> Communicator::make(Members members, const Settings& settings) {
  const auto destroy = [](Communicator* communicator) {
    if (!communicator->in_forked_child()) delete communicator;
  };
  return {new Communicator(std::move(members), settings), destroy};
}

void Communicator::throw_forked() const {
  throw Error("This process was forked from rank " + std::to_string(members_.job_rank(members_.rank)) +
              " after dcoll.init(), and is none of the job's ranks: it can neither take part in collectives nor have "
              "mapped memory. Leave them to the process that called dcoll.init(); a data loader's worker should only "
              "prepare data.");
}

Communicator::~Communicator() {
  stop_listening();
  members_.driver->detach(*this);
  if (!let_go_ && abandoned_ != nullptr) keep_for_good(std::move(abandoned_));
  while (abandoned_ != nullptr) abandoned_ = std::exchange(abandoned_->next_abandoned, nullptr);  // one by one
}

void Communicator::close() {
  if (fork_.in_child()) return;
  {
    const MutexLock lock(inbox_mutex_);
    if (closing_) return;
    closing_ = true;
  }
  try {
    finish_names();
    say_farewell();
  } catch (const Error& e) {
    log_(LogLevel::kWarning, std::string("at shutdown: ") + e.what());
  } catch (const std::exception&) {  // no memory: the others must not wait for this rank
    const MutexLock driving(drive_mutex_);
    fail_with(std::current_exception(), /*tell_peers=*/true);
  }
  abandon_rest();
  if (members_.job_ranks.empty() && members_.diagnosis != nullptr) members_.diagnosis->stop();
  members_.driver->detach(*this);
}

// After the farewell nobody submits anything any more: handles that are still waited for must not wait for ever.
void Communicator::abandon_rest() {
  if (failed_.load() || !(uses_names_ || uses_points_)) return;
  std::shared_ptr<Operation> left;
  if (uses_names_) {
    const auto named = named_in_flight();
    if (!named.empty()) left = named.front();
  }
  const MutexLock driving(drive_mutex_);
  std::string what = left != nullptr ? left->request.describe() : "";
  if (what.empty() && points_ != nullptr) {
    points_->for_each([&](const Operation& operation) { what = operation.request.describe(); });
  }
  if (what.empty()) return;
  const std::string why = left != nullptr ? "every rank had submitted it." : "the other rank had done its part.";
  fail_with(std::make_exception_ptr(Error(what + " was given up: dcoll.shutdown() came before " + why)),
            /*tell_peers=*/false);
}

// Waits until all ranks leave. One that leaves early, because of an error of its own, meets the others in whatever they
// called; they are told of the mismatch, which may well bring them here too, so it is tried again.
void Communicator::say_farewell() {
  constexpr int kTries = 3;
  for (int tried = 1; members_.size > 1 && !failed_.load(); ++tried) {
    const auto farewell = std::make_shared<Operation>(Request{.kind = Kind::kShutdown});
    {
      const MutexLock lock(inbox_mutex_);
      inbox_.push_back(farewell);
      pending_.store(true, std::memory_order_release);
    }
    try {
      return wait(*farewell);
    } catch (const MismatchError&) {
      if (tried == kTries) throw;
    }
  }
}

}  // namespace dcoll
