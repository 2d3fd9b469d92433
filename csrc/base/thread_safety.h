// Locks that say what they guard. clang checks it (make lint: tests/thread_safety.py); for g++ the annotations are
// empty. They are those of Hutchins, Ballman and Sutherland, "C/C++ Thread Safety Analysis" (SCAM 2014), sections 2
// and 3.
#pragma once

#include <condition_variable>
#include <mutex>

#ifdef __clang__
#define DCOLL_THREAD_ATTRIBUTE(...) __attribute__((__VA_ARGS__))
#else
#define DCOLL_THREAD_ATTRIBUTE(...)
#endif

// Of a variable: it is read and written only by who holds that lock.
#define DCOLL_GUARDED_BY(lock) DCOLL_THREAD_ATTRIBUTE(guarded_by(lock))
// Of a function: its caller holds that lock.
#define DCOLL_REQUIRES(lock) DCOLL_THREAD_ATTRIBUTE(requires_capability(lock))
// Of a function: its caller does not hold those locks, which it takes itself.
#define DCOLL_EXCLUDES(...) DCOLL_THREAD_ATTRIBUTE(locks_excluded(__VA_ARGS__))
// Of a function: it is not checked.
#define DCOLL_UNCHECKED DCOLL_THREAD_ATTRIBUTE(no_thread_safety_analysis)

namespace dcoll {

class DCOLL_THREAD_ATTRIBUTE(capability("mutex")) Mutex {
 public:
  void lock() DCOLL_THREAD_ATTRIBUTE(acquire_capability()) { mutex_.lock(); }
  bool try_lock() DCOLL_THREAD_ATTRIBUTE(try_acquire_capability(true)) { return mutex_.try_lock(); }
  void unlock() DCOLL_THREAD_ATTRIBUTE(release_capability()) { mutex_.unlock(); }
  // Tells clang what it cannot see: that the caller's caller holds it, which knows it by another name.
  void is_held() const DCOLL_THREAD_ATTRIBUTE(assert_capability(this)) {}

 private:
  friend class Condition;
  std::mutex mutex_;
};

// Holds a lock to the end of the block. libstdc++'s own guards have no annotations.
class DCOLL_THREAD_ATTRIBUTE(scoped_lockable) MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) DCOLL_THREAD_ATTRIBUTE(acquire_capability(mutex)) : mutex_(mutex) { mutex_.lock(); }
  // Of one that this thread has locked: by try_lock().
  MutexLock(Mutex& mutex, std::adopt_lock_t) DCOLL_REQUIRES(mutex) : mutex_(mutex) {}
  ~MutexLock() DCOLL_THREAD_ATTRIBUTE(release_capability()) { mutex_.unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
};

// Both waits may return without cause. They take no predicate: clang does not see that a lambda runs under the lock.
class Condition {
 public:
  void wait(Mutex& mutex) DCOLL_REQUIRES(mutex) {
    std::unique_lock lock(mutex.mutex_, std::adopt_lock);
    condition_.wait(lock);
    lock.release();
  }
  // false: `time` has come.
  template <class Time>
  bool wait_until(Mutex& mutex, const Time& time) DCOLL_REQUIRES(mutex) {
    std::unique_lock lock(mutex.mutex_, std::adopt_lock);
    const bool woken = condition_.wait_until(lock, time) == std::cv_status::no_timeout;
    lock.release();
    return woken;
  }
  void notify_one() { condition_.notify_one(); }
  void notify_all() { condition_.notify_all(); }

 private:
  std::condition_variable condition_;
};

}  // namespace dcoll
