// Whatever fails on a rank, at every place where it can: the k-th call of its transport, the k-th allocation, the k-th
// thread, the k-th mapping of memory. Each call ends, on every rank, with the right result or with an error that names
// the rank.
#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <mutex>
#include <new>
#include <thread>

#include "base/error.h"
#include "faulty_transport.h"
#include "one_of_each.h"
#include "rank_threads.h"
#include "support/check.h"
#include "support/said.h"
#include "transport/mapped/local.h"
#include "transport/start_up.h"

using namespace dcoll;
using namespace dcoll::test;

namespace {

// What fails of the calls that this thread makes: the k-th, or it and all that follow.
struct Injection {
  int64_t calls = 0, at = 0;
  bool lasts = false;
  bool strikes() { return at > 0 && (++calls == at || (lasts && calls > at)); }
};
thread_local Injection allocations, threads, mappings, letters;
std::atomic<bool> struck{false};  // an allocation failed, a mapping, or a letter

void* take_memory(size_t bytes, size_t alignment) {
  if (allocations.strikes()) {
    struck = true;
    throw std::bad_alloc();
  }
  void* memory = alignment == 0 ? std::malloc(bytes)
                                : std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

// Not inline: where the compiler sees free() behind a `new` of ours, it warns of a mismatch.
[[gnu::noinline]] void give_back(void* memory) { std::free(memory); }

}  // namespace

void* operator new(size_t bytes) { return take_memory(bytes, 0); }
void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  try {
    return take_memory(bytes, 0);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void* operator new[](size_t bytes) { return take_memory(bytes, 0); }
void* operator new(size_t bytes, std::align_val_t alignment) {
  return take_memory(bytes, static_cast<size_t>(alignment));
}
void* operator new[](size_t bytes, std::align_val_t alignment) {
  return take_memory(bytes, static_cast<size_t>(alignment));
}
void operator delete(void* memory) noexcept { give_back(memory); }
void operator delete[](void* memory) noexcept { give_back(memory); }
void operator delete(void* memory, size_t) noexcept { give_back(memory); }
void operator delete[](void* memory, size_t) noexcept { give_back(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { give_back(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { give_back(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { give_back(memory); }
void operator delete[](void* memory, size_t, std::align_val_t) noexcept { give_back(memory); }

// Sanitizers have one of their own, which must be the one that is called: by this name, for where they are linked into
// the program there is no next one.
extern "C" [[gnu::weak]] int __interceptor_pthread_create(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*start)(void*), void* with) {
  if (threads.strikes()) return EAGAIN;
  using Create = decltype(&__interceptor_pthread_create);
  static const auto next = reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
  return (__interceptor_pthread_create != nullptr ? __interceptor_pthread_create : next)(thread, attributes, start,
                                                                                         with);
}

#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
extern "C" void* mmap(void* at, size_t bytes, int protection, int flags, int fd, off_t offset) {
  if (mappings.strikes()) {
    struck = true;
    errno = ENOMEM;
    return MAP_FAILED;
  }
  using Map = void* (*)(void*, size_t, int, int, int, off_t);
  static const auto map = reinterpret_cast<Map>(dlsym(RTLD_NEXT, "mmap"));
  return map(at, bytes, protection, flags, fd, offset);
}
#endif

namespace {

constexpr int64_t kStride = kSanitized ? 11 : 1;  // from another one in each run

Settings quiet_settings() {
  Settings settings = test_settings();
  settings.log_level = "fatal";
  settings.timeout_s = 60;
  settings.stall_check_disable = true;
  return settings;
}

// All steps on all ranks, those that survive included. arm() is called on the culprit's thread. A call that found no
// memory and left the communicator in order is made again.
void play(World& world, const std::function<void()>& arm) {
  on_threads(kRanks, [&](int rank) {
    Communicator& comm = *world[static_cast<size_t>(rank)];
    const bool culprit = rank == kCulprit;
    Script script(comm);
    bool again = false;
    if (culprit) arm();
    for (int number = 0; number < Script::kSteps; ++number) {
      try {
        script.step(number);
      } catch (const std::logic_error& e) {
        throw std::runtime_error("rank " + std::to_string(rank) + ", step " + std::to_string(number) + ": " + e.what());
      } catch (const std::exception& e) {
        const bool no_memory = culprit && struck && !std::exchange(again, true);
        allocations.at = 0;
        const std::string text = e.what(), failure = comm.failure();
        if (no_memory && failure.empty()) {
          --number;  // and once more
          continue;
        }
        if (failure.empty()) throw std::runtime_error("step " + std::to_string(number) + " failed alone: " + text);
        if (!culprit && text.find("rank 1") == std::string::npos) throw std::runtime_error("who? " + text);
        if (text.find("made no progress") != std::string::npos) throw std::runtime_error(text);
        CHECK_THROWS(comm.submit({.kind = Kind::kBarrier}), std::exception, "");
        break;
      }
    }
    allocations.at = 0;
    comm.close();
  });
}

void fail_allocations(const Settings& settings, bool lasts) {
  int64_t at = 1 + seed() % kStride;
  do {
    World world = connect_threads(kRanks, settings);
    struck = false;
    play(world, [&] { allocations = {.at = at, .lasts = lasts}; });
    at += kStride;
  } while (struck);
  CHECK(at > 20);
}

// The start of ranks that are threads: their exchanges, and messages.
class ThreadsJob final : public Bootstrap {
 public:
  struct Job {
    std::mutex mutex;
    std::vector<std::vector<Mailbox::Letter>> letters{kRanks};  // by whom they are for
    std::vector<Endpoint> endpoints = connect_local(kRanks, {.arena_bytes = size_t{16} << 20});
    Fault* fault = nullptr;  // of the culprit's transport
  };
  ThreadsJob(Job& job, int rank) : job_(job) {
    rank_ = rank;
    size_ = kRanks;
    meeting_ =
        std::make_unique<Meeting>(std::make_unique<Letterbox>(job, rank), rank, [] { return std::vector<int>(); });
  }

  const char* medium() const override { return "mpi"; }
  std::string library_version() const override { return "threads"; }
  std::string processor_name() const override { return ""; }
  bool takes_threads() const override { return true; }
  std::vector<int> node_of_ranks() override { return std::vector<int>(kRanks, 0); }
  std::unique_ptr<Bootstrap> subset(const std::vector<int>&) override { return nullptr; }
  std::unique_ptr<Transport> make_transport(size_t, int, const std::string&) override {
    std::unique_ptr<Transport> real = std::move(job_.endpoints[static_cast<size_t>(rank_)].transport);
    if (rank_ != kCulprit || job_.fault == nullptr) return real;
    return std::make_unique<FaultyTransport>(std::move(real), *job_.fault);
  }
  void finalize() override {}
  [[noreturn]] void abort(int exit_code) override { std::_Exit(exit_code); }

 private:
  struct Letterbox final : Mailbox {
    Letterbox(Job& job, int rank) : job(job), rank(rank) {}
    void send(int to, std::vector<std::byte> bytes) override {
      if (letters.strikes()) {
        struck = true;
        throw TransportError("a letter was lost");
      }
      const std::lock_guard lock(job.mutex);
      job.letters[static_cast<size_t>(to)].push_back({rank, std::move(bytes)});
    }
    std::vector<Letter> take(const std::vector<int>&) override {
      const std::lock_guard lock(job.mutex);
      return std::exchange(job.letters[static_cast<size_t>(rank)], {});
    }
    Job& job;
    const int rank;
  };
  Job& job_;
};

// A start-up, in which calls of `kind` fail on the culprit, and all steps where it succeeded. What ranks said of it.
std::vector<std::string> start_up_without(Injection& (*kind)(), int64_t at, bool lasts,
                                          Settings settings = quiet_settings()) {
  ThreadsJob::Job job;
  settings.log_level = "warning";
  World world(kRanks);
  std::vector<std::string> words(kRanks);
  const auto start = [&](int rank) {
    const auto own = static_cast<size_t>(rank);
    ThreadsJob mine(job, rank);
    if (rank == kCulprit) kind() = {.at = at, .lasts = lasts};
    try {
      world[own] = connect_world(&mine, settings);
      words[own] = world[own]->members().transport_of_rank[(own + 1) % kRanks];
    } catch (const Error& e) {
      words[own] = e.what();
    }
    kind() = {};
  };
  words.push_back(said_in([&] { on_threads(kRanks, start); }));
  if (world[0] != nullptr) {
    play(world, [] {});
    for (const auto& comm : world) CHECK_EQ(comm->failure(), std::string());
  }
  return words;
}

Injection& of_mappings() { return mappings; }
Injection& of_letters() { return letters; }

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

Settings on_nodes(Settings settings, std::vector<int> nodes = {0, 0, 1}) {
  settings.nodes = std::move(nodes);
  return settings;
}

Settings by_messages(Settings settings) {
  settings.transport = "mpi";
  return settings;
}

World by_messages_alone(Fault& fault) { return faulty_world(fault, quiet_settings().on_nodes(false)); }

// The culprit is the first of a node of two, and carries what they send to the other node.
World two_levels(Fault& fault, const char* calibrate) {
  ThreadsJob::Job job;
  job.fault = &fault;
  Settings settings = on_nodes(quiet_settings(), {0, 1, 1});
  settings.calibrate = calibrate;
  World world(kRanks);
  on_threads(kRanks, [&](int rank) {
    ThreadsJob mine(job, rank);
    world[static_cast<size_t>(rank)] = connect_world(&mine, settings);
  });
  return world;
}
World on_two_levels(Fault& fault) { return two_levels(fault, "off"); }
World calibrated(Fault& fault) { return two_levels(fault, "force"); }

// sparse: after the first ones only some, each 20 per cent further on than the one before.
void fail_calls_of_the_transport(World (*connect)(Fault&), bool refuses, bool sparse = false) {
  int64_t at = 1 + seed() % kStride;
  for (bool fired = true; fired; at += sparse ? std::max(kStride, at / 5) : kStride) {
    Fault fault;
    fault.refuses = refuses;
    {
      World world = connect(fault);
      play(world, [&] {
        fault.calls = 0;
        fault.at = at;
      });
    }
    fired = fault.fired();
  }
  CHECK(at > 50);
}

// What a rank says in its start-up, once all have met: that it is here was the first.
void fail_letters(const Settings& settings) {
  int64_t at = 1;
  do {
    struck = false;
    const std::vector<std::string> words = start_up_without(of_letters, ++at, false, settings);
    for (int rank = 0; rank < kRanks && struck; ++rank) {
      const std::string who = rank == kCulprit ? "" : "rank 1 left dcoll.init(): ";
      CHECK_EQ(words[static_cast<size_t>(rank)], who + "a letter was lost");
    }
  } while (struck);
  CHECK(at > 5);
}

}  // namespace

TEST(every_allocation_fails) { fail_allocations(quiet_settings(), false); }
TEST(every_allocation_fails_and_all_that_follow) { fail_allocations(quiet_settings(), true); }
TEST(every_allocation_fails_by_messages) { fail_allocations(by_messages(quiet_settings()), true); }
TEST(every_allocation_fails_on_two_levels) { fail_allocations(on_nodes(quiet_settings()), true); }

// Without a thread all goes on as with one: who waits drives.
TEST(no_thread_can_be_made) {
  for (int64_t at = 1; at <= 4; ++at) {
    threads = {.at = at, .lasts = at == 1};
    Settings settings = quiet_settings();
    settings.stall_check_disable = false;  // which needs a thread too
    World world = connect_threads(kRanks, settings);
    threads = {};
    play(world, [&] { threads = {.at = 1, .lasts = true}; });
    for (const auto& comm : world) CHECK_EQ(comm->failure(), std::string());
    threads = {.at = 1};
    CHECK_THROWS(world[0]->timeline().start("/dev/null", false), Error, "no further thread");
    CHECK(!world[0]->timeline().on());
    threads = {};
  }
}

// A later init() can try again.
TEST(no_thread_can_be_made_to_start_mpi) {
  threads = {.at = 1};
  CHECK_THROWS(Aside([] {}), Error, "dcoll.init(): The system gives this process no further thread");
  threads = {};
  const Aside again([] {});
  while (!again.done()) std::this_thread::yield();
}

// Its own region, the room for that of each peer, the region of each peer: without one of them ranks use messages.
TEST(every_mapping_fails) {
  if (kSanitized) return lacks("no sanitizer", "a sanitizer maps memory of its own");
  constexpr int64_t kMappings = 1 + 2 * (kRanks - 1);
  for (int64_t at = 1; at <= kMappings + 1; ++at) {
    struck = false;
    const std::vector<std::string> words = start_up_without(of_mappings, at, false);
    CHECK_EQ(struck.load(), at <= kMappings);
    for (int rank = 0; rank < kRanks; ++rank) {
      CHECK_EQ(words[static_cast<size_t>(rank)], std::string(struck ? "mpi" : "shm"));
    }
    const bool room = at > 1 && at <= kRanks;
    const std::string cause = room ? "no address space for the shared memory of all local ranks, " : "cannot map ";
    const std::string warning =
        "node 0: its ranks cannot share memory, using messages between them, which is slower. Cause: ";
    CHECK_EQ(contains(words.back(), warning + "rank 1: " + cause), struck.load());
    CHECK_EQ(contains(words.back(), "Cannot allocate memory; lower DCOLL_ARENA_MB, or raise the limit"), struck.load());
  }
}

// Not even one region of its own: that ends the start-up, on every rank.
TEST(every_mapping_fails_and_all_that_follow) {
  if (kSanitized) return lacks("no sanitizer", "a sanitizer maps memory of its own");
  for (int64_t at = 1; at <= 4; ++at) {
    const std::vector<std::string> words = start_up_without(of_mappings, at, true);
    for (int rank = 0; rank < kRanks; ++rank) {
      const std::string& text = words[static_cast<size_t>(rank)];
      CHECK_EQ(contains(text, "rank 1 left dcoll.init(): "), rank != kCulprit);
      CHECK(contains(text, "cannot map "));
      CHECK(contains(text, "(ulimit -v)"));
    }
  }
}

TEST(every_letter_of_the_start_up_fails) { fail_letters(quiet_settings()); }
TEST(every_letter_of_the_start_up_fails_by_messages) { fail_letters(by_messages(quiet_settings())); }
TEST(every_letter_of_the_start_up_fails_on_two_levels) { fail_letters(on_nodes(quiet_settings())); }

// A peer waits for that message, whatever its sender does next.
TEST(a_message_that_waits_for_its_connection_is_seen_to) {
  Fault fault;
  World world = faulty_world(fault, quiet_settings().on_nodes(false));
  fault.connecting = 1 << 30;
  on_threads(kRanks, [&](int rank) {
    Communicator& comm = *world[static_cast<size_t>(rank)];
    comm.wait(*comm.submit({.kind = Kind::kBarrier}));
  });
  fault.connecting = 5;
  const auto deadline = Clock::now() + std::chrono::seconds(20);
  while (fault.connecting > 0 && Clock::now() < deadline) std::this_thread::yield();
  CHECK_EQ(fault.connecting.load(), 0);
  on_threads(kRanks, [&](int rank) { world[static_cast<size_t>(rank)]->close(); });
}

TEST(every_call_of_a_transport_fails) { fail_calls_of_the_transport(by_messages_alone, false); }
TEST(every_call_of_a_transport_is_refused_once) { fail_calls_of_the_transport(by_messages_alone, true); }
TEST(every_call_of_a_transport_fails_on_two_levels) { fail_calls_of_the_transport(on_two_levels, false); }
TEST(every_call_of_a_transport_is_refused_once_on_two_levels) { fail_calls_of_the_transport(on_two_levels, true); }
// Calibration sends as much as it can in its time, the same again and again.
TEST(calls_of_a_transport_fail_in_calibration) { fail_calls_of_the_transport(calibrated, false, true); }
TEST(calls_of_a_transport_are_refused_once_in_calibration) { fail_calls_of_the_transport(calibrated, true, true); }

TEST_MAIN
