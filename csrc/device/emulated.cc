// The emulated device: a stream is a thread with a queue, an event is two counters.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <thread>

#include "base/thread_safety.h"
#include "device/device.h"

namespace dcoll::device {
namespace {

constexpr auto kLate = std::chrono::microseconds(200);  // between the poison and the copy
std::atomic<int> copies_left{-1};                       // negative: any number

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
  if (copies_left.load() == 0) throw DeviceError("emulated:0: a copy failed, as a test has asked for");
}

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
  uint64_t recorded_ = 0;  // one thread at a time uses an event, as with CUDA's
  std::shared_ptr<Counter> counter_ = std::make_shared<Counter>();
};

void copy_late(void* to, const void* from, size_t bytes) {
  int left = copies_left.load();
  while (left > 0 && !copies_left.compare_exchange_weak(left, left - 1)) {
  }
  if (bytes == 0 || to == from) return;
  std::memset(to, kPoison, bytes);
  std::this_thread::sleep_for(kLate);
  if (copies_left.load() != 0) std::memcpy(to, from, bytes);
}

class Emulated final : public Device {
 public:
  std::string name() const override { return "emulated:0"; }
  void* allocate(size_t bytes) override {
    void* data = std::malloc(bytes == 0 ? 1 : bytes);
    if (data == nullptr) throw DeviceError(name() + ": no room for " + std::to_string(bytes) + " bytes");
    std::memset(data, kPoison, bytes);
    return data;
  }
  void free(void* data) noexcept override { std::free(data); }
  bool pin(void*, size_t) override { return true; }
  void unpin(void*) noexcept override {}
  Stream make_stream() override { return new Queue; }
  void destroy_stream(Stream stream) noexcept override { delete static_cast<Queue*>(stream); }
  std::unique_ptr<Event> make_event() override { return std::make_unique<EmulatedEvent>(); }
  void copy(void* to, const void* from, size_t bytes, Stream stream) override {
    check();
    put(stream, [=] { copy_late(to, from, bytes); });
  }
};

}  // namespace

Device& emulated_device() {
  static auto* device = new Emulated;  // never destroyed: tensors are let go of late
  return *device;
}

void fail_emulated_after(int copies) { copies_left.store(copies); }

}  // namespace dcoll::device
