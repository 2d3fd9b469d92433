// The emulated device: a stream is a thread with a queue, an event is two counters, and memory is a file of its own
// that other processes open.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/thread_safety.h"
#include "device/descriptors.h"
#include "device/device.h"
#include "kernels/cast.h"
#include "kernels/reduce.h"
#include "kernels/scale.h"

namespace dcoll::device {
namespace {

std::atomic<bool> shares_memory{true}, computes{true};
constexpr auto kLate = std::chrono::microseconds(200);  // between the poison and the copy
std::atomic<int> work_left{-1};                         // copies and kernels; negative: any number

class Queue {
 public:
  Queue() : thread_([this] { run(); }) {}
  ~Queue() {
    push(nullptr);
    thread_.join();
  }
  void push(std::function<void()> work) {
    const MutexLock lock(mutex_);
    work_.push_back(std::move(work));
    filled_.notify_one();
  }

 private:
  void run() {
    while (const auto work = next()) work();
  }
  std::function<void()> next() {
    const MutexLock lock(mutex_);
    while (work_.empty()) filled_.wait(mutex_);
    auto work = std::move(work_.front());
    work_.pop_front();
    return work;
  }
  Mutex mutex_;
  Condition filled_;
  std::deque<std::function<void()>> work_ DCOLL_GUARDED_BY(mutex_);
  std::thread thread_;
};

void put(Stream stream, std::function<void()> work) {
  if (stream == nullptr) return work();
  static_cast<Queue*>(stream)->push(std::move(work));
}

// As CUDA's errors do, this one shows in whatever is called next.
void check() {
  if (work_left.load() == 0) throw DeviceError("emulated:0: a copy or a kernel failed, as a test has asked for");
}

void check_kernels() {
  check();
  if (!computes.load()) throw DeviceError("emulated:0: it has no kernels, as a test has asked for");
}

struct Counter {
  void reach(uint64_t place) {
    const MutexLock lock(mutex);
    reached = std::max(reached, place);
    moved.notify_all();
  }
  bool has(uint64_t place) {
    const MutexLock lock(mutex);
    return reached >= place;
  }
  void wait_for(uint64_t place) {
    const MutexLock lock(mutex);
    while (reached < place) moved.wait(mutex);
  }
  Mutex mutex;
  Condition moved;
  uint64_t reached DCOLL_GUARDED_BY(mutex) = 0;
};

class EmulatedEvent final : public Event {
 public:
  void record(Stream stream) override {
    check();
    const uint64_t place = ++recorded_;
    put(stream, [counter = counter_, place] { counter->reach(place); });
  }
  void hold(Stream stream) override {
    check();
    put(stream, [counter = counter_, place = recorded_] { counter->wait_for(place); });
  }
  bool done() override {
    check();
    return counter_->has(recorded_);
  }
  void wait() override {
    counter_->wait_for(recorded_);
    check();
  }

 private:
  uint64_t recorded_ = 0;  // one thread at a time uses an event, as with CUDA's
  std::shared_ptr<Counter> counter_ = std::make_shared<Counter>();
};

void count_down() {
  int left = work_left.load();
  while (left > 0 && !work_left.compare_exchange_weak(left, left - 1)) {
  }
}

void copy_late(void* to, const void* from, size_t bytes) {
  count_down();
  if (bytes == 0 || to == from) return;
  std::memset(to, kPoison, bytes);
  std::this_thread::sleep_for(kLate);
  if (work_left.load() != 0) std::memcpy(to, from, bytes);
}

// A kernel: late, but its target is not poisoned, which may be what it reads.
void work_late(const std::function<void()>& kernel) {
  count_down();
  std::this_thread::sleep_for(kLate);
  if (work_left.load() != 0) kernel();
}

class Emulated final : public Device {
 public:
  std::string name() const override { return "emulated:0"; }
  std::string place() override {
    const MutexLock lock(mutex_);
    return place_.empty() ? "of process " + std::to_string(getpid()) : place_;  // each has one of its own
  }
  void set_place(const std::string& place) {
    const MutexLock lock(mutex_);
    place_ = place;
  }
  bool has_kernels() override { return computes.load(); }
  void as_current(const std::function<void()>& call) override { call(); }
  void* allocate(size_t bytes) override {
    const size_t length = std::max<size_t>(bytes, 1);
    Fd file(memfd_create("dcoll-emulated-device", MFD_CLOEXEC));
    if (!file || ftruncate(file.get(), static_cast<off_t>(length)) != 0) {
      throw failed("no room for " + std::to_string(bytes) + " bytes", errno);
    }
    void* const data = map(file, length);
    std::memset(data, kPoison, length);
    const MutexLock lock(mutex_);
    blocks_[data] = {std::move(file), length, std::nullopt};
    return data;
  }
  void free(void* data) noexcept override { unmap(data); }
  Handle handle_of(void* data) override {
    if (!shares_memory.load()) throw DeviceError(name() + ": shows no memory, as a test has asked for");
    const MutexLock lock(mutex_);
    Block& block = blocks_.at(data);
    if (!block.shown) block.shown = show_descriptor(name(), std::move(block.file), block.length);
    return *block.shown;
  }
  void* open(const Handle& handle) override {
    if (!shares_memory.load()) throw DeviceError(name() + ": opens no memory, as a test has asked for");
    const Taken taken = take_descriptor(name(), handle);
    void* const data = map(taken.descriptor, taken.bytes);
    const MutexLock lock(mutex_);
    blocks_[data] = {{}, taken.bytes, std::nullopt};
    return data;
  }
  void close(void* opened) noexcept override { unmap(opened); }
  bool pin(void*, size_t) override { return true; }
  void unpin(void*) noexcept override {}
  Stream make_stream() override {
    check();
    auto queue = std::make_unique<Queue>();
    const MutexLock lock(mutex_);
    queues_.push_back(queue.get());
    return queue.release();
  }
  void destroy_stream(Stream stream) noexcept override {
    {
      const MutexLock lock(mutex_);
      std::erase(queues_, stream);
    }
    delete static_cast<Queue*>(stream);
  }
  bool is_capturing(Stream) override {
    check();
    return false;
  }
  std::unique_ptr<Event> make_event() override {
    check();
    return std::make_unique<EmulatedEvent>();
  }
  void copy(void* to, const void* from, size_t bytes, Stream stream) override {
    check();
    put(stream, [=] { copy_late(to, from, bytes); });
  }
  void reduce_n_to_n(std::span<void* const> to, std::span<const void* const> from, size_t count, DType dtype,
                     ReduceOp op, double scale, Stream stream) override {
    check_kernels();
    put(stream, [outs = std::vector(to.begin(), to.end()), ins = std::vector(from.begin(), from.end()), count, dtype,
                 op, scale] { work_late([&] { kernels::reduce_n_to_n(outs, ins, count, dtype, op, scale); }); });
  }
  void scale(void* to, const void* from, size_t count, DType dtype, double factor, Stream stream) override {
    check_kernels();
    put(stream, [=] { work_late([&] { kernels::scale(to, from, count, dtype, factor); }); });
  }
  void cast(void* to, DType to_type, const void* from, DType from_type, size_t count, Stream stream) override {
    check_kernels();
    put(stream, [=] { work_late([&] { kernels::cast(to, to_type, from, from_type, count); }); });
  }
  void wait_for_all() override {
    std::vector<std::unique_ptr<Event>> ends;
    {
      const MutexLock lock(mutex_);
      for (Queue* queue : queues_) {
        ends.push_back(make_event());
        ends.back()->record(queue);
      }
    }
    for (const auto& end : ends) end->wait();
  }
  void drain(Stream stream) noexcept override {
    const auto drained = std::make_shared<Counter>();
    put(stream, [drained] { drained->reach(1); });
    drained->wait_for(1);
  }

 private:
  struct Block {
    Fd file;  // none: it is shown, or was opened
    size_t length;
    std::optional<Handle> shown;
  };
  DeviceError failed(const std::string& what, int error) const {
    return DeviceError(name() + ": " + what + ": " + std::generic_category().message(error));
  }
  void* map(const Fd& file, size_t length) const {
    void* const data = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
    if (data == MAP_FAILED) throw failed("mapping " + std::to_string(length) + " bytes", errno);
    return data;
  }
  void unmap(void* data) noexcept {
    const MutexLock lock(mutex_);
    const auto found = blocks_.find(data);
    if (found == blocks_.end()) return;
    munmap(data, found->second.length);
    if (found->second.shown) hide_descriptor(*found->second.shown);
    blocks_.erase(found);
  }

  Mutex mutex_;
  std::map<void*, Block> blocks_ DCOLL_GUARDED_BY(mutex_);  // its own, and what it opened
  std::vector<Queue*> queues_ DCOLL_GUARDED_BY(mutex_);
  std::string place_ DCOLL_GUARDED_BY(mutex_);
};

Emulated& emulated() {
  static auto* device = new Emulated;  // never destroyed: tensors are let go of late
  return *device;
}

}  // namespace

Device& emulated_device() { return emulated(); }

void place_emulated(const std::string& place) { emulated().set_place(place); }

void share_emulated(bool shares) { shares_memory.store(shares); }

void let_emulated_compute(bool does) { computes.store(does); }

void put_into_emulated(Stream stream, std::function<void()> kernel) {
  put(stream, [kernel = std::move(kernel)] { work_late(kernel); });
}

void fail_emulated_after(int pieces) { work_left.store(pieces); }

}  // namespace dcoll::device
