#include "transport/start_up.h"

#include <algorithm>
#include <exception>
#include <system_error>
#include <thread>

#include "base/error.h"
#include "base/number.h"
#include "base/thread.h"
#include "base/thread_safety.h"
#include "transport/presence.h"

namespace dcoll {
namespace {

constexpr double kLookSeconds = 0.1;
constexpr double kSpinSeconds = 1e-3;  // ranks that begin together need no longer for an exchange
constexpr std::chrono::microseconds kShortNap{50}, kLongNap{1000};

std::string seconds_text(double seconds) { return text_of(seconds, 10) + " s"; }

}  // namespace

std::string within_text(const StartUp& start) { return "within " + seconds_text(start.timeout_s) + " (DCOLL_TIMEOUT)"; }

StartWait::StartWait(const StartUp& start, double patience_s) : start_(start), limit_s_(start.timeout_s + patience_s) {}

bool StartWait::goes_on(const std::function<std::string()>& missing) {
  const auto now = Clock::now();
  waited_s_ += std::min(seconds_between(called_, now), std::chrono::duration<double>(kMostBetweenLooks).count());
  called_ = now;
  thorough_ = waited_s_ - looked_s_ >= kLookSeconds;
  if (thorough_) {
    looked_s_ = waited_s_;
    if (start_.look_around) start_.look_around();
    if (!reported_ && waited_s_ >= start_.report_s && start_.report) {
      reported_ = true;
      start_.report("dcoll.init() has waited " + seconds_text(start_.report_s) + ": " + missing() +
                    ". It fails after " + seconds_text(start_.timeout_s) + " (DCOLL_TIMEOUT).");
    }
  }
  if (waited_s_ >= limit_s_) return false;
  if (waited_s_ < kSpinSeconds) {
    std::this_thread::yield();
  } else {
    std::this_thread::sleep_for(waited_s_ < kLookSeconds ? kShortNap : kLongNap);
  }
  return true;
}

struct Aside::State {
  Mutex mutex;
  Condition changed;
  bool done DCOLL_GUARDED_BY(mutex) = false;
  std::exception_ptr error DCOLL_GUARDED_BY(mutex);

  // Throws what the call threw.
  bool ends_within(std::chrono::milliseconds time) DCOLL_EXCLUDES(mutex) {
    const auto until = std::chrono::steady_clock::now() + time;
    const MutexLock lock(mutex);
    while (!done && changed.wait_until(mutex, until)) {
    }
    if (done && error) std::rethrow_exception(error);
    return done;
  }
};

Aside::Aside(std::function<void()> call) : state_(std::make_shared<State>()) {
  auto run = [state = state_, call = std::move(call)]() mutable {
    std::exception_ptr error;
    try {
      call();
    } catch (...) {
      error = std::current_exception();
    }
    call = nullptr;  // what it owns goes before anybody hears of the end
    const MutexLock lock(state->mutex);
    state->error = error;
    state->done = true;
    state->changed.notify_all();
  };
  try {
    std::thread(std::move(run)).detach();
  } catch (const std::system_error& e) {
    throw Error("dcoll.init(): " + no_thread_text(e));
  }
}

bool Aside::done() const {
  const MutexLock lock(state_->mutex);
  return state_->done;
}

void Aside::wait(const StartUp& start, const std::function<std::string()>& missing,
                 const std::function<std::vector<int>()>& ended) const {
  StartWait wait(start);
  const auto look = [&] {
    if (const auto dead = ended(); !dead.empty()) throw PeerError("dcoll.init(): " + ended_text(dead));
  };
  if (!done()) look();  // whoever is here now is missed when it ends
  while (!state_->ends_within(std::chrono::milliseconds(100))) {
    look();
    if (!wait.goes_on(missing)) throw TimeoutError("dcoll.init(): " + missing() + ", " + within_text(start) + ".");
  }
}

}  // namespace dcoll
