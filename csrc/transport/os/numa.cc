#include "transport/os/numa.h"

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <fstream>
#include <sstream>

namespace dcoll {
namespace {

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

bool all_in(const cpu_set_t& cores, const std::string& list) {
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &cores) && !list_contains(list, core)) return false;
  }
  return true;
}

}  // namespace

bool list_contains(const std::string& list, int number) {
  std::stringstream ranges(list);
  for (std::string range; std::getline(ranges, range, ',');) {
    std::stringstream ends(range);
    int first = 0, last = 0;
    if (!(ends >> first)) continue;
    char dash = 0;
    if (!(ends >> dash >> last)) last = first;
    if (first <= number && number <= last) return true;
  }
  return false;
}

int numa_node_of(const cpu_set_t& cores, const std::string& sysfs) {
  constexpr int kMostNodes = 1024;
  if (CPU_COUNT(&cores) == 0) return -1;
  const std::string online = first_line(sysfs + "/online");
  int found = -1, nodes = 0;
  for (int node = 0; node < kMostNodes; ++node) {
    if (!list_contains(online, node)) continue;
    ++nodes;
    if (found < 0 && all_in(cores, first_line(sysfs + "/node" + std::to_string(node) + "/cpulist"))) found = node;
  }
  return nodes > 1 ? found : -1;
}

int own_numa_node() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  if (sched_getaffinity(0, sizeof cores, &cores) != 0) return -1;
  return numa_node_of(cores);
}

void prefer_numa_node(void* begin, size_t bytes, int node) {
  constexpr int kWordBits = sizeof(unsigned long) * CHAR_BIT;
  constexpr int kMostNodes = 1024;
  if (node < 0 || node >= kMostNodes) return;
  unsigned long mask[kMostNodes / kWordBits] = {};
  mask[node / kWordBits] = 1ul << (node % kWordBits);
  // The kernel takes one bit less than it is told. A container may forbid the call: then first touch decides.
  (void)syscall(SYS_mbind, begin, bytes, MPOL_PREFERRED, mask, kMostNodes + 1, 0);
}

}  // namespace dcoll
