// Reading the memory of other processes: of one that lives, that died, that gave the memory up; and with a kernel that
// refuses it, where collectives go through slots.
#include "engine/node/peer_memory.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <thread>

#include "base/error.h"
#include "engine/node/pull.h"
#include "rank_threads.h"
#include "support/check.h"
#include "support/refused.h"
#include "support/said.h"
#include "transport/mapped/local.h"

using namespace dcoll;
using namespace dcoll::test;

namespace {

constexpr size_t kPage = 4096;

// Two pages of private memory; the first word introduces the process that has it.
struct Pages {
  Pages()
      : data(static_cast<std::byte*>(
            mmap(nullptr, 2 * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))) {
    CHECK(data != MAP_FAILED);
    word() = unlikely_word(data);
  }
  ~Pages() { munmap(data, 2 * kPage); }
  uint64_t& word() const { return *reinterpret_cast<uint64_t*>(data); }
  uint64_t address() const { return reinterpret_cast<uint64_t>(data); }
  std::byte* data;
};

// A copy of this process, which sleeps until it is killed.
class Child {
 public:
  explicit Child(const Pages& pages) : process_(fork()) {
    CHECK(process_ >= 0);
    if (process_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      for (;;) pause();
    }
    introduction = {process_, pages.address(), pages.word()};
  }
  ~Child() { kill_it(); }
  void kill_it() {
    if (process_ == 0) return;
    kill(process_, SIGKILL);
    waitpid(process_, nullptr, 0);
    process_ = 0;
  }
  Introduction introduction;

 private:
  pid_t process_;
};

// Blocks that are read in place where that is possible.
void gather_and_check(Communicator& comm, size_t bytes) {
  const auto mine = Memory::plain(bytes);
  std::memset(mine->data(), comm.rank() + 1, bytes);
  const auto operation =
      run(comm, {.kind = Kind::kAllGather, .in = mine->data(), .count = bytes, .row_elems = 1, .dtype = DType::kUInt8});
  std::memset(mine->data(), 99, bytes);
  const std::byte* at = operation->output->data();
  for (int rank = 0; rank < comm.size(); ++rank) {
    for (size_t i = 0; i < bytes; ++i) CHECK(*at++ == static_cast<std::byte>(rank + 1));
  }
}

// What is logged where each of n ranks gathers from all, twice.
std::string said_by_ranks(int n) {
  Settings settings = test_settings();
  settings.log_level = "info";
  return said_in([&] {
    run_ranks(n, settings, [](Communicator& comm) {
      for (const size_t bytes : {65'537, 300'007}) gather_and_check(comm, bytes);
    });
  });
}

// How often it is said which copy large tensors take: by the kernel, and through slots.
void check_said(const std::string& said, size_t by_kernel, size_t by_slots) {
  CHECK_EQ(times_in(said, "large tensors of peers are read by the kernel (process_vm_readv), in one copy"), by_kernel);
  CHECK_EQ(times_in(said, "all tensors of peers but mapped ones are read through slots, in two copies"), by_slots);
}

}  // namespace

TEST(memory_that_the_kernel_reads_for_nobody) {
  const Pages pages;
  CHECK(is_readable(pages.data, 2 * kPage));
  CHECK(is_readable(pages.data, 0));
  mprotect(pages.data + kPage, kPage, PROT_NONE);
  CHECK(!is_readable(pages.data, 2 * kPage));
  CHECK(is_readable(pages.data, kPage));
}

TEST(a_living_process_is_read) {
  Pages pages;
  pages.data[kPage + 5] = std::byte{42};
  const Child child(pages);
  pages.data[kPage + 5] = std::byte{0};  // the child has 42
  if (!can_read(child.introduction)) {
    return lacks("ptrace", "the kernel lets nobody read here");
  }
  std::byte got[10] = {};
  read_peer(child.introduction, 1, got, pages.address() + kPage, sizeof got);
  CHECK(got[5] == std::byte{42});
}

TEST(another_process_of_that_number_is_not_taken_for_it) {
  const Pages pages;
  Child child(pages);
  child.introduction.word += 1;
  CHECK(!can_read(child.introduction));
}

TEST(a_dead_process_is_named) {
  const Pages pages;
  Child child(pages);
  child.kill_it();
  CHECK(!can_read(child.introduction));
  std::byte got[10];
  CHECK_THROWS(read_peer(child.introduction, 3, got, pages.address(), sizeof got), PeerError,
               "rank 3 (process " + std::to_string(child.introduction.process) + ") has ended");
}

TEST(memory_that_was_given_up_half_way) {
  Pages pages;
  CHECK_EQ(munmap(pages.data + kPage, kPage), 0);  // the child inherits the hole
  const Child child(pages);
  if (!can_read(child.introduction)) return lacks("ptrace", "the kernel lets nobody read here");
  std::vector<std::byte> got(2 * kPage);
  CHECK_THROWS(read_peer(child.introduction, 1, got.data(), pages.address(), 2 * kPage), TransportError,
               "Its tensor was probably freed");
}

TEST(a_kernel_that_changes_its_mind) {
  const Pages pages;
  const Child child(pages);
  without(SYS_process_vm_readv, [&] {
    CHECK(!can_read(child.introduction));
    std::byte got[10];
    CHECK_THROWS(read_peer(child.introduction, 1, got, pages.address(), sizeof got), TransportError,
                 "let no rank change its user");
  });
}

TEST(where_the_kernel_reads_every_rank_says_so_once) {
  const Pages pages;
  if (!can_read(introduce(pages.word()))) return lacks("ptrace", "the kernel lets nobody read here");
  for (const size_t n : {2, 3}) check_said(said_by_ranks(static_cast<int>(n)), n, 0);
}

TEST(where_the_kernel_refuses_blocks_go_through_slots) {
  without(SYS_process_vm_readv, [] {
    for (const size_t n : {2, 3}) check_said(said_by_ranks(static_cast<int>(n)), 0, n);
  });
}

TEST(a_rank_alone_reads_nobody) { check_said(said_by_ranks(1), 0, 0); }

// All ranks must come to the same verdict, or one would post an address that another cannot read.
TEST(one_rank_that_may_not_read_keeps_all_from_it) {
  for (int mask = 0; mask < 4; ++mask) {
    auto ends = connect_local(2, MappedOptions{.arena_bytes = 64 << 20, .slot_bytes = 4096, .slots = 2});
    std::vector<std::unique_ptr<Board>> boards;
    std::vector<std::unique_ptr<PullSlots>> slots;
    for (auto& end : ends) {
      boards.push_back(std::make_unique<Board>(*end.window));
      slots.push_back(std::make_unique<PullSlots>(end.window, *boards.back(), false));
    }
    uint64_t ticket = 0;
    for (int rank = 0; rank < 2; ++rank) ticket = boards[rank]->post({.value = (mask >> rank & 1) != 0 ? 1u : 0u});
    for (int rank = 0; rank < 2; ++rank) {
      CHECK(boards[rank]->complete(ticket));
      slots[rank]->agree_on_reading(ticket);
      CHECK_EQ(slots[rank]->reads_peers(), mask == 3);
    }
  }
}

TEST_MAIN
