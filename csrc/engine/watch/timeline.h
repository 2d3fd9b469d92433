// What the operations of this process spent their time on, as a Chrome trace that Perfetto opens: per operation a span
// with its phases inside, on the track of the operation's name, in the process of its rank.
//
// Switched off it costs a collective one relaxed load. Switched on, an operation notes the time as it enters a phase
// (timeline_record.h) and leaves one record when it is done, in a bounded queue that any thread may push to and a
// thread of low priority writes out. A full queue drops records, which are counted and told in the file; nobody waits.
//
// The file is valid JSON after every write, so it can be opened while the job runs and after it was killed.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>

#include "base/fork.h"
#include "base/log.h"
#include "base/thread_safety.h"
#include "engine/core/operation.h"
#include "engine/core/timeline_record.h"

namespace dcoll {

// A bounded queue of many producers and one consumer (D. Vyukov, "Bounded MPMC queue", 1024cores.net, 2010).
class RecordQueue {
 public:
  explicit RecordQueue(size_t capacity);    // a power of two
  bool push(const TimelineRecord& record);  // false: full
  bool pop(TimelineRecord& record);         // by one thread at a time; false: empty

 private:
  struct Cell {
    // Its position when free to write (stored by pop, release), its position + 1 when written (stored by push, release:
    // the record is visible to whoever acquires it).
    std::atomic<uint64_t> turn;
    TimelineRecord record;
  };
  std::unique_ptr<Cell[]> cells_;
  const uint64_t mask_;
  alignas(64) std::atomic<uint64_t> tail_{0};  // the next position to write; relaxed: `turn` orders the records
  alignas(64) uint64_t head_ = 0;              // the next position to read
};

// One per process and rank, shared by all its communicators.
class Timeline {
 public:
  // shift_ns is added to the monotonic clock, so that the clocks of different nodes show about the same time.
  // The log is told when the file cannot be written any further.
  Timeline(int rank, int node, int64_t shift_ns, const Log& log)
      : rank_(rank), node_(node), shift_ns_(shift_ns), log_(log) {}
  ~Timeline() { stop(); }
  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;

  // Relaxed: a collective that sees the change late is recorded late, which nobody can tell.
  bool on() const { return on_.load(std::memory_order_relaxed); }
  bool marks_cycles() const { return marks_cycles_.load(std::memory_order_relaxed); }

  // Begins the file `path`, ending the one before, if there is another. A path with {rank} is a file of every rank; of
  // any other rank 0 alone writes one. Throws ArgumentError when it cannot be written.
  void start(const std::string& path, bool mark_cycles) DCOLL_EXCLUDES(mutex_);
  // Writes what is still queued and closes the file. Does nothing when there is none.
  void stop() DCOLL_EXCLUDES(mutex_);

  // The number of a communicator of this process, in its records.
  int add_communicator() { return communicators_.fetch_add(1, std::memory_order_relaxed); }

  // An operation that is done. Any thread.
  void record(int communicator, const Operation& operation);
  void record(int communicator, const Call& call, const Phases& phases, bool failed = false);
  // Something else that took time, on a track of its own or on that of an operation of the same name.
  void span(std::string_view track, std::string_view name, int64_t begin_ns, int64_t end_ns, uint64_t bytes = 0);
  // A point in time, drawn across all tracks.
  void mark(std::string_view name, int64_t at_ns);

 private:
  void push(const TimelineRecord& record);
  void write_until_stopped(int file, const std::string& path, int64_t begin_ns);

  static constexpr size_t kQueued = 1 << 13;  // records, about 3 MiB

  const int rank_;
  const int node_;
  const int64_t shift_ns_;
  const Log log_;
  std::atomic<int> communicators_{0};  // relaxed: a counter
  std::atomic<bool> on_{false};        // release when queue_ is there, acquired by those who push
  std::atomic<bool> marks_cycles_{false};
  std::atomic<uint64_t> dropped_{0};  // relaxed: a counter, read when the file is closed

  ForkGuard fork_;
  Mutex mutex_;                                // held while starting and stopping
  std::string path_ DCOLL_GUARDED_BY(mutex_);  // of the file being written
  std::unique_ptr<RecordQueue> queue_;  // written under mutex_; once made it stays: a late producer may still push
  std::thread writer_ DCOLL_GUARDED_BY(mutex_);
  Mutex stop_mutex_;  // may be taken under mutex_
  Condition stopped_;
  bool stop_ DCOLL_GUARDED_BY(stop_mutex_) = false;
};

}  // namespace dcoll
