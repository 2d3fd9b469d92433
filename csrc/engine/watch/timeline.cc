#include "engine/watch/timeline.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/clock.h"
#include "base/error.h"
#include "base/thread.h"
#include "engine/watch/timeline_json.h"

namespace dcoll {
namespace {

// The writer takes turns: so many records, then a pause. It shares its core with the rank, and must not take more than
// a tenth of it, even when all-reduces of 2 us follow one another; what is beyond that is dropped.
constexpr auto kPause = std::chrono::milliseconds(20);
constexpr int kRecordsPerTurn = 2048;

void copy_name(char (&to)[TimelineRecord::kNameBytes], std::string_view name) {
  to[name.copy(to, sizeof to - 1)] = '\0';
}

std::string path_of_rank(std::string path, int rank) {
  constexpr std::string_view kRank = "{rank}";
  const size_t at = path.find(kRank);
  if (at == std::string::npos) return rank == 0 ? path : "";
  return path.replace(at, kRank.size(), std::to_string(rank));
}

// The whole text at `offset`; true when it was written.
bool write_at(int file, const std::string& text, off_t offset) {
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t now = pwrite(file, text.data() + done, text.size() - done, offset + static_cast<off_t>(done));
    if (now < 0 && errno == EINTR) continue;
    if (now == 0) errno = ENOSPC;
    if (now <= 0) return false;
    done += static_cast<size_t>(now);
  }
  return true;
}

}  // namespace

RecordQueue::RecordQueue(size_t capacity) : cells_(new Cell[capacity]), mask_(capacity - 1) {
  for (size_t i = 0; i < capacity; ++i) cells_[i].turn.store(i, std::memory_order_relaxed);
}

bool RecordQueue::push(const TimelineRecord& record) {
  uint64_t at = tail_.load(std::memory_order_relaxed);
  while (true) {
    Cell& cell = cells_[at & mask_];
    const uint64_t turn = cell.turn.load(std::memory_order_acquire);
    if (turn == at) {
      if (!tail_.compare_exchange_weak(at, at + 1, std::memory_order_relaxed)) continue;
      cell.record = record;
      cell.turn.store(at + 1, std::memory_order_release);
      return true;
    }
    if (turn < at) return false;  // not read yet since the round before
    at = tail_.load(std::memory_order_relaxed);
  }
}

bool RecordQueue::pop(TimelineRecord& record) {
  Cell& cell = cells_[head_ & mask_];
  if (cell.turn.load(std::memory_order_acquire) != head_ + 1) return false;
  record = cell.record;
  cell.turn.store(head_ + mask_ + 1, std::memory_order_release);
  ++head_;
  return true;
}

void Timeline::start(const std::string& path, bool mark_cycles) {
  {
    const MutexLock lock(mutex_);
    if (path_ == path) return;
  }
  stop();
  const MutexLock lock(mutex_);
  path_ = path;
  const std::string own = path_of_rank(path, rank_);
  if (own.empty()) return;
  const int file = open(own.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (file < 0) {
    path_.clear();
    throw ArgumentError("The timeline '" + own + "' cannot be written: " + std::strerror(errno) +
                        ". Give the name of a file in a folder that exists and that this user may write to.");
  }
  if (queue_ == nullptr) queue_ = std::make_unique<RecordQueue>(kQueued);
  for (TimelineRecord left_behind; queue_->pop(left_behind);) {
  }
  dropped_ = 0;
  {
    const MutexLock stop_lock(stop_mutex_);
    stop_ = false;
  }
  marks_cycles_ = mark_cycles;
  try {
    writer_ = std::thread([this, file, own, begin_ns = now_ns()] { write_until_stopped(file, own, begin_ns); });
  } catch (const std::exception& e) {
    close(file);
    path_.clear();
    throw Error("The timeline '" + own + "' cannot be written: " + no_thread_text(e));
  }
  on_.store(true, std::memory_order_release);
}

void Timeline::stop() {
  if (fork_.in_child()) return;  // the file and the thread that writes it are the parent's
  const MutexLock lock(mutex_);
  path_.clear();
  on_ = false;
  marks_cycles_ = false;
  if (!writer_.joinable()) return;
  {
    const MutexLock stop_lock(stop_mutex_);
    stop_ = true;
    stopped_.notify_one();
  }
  writer_.join();
}

void Timeline::push(const TimelineRecord& record) {
  if (!on_.load(std::memory_order_acquire)) return;
  if (!queue_->push(record)) dropped_.fetch_add(1, std::memory_order_relaxed);
}

void Timeline::record(int communicator, const Operation& operation) {
  record(communicator, operation.request.call(), operation.phases, operation.error != nullptr);
}

void Timeline::record(int communicator, const Call& call, const Phases& phases, bool failed) {
  TimelineRecord record;
  record.kind = call.kind;
  record.dtype = call.dtype;
  record.op = call.op;
  record.failed = failed;
  record.communicator = communicator;
  record.bytes = call.bytes();
  record.end_ns = now_ns();
  record.phases = phases;
  copy_name(record.name, call.name);
  push(record);
}

void Timeline::span(std::string_view track, std::string_view name, int64_t begin_ns, int64_t end_ns, uint64_t bytes) {
  TimelineRecord record;
  record.what = TimelineRecord::What::kSpan;
  record.bytes = bytes;
  record.end_ns = end_ns;
  record.phases.enter_at(Phase::kPack, begin_ns);
  copy_name(record.name, name);
  copy_name(record.track, track);
  push(record);
}

void Timeline::mark(std::string_view name, int64_t at_ns) {
  TimelineRecord record;
  record.what = TimelineRecord::What::kMark;
  record.end_ns = at_ns;
  copy_name(record.name, name);
  push(record);
}

// The writer's thread. Each write overwrites the end of the one before, so the file is whole after every one.
void Timeline::write_until_stopped(int file, const std::string& path, int64_t begin_ns) {
  setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), 10);  // in vain, at worst
  TimelineJson json(rank_, node_, shift_ns_);
  off_t end = 0;
  bool stopping = false;
  bool writable = true;
  std::string text = "[\n" + json.head(begin_ns);
  while (true) {
    TimelineRecord record;
    for (int i = 0; (stopping || i < kRecordsPerTurn) && queue_->pop(record); ++i) json.append(text, record);
    if (stopping) json.append_end(text, now_ns(), dropped_.load(std::memory_order_relaxed));
    if (!text.empty() && writable) {
      writable = write_at(file, text + TimelineJson::kTail, end);
      if (!writable) {
        log_(LogLevel::kWarning, "The timeline '" + path + "' cannot be written any further (" + std::strerror(errno) +
                                     "), and ends here. Make room, or write it to another disk.");
      }
      end += static_cast<off_t>(text.size());
    }
    text.clear();
    if (stopping) break;
    const auto pause_ends = Clock::now() + kPause;
    const MutexLock lock(stop_mutex_);
    while (!stop_ && stopped_.wait_until(stop_mutex_, pause_ends)) {
    }
    stopping = stop_;
  }
  close(file);
}

}  // namespace dcoll
