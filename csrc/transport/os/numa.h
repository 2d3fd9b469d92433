// Which NUMA node a rank's memory should lie on. Nothing here needs libnuma, and nothing fails: where the system does
// not tell or does not allow, pages go where they are first touched, as they would have anyway.
#pragma once

#include <sched.h>

#include <cstddef>
#include <string>

namespace dcoll {

// The node that holds every core of the mask; -1 when the cores are on several nodes, and on machines with one.
int numa_node_of(const cpu_set_t& cores, const std::string& sysfs = "/sys/devices/system/node");
// Of the cores the calling thread may run on.
int own_numa_node();

// Pages of this shared mapping come from `node` while it has any, whichever process touches them first: a policy on
// shared memory belongs to the memory, not to the process. Node -1: no preference.
void prefer_numa_node(void* begin, size_t bytes, int node);

// Whether a list as the kernel writes it ("0-3,8,10-11") contains the number.
bool list_contains(const std::string& list, int number);

}  // namespace dcoll
