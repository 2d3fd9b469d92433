#include "engine/communicator/driver.h"

#include <algorithm>
#include <cstdio>
#include <exception>
#include <string>

#include "base/clock.h"
#include "base/thread.h"
#include "engine/communicator/cores.h"

namespace dcoll {
namespace {

using std::chrono::microseconds;

constexpr microseconds kIdleSleep = kMostBetweenLooks;  // after this, what is pending is looked at in any case
// Between looks at what the sleep does not hear of; the nap doubles while nothing moves.
constexpr microseconds kShortestNap{50}, kLongestNap{1000};

}  // namespace

void Driver::attach(Driven& driven) {
  const MutexLock thread_lock(thread_lock_);  // so the thread is not about to end
  const MutexLock lock(round_);
  entries_.push_back({&driven});
}

void Driver::detach(Driven& driven) {
  {
    const MutexLock lock(round_);  // so no round is under way
    std::erase_if(entries_, [&](const Entry& entry) { return entry.driven == &driven; });
  }
  {
    const MutexLock lock(sleep_);
    while (sleeps_on_ == &driven) {
      driven.sleeps_on().wake();
      woke_.wait(sleep_);
    }
  }
  const MutexLock thread_lock(thread_lock_);
  if (is_idle()) stop();
}

bool Driver::is_idle() {
  const MutexLock lock(round_);
  return entries_.empty();
}

bool Driver::make_thread() noexcept {
  const MutexLock lock(thread_lock_);
  if (has_thread_.load()) return true;
  try {
    thread_ = std::thread([this] { run(); });
    has_thread_.store(true, std::memory_order_release);
  } catch (const std::exception& e) {
    if (!told_of_no_thread_) {
      std::fprintf(stderr, "[dcoll warning rank %d] %s (%s). %s Operations go on only while this rank waits for one.\n",
                   log_.rank, kNoThread, e.what(), kMoreThreads);
    }
    told_of_no_thread_ = true;
  }
  return has_thread_.load();
}

void Driver::stop() {
  if (!has_thread_.load()) return;
  stop_.store(true);
  wake();
  thread_.join();
  stop_.store(false);
  has_thread_.store(false);
}

void Driver::wake() {
  const MutexLock lock(sleep_);
  wanted_ = true;
  if (sleeps_on_ != nullptr) sleeps_on_->sleeps_on().wake();
  woke_.notify_all();
}

// DCOLL_THREAD_AFFINITY. Where the system does not let it, the thread stays where it is.
void Driver::bind() const {
  if (core_ < 0) return;
  if (const std::string error = bind_this_thread(core_); !error.empty()) {
    log_(LogLevel::kWarning, "DCOLL_THREAD_AFFINITY: the background thread cannot be bound to core " +
                                 std::to_string(core_) + " (" + error + "); it may run on the cores of the rank");
  }
}

void Driver::run() {
  bind();
  bool in_any_case = false;
  auto all_looked_at = Clock::now();
  while (!stop_.load()) {
    const Rest next = round(in_any_case);
    in_any_case = next.limit.count() > 0 && rest(next) && Clock::now() - all_looked_at >= kIdleSleep;
    if (in_any_case) all_looked_at = Clock::now();
  }
}

// What is slept on: of those in turn one that no other sleep hears of, if there is one; else one that can be nudged.
Driven* Driver::place() const {
  Driven *in_turn = nullptr, *idle = nullptr;
  for (const Entry& entry : entries_) {
    const Transport& transport = entry.driven->sleeps_on();
    if (entry.in_turn && (in_turn == nullptr || !transport.wakes_by_doorbell())) in_turn = entry.driven;
    if (idle == nullptr || (idle->sleeps_on().doorbell() == nullptr && transport.doorbell() != nullptr))
      idle = entry.driven;
  }
  return in_turn != nullptr ? in_turn : idle;
}

// Whether a wait() of that one ends with whatever peers do towards the others in turn.
bool Driver::hears_of_all(Driven& place) const {
  for (const Entry& entry : entries_) {
    const Transport& transport = entry.driven->sleeps_on();
    const bool heard = transport.wakes_by_doorbell() && transport.doorbell() == place.sleeps_on().doorbell();
    if (entry.in_turn && entry.driven != &place && !heard) return false;
  }
  return true;
}

// Tickets are drawn before the looks: whatever happens after those ends the sleep at once.
Driver::Rest Driver::round(bool in_any_case) {
  {
    const MutexLock lock(sleep_);
    wanted_ = false;
  }
  const MutexLock lock(round_);
  Rest next{.on = place(), .limit = kIdleSleep};
  if (next.on == nullptr) return next;
  next.ticket = next.on->sleeps_on().prepare_wait();
  bool again = false, copying = false, any = false, patient = true;
  for (Entry& entry : entries_) {
    entry.in_turn = entry.driven->take_turn(entry.in_turn, in_any_case);
    if (!entry.in_turn) continue;
    any = true;
    const Driven::Look look = entry.driven->look();
    again |= look.again;
    copying |= look.copying;
    patient &= look.patient;
  }
  if (again) nap_ = {};
  if (again || place() != next.on) return {};
  next.dozes = !any;
  if (any) next.limit = copying ? Driven::kCopySleep : Driven::kLongestSleep;
  if (any && !patient && !hears_of_all(*next.on)) {
    nap_ = std::clamp(2 * nap_, kShortestNap, kLongestNap);
    next.limit = std::min(next.limit, nap_);
  }
  const MutexLock sleep_lock(sleep_);
  if (wanted_ || stop_.load()) return {};
  sleeps_on_ = next.on;  // before anybody can detach it
  return next;
}

bool Driver::rest(const Rest& rest) {
  const auto begin = Clock::now();
  if (rest.on == nullptr) {
    const MutexLock lock(sleep_);
    if (!wanted_ && !stop_.load()) woke_.wait_until(sleep_, begin + rest.limit);
    return false;
  }
  Transport& transport = rest.on->sleeps_on();
  if (rest.dozes) {
    transport.doze(rest.ticket, rest.limit);
  } else {
    transport.wait(rest.ticket, rest.limit);
  }
  const MutexLock lock(sleep_);
  sleeps_on_ = nullptr;
  woke_.notify_all();
  return Clock::now() - begin >= rest.limit;
}

}  // namespace dcoll
