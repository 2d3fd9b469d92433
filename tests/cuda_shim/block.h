// A grid of CUDA blocks on one CPU thread: the blocks one after the other, the threads of a block as fibers that switch
// only where they wait for each other. A fiber runs one thread after the other until one waits, so kernels without
// barriers never switch.
//
// What this finds: accesses out of bounds (every pointer is one of the host, under ASan), misaligned vectors (UBSan),
// barriers that not all threads reach, and, because the order of threads and of blocks turns around from launch to
// launch, results that depend on that order, as after a missing __syncthreads(). Shared memory is a static variable,
// which holds what the block before left there, so a forgotten initialisation shows at the second block.
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#define CUDA_SHIM_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define CUDA_SHIM_ASAN 1
#endif
#endif
#if defined(CUDA_SHIM_ASAN)
#include <sanitizer/common_interface_defs.h>
#else  // ASan keeps a record of each stack, and is told of every switch
inline void __sanitizer_start_switch_fiber(void**, const void*, size_t) {}
inline void __sanitizer_finish_switch_fiber(void*, const void**, size_t*) {}
#endif

namespace cuda_shim {

inline constexpr unsigned kWarp = 32;

[[noreturn]] inline void die(const char* what) {
  std::fprintf(stderr, "CUDA shim: %s\n", what);
  std::abort();
}

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

// Of so many threads, all of which come, again and again.
struct Barrier {
  unsigned expected = 0, arrived = 0, generation = 0;
};

struct Warp {
  Barrier barrier;
  uint64_t slots[2][kWarp];
};

// What a thread waits for while others run.
struct Thread {
  unsigned number = 0, collectives = 0;
  const Barrier* barrier = nullptr;
  unsigned generation = 0;
};

inline Index thread_index, block_index, block_dim, grid_dim;

class Block {
 public:
  // Calls body() as each of `threads` threads, which may call wait() and gather().
  void run(unsigned threads, bool descending, const std::function<void()>& body) {
    if (threads == 0 || threads % kWarp != 0 || threads > 1024) die("a block has 32, 64, ... 1024 threads");
    threads_ = threads;
    descending_ = descending;
    body_ = &body;
    started_ = ended_ = 0;
    all_ = {threads, 0, 0};
    warps_.assign(threads / kWarp, {{kWarp, 0, 0}, {}});
    while (ended_ < threads_) {
      bool moved = false;
      // Those that may go on; then a fiber that is free for threads that have not begun.
      for (size_t i = 0; i < fibers_.size(); ++i) {
        if (!fibers_[i]->ready()) continue;
        moved = true;
        resume(*fibers_[i]);
      }
      if (started_ < threads_) {
        moved = true;
        resume(free_fiber());
      }
      if (!moved) die("a barrier is not reached by all threads of its block or warp");
    }
  }

  void wait_for_all() { wait(all_); }

  // The values of all lanes of the warp, until its next collective but one.
  const uint64_t* gather(uint64_t value) {
    Thread& thread = current_->thread;
    Warp& warp = warps_[thread.number / kWarp];
    uint64_t* const slots = warp.slots[thread.collectives++ % 2];
    slots[thread.number % kWarp] = value;
    wait(warp.barrier);
    return slots;
  }
  unsigned lane() const { return current_->thread.number % kWarp; }

 private:
  struct Fiber {
    static constexpr size_t kStack = size_t{128} << 10;
    std::unique_ptr<char[]> stack = std::make_unique_for_overwrite<char[]>(kStack);
    ucontext_t context;
    void* record = nullptr;
    Thread thread;
    bool busy = false;

    // It stands at a barrier that the others have reached meanwhile.
    bool ready() const { return busy && thread.barrier->generation != thread.generation; }
  };

  void wait(Barrier& barrier) {
    Thread& thread = current_->thread;
    thread.barrier = &barrier;
    thread.generation = barrier.generation;
    if (++barrier.arrived == barrier.expected) {
      barrier.arrived = 0;
      ++barrier.generation;
      return;
    }
    leave(*current_);
  }

  Fiber& free_fiber() {
    for (const auto& fiber : fibers_) {
      if (!fiber->busy) return *fiber;
    }
    Fiber& fiber = *fibers_.emplace_back(std::make_unique<Fiber>());
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = Fiber::kStack;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, &Block::live, 0);
    return fiber;
  }

  void resume(Fiber& fiber) {
    current_ = &fiber;
    thread_index.x = fiber.thread.number;
    void* record = nullptr;
    __sanitizer_start_switch_fiber(&record, fiber.stack.get(), Fiber::kStack);
    swapcontext(&scheduler_, &fiber.context);
    __sanitizer_finish_switch_fiber(record, nullptr, nullptr);
  }

  void leave(Fiber& fiber) {
    __sanitizer_start_switch_fiber(&fiber.record, stack_, stack_bytes_);
    swapcontext(&fiber.context, &scheduler_);
    __sanitizer_finish_switch_fiber(fiber.record, &stack_, &stack_bytes_);
  }

  // What a fiber does all its life.
  static void live();
  void live_here() {
    __sanitizer_finish_switch_fiber(nullptr, &stack_, &stack_bytes_);
    Fiber& self = *current_;
    while (true) {
      while (started_ < threads_) {
        const unsigned next = started_++;
        self.thread = {descending_ ? threads_ - 1 - next : next};
        self.busy = true;
        thread_index.x = self.thread.number;
        (*body_)();
        self.busy = false;
        ++ended_;
      }
      leave(self);
    }
  }

  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Warp> warps_;
  Barrier all_;
  unsigned threads_ = 0, started_ = 0, ended_ = 0;
  bool descending_ = false;
  const std::function<void()>* body_ = nullptr;
  Fiber* current_ = nullptr;
  ucontext_t scheduler_;
  const void* stack_ = nullptr;
  size_t stack_bytes_ = 0;
};

inline Block& block() {
  static Block only;
  return only;
}
inline void Block::live() { block().live_here(); }

inline void run_grid(unsigned blocks, unsigned threads, const std::function<void()>& body) {
  static unsigned launches = 0;
  if (blocks == 0) die("a grid has at least one block");
  const unsigned launch = launches++;
  grid_dim = {blocks, 1, 1};
  block_dim = {threads, 1, 1};
  for (unsigned i = 0; i < blocks; ++i) {
    block_index.x = launch & 2 ? blocks - 1 - i : i;
    block().run(threads, (launch & 1) != 0, body);
  }
}

}  // namespace cuda_shim
