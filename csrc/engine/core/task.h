// A collective is a coroutine that never blocks: it awaits Pollables, and whoever drives the communicator polls the one
// it is suspended on. So a collective reads as its description (agree, then reduce-scatter, then all-gather), while
// many threads, deadlines and a failing peer are the driver's business alone.
#pragma once

#include <coroutine>
#include <exception>
#include <utility>
#include <vector>

namespace dcoll {

class Pollable {
 public:
  virtual ~Pollable() = default;
  // Does whatever can be done now without waiting. True when finished. `moved` is set when anything at all happened: a
  // wait that sees no movement for DCOLL_TIMEOUT is a failure.
  virtual bool poll(bool& moved) = 0;
  // The ranks whose action is missing; empty when it waits for none in particular.
  virtual void waiting_for(std::vector<int>& /*ranks*/) const {}
  // Whether those ranks may well be waiting themselves, for a rank that only they can name. Then they are given time to
  // say so first.
  virtual bool waits_indirectly() const { return false; }
};

class Nested;

class Task {
 public:
  struct promise_type {
    Pollable* awaited = nullptr;
    std::exception_ptr error;

    Task get_return_object() { return Task(std::coroutine_handle<promise_type>::from_promise(*this)); }
    std::suspend_always initial_suspend() noexcept { return {}; }
    std::suspend_always final_suspend() noexcept { return {}; }
    void return_void() {}
    void unhandled_exception() { error = std::current_exception(); }

    // co_await pollable: suspends until it is finished; not at all when it finishes at once. The Pollable must be a
    // local variable of the coroutine.
    template <typename Awaited>
    struct Awaiter {
      Awaited pollable;
      bool await_ready() {
        bool moved = false;
        return pollable.poll(moved);
      }
      void await_suspend(std::coroutine_handle<promise_type> self) { self.promise().awaited = &pollable; }
      void await_resume() {}
    };
    Awaiter<Pollable&> await_transform(Pollable& pollable) { return {pollable}; }

    // co_await task: a task within a collective, until that is finished.
    Awaiter<Nested> await_transform(Task task);
  };

  Task() = default;
  explicit Task(std::coroutine_handle<promise_type> handle) : handle_(handle) {}
  Task(Task&& other) noexcept : handle_(std::exchange(other.handle_, {})) {}
  Task& operator=(Task&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Task() {
    if (handle_) handle_.destroy();
  }

  // Polls once and resumes as far as possible. True when the collective is finished; rethrows what it failed with.
  bool advance(bool& moved) {
    while (!handle_.done()) {
      Pollable* awaited = handle_.promise().awaited;
      if (awaited != nullptr && !awaited->poll(moved)) return false;
      handle_.promise().awaited = nullptr;
      moved = true;
      handle_.resume();
    }
    if (handle_.promise().error) std::rethrow_exception(handle_.promise().error);
    return true;
  }

  std::vector<int> waiting_for() const {
    std::vector<int> ranks;
    if (handle_ && handle_.promise().awaited != nullptr) handle_.promise().awaited->waiting_for(ranks);
    return ranks;
  }
  bool waits_indirectly() const {
    return handle_ && handle_.promise().awaited != nullptr && handle_.promise().awaited->waits_indirectly();
  }

 private:
  std::coroutine_handle<promise_type> handle_;
};

// A task that somebody polls.
class Nested final : public Pollable {
 public:
  explicit Nested(Task task) : task_(std::move(task)) {}
  bool poll(bool& moved) override { return task_.advance(moved); }
  void waiting_for(std::vector<int>& ranks) const override {
    const std::vector<int> missing = task_.waiting_for();
    ranks.insert(ranks.end(), missing.begin(), missing.end());
  }
  bool waits_indirectly() const override { return task_.waits_indirectly(); }

 private:
  Task task_;
};

inline Task::promise_type::Awaiter<Nested> Task::promise_type::await_transform(Task task) {
  return {Nested(std::move(task))};
}

}  // namespace dcoll
