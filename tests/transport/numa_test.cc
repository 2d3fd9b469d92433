// Finding a rank's NUMA node from what the system says, and placing memory by it.
#include "transport/os/numa.h"

#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <initializer_list>

#include "support/check.h"

using namespace dcoll;
using namespace dcoll::test;

namespace {

cpu_set_t set_of(std::initializer_list<size_t> cores) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const size_t core : cores) CPU_SET(core, &set);
  return set;
}

// A machine as /sys describes it.
class FakeMachine {
 public:
  explicit FakeMachine(std::initializer_list<const char*> cores_of_node) {
    CHECK(mkdtemp(root_) != nullptr);
    size_t nodes = 0;
    for (const char* cores : cores_of_node) {
      const std::string node = std::string(root_) + "/node" + std::to_string(nodes++);
      std::filesystem::create_directory(node);
      std::ofstream(node + "/cpulist") << cores << "\n";
    }
    std::ofstream(std::string(root_) + "/online") << (nodes == 1 ? "0" : "0-" + std::to_string(nodes - 1)) << "\n";
  }
  ~FakeMachine() { std::filesystem::remove_all(root_); }
  std::string root() const { return root_; }

 private:
  char root_[32] = "/tmp/dcoll-numa-XXXXXX";
};

}  // namespace

TEST(lists_are_read) {
  for (const int in : {0, 1, 3, 8, 10, 11}) CHECK(list_contains("0-3,8,10-11", in));
  for (const int out : {4, 7, 9, 12}) CHECK(!list_contains("0-3,8,10-11", out));
  CHECK(!list_contains("", 0));
  CHECK(!list_contains("\n", 0));
  CHECK(list_contains("5\n", 5));
}

TEST(a_node_holds_all_cores_of_the_rank_or_none_is_named) {
  const FakeMachine two({"0-3,8-11", "4-7,12-15"}), one({"0-15"});
  CHECK_EQ(numa_node_of(set_of({0}), two.root()), 0);
  CHECK_EQ(numa_node_of(set_of({1, 9}), two.root()), 0);
  CHECK_EQ(numa_node_of(set_of({4, 15}), two.root()), 1);
  CHECK_EQ(numa_node_of(set_of({3, 4}), two.root()), -1);
  CHECK_EQ(numa_node_of(set_of({}), two.root()), -1);
  CHECK_EQ(numa_node_of(set_of({0}), one.root()), -1);
  CHECK_EQ(numa_node_of(set_of({0}), "/nowhere"), -1);
  const FakeMachine memory_only({"0-3", ""});
  CHECK_EQ(numa_node_of(set_of({2}), memory_only.root()), 0);
}

// The preference is that of the memory. Where the system allows none, asking for it does no harm.
TEST(preference_is_set_on_shared_memory) {
  const auto bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE)) * 4;
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  CHECK(at != MAP_FAILED);
  prefer_numa_node(at, bytes, -1);
  prefer_numa_node(at, bytes, 1 << 20);
  int before = -1;
  const bool can_ask = syscall(SYS_get_mempolicy, &before, nullptr, 0, at, MPOL_F_ADDR) == 0;
  if (can_ask) CHECK_EQ(before, static_cast<int>(MPOL_DEFAULT));
  prefer_numa_node(at, bytes, 0);
  unsigned long mask[16] = {};
  int after = -1;
  if (can_ask && syscall(SYS_get_mempolicy, &after, mask, 1025, at, MPOL_F_ADDR) == 0) {
    CHECK(after == MPOL_PREFERRED || after == MPOL_DEFAULT);
    if (after == MPOL_PREFERRED) CHECK_EQ(mask[0], 1ul);
  }
  static_cast<char*>(at)[0] = 1;
  munmap(at, bytes);
}

TEST_MAIN
