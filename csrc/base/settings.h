// Every DCOLL_* setting, in one table. Nothing here is global: whoever needs settings is handed a Settings.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/log.h"

namespace dcoll {

// Between nodes: Open MPI's TCP sends up to 64 KiB, its header included, without asking the receiver first. The answer
// to such a question travels behind all that is on its way already: a ring of longer slices left a third of the link
// unused.
inline constexpr int64_t kEagerSliceKb = 60;

struct Settings {
  std::string transport;   // "auto" (mapped memory inside a node, MPI between), "mpi" (MPI everywhere)
  std::string algo;        // "auto" or an algorithm's name for all-reduce
  std::vector<int> nodes;  // a machine's ranks work as if on several: number of rank r is nodes[r % nodes.size()];
                           // empty: as it is
  double timeout_s;        // a wait that saw no progress for this long fails, naming the ranks waited for
  double spin_us;    // how long a wait looks before it sleeps (yielding on a shared core); negative: chosen from cores
                     // and ranks
  int64_t arena_mb;  // address space (not memory) reserved per rank for mapped buffers; 0: from physical memory
  int64_t slice_kb;  // pipelining unit: the longest message between two ranks; 0: from the number of nodes
  int64_t slots;     // messages in flight per (peer, channel)
  std::string tcp_congestion;    // of MPI's TCP connections: "auto" (not BBR), "keep", or an algorithm's name
  std::string calibrate;         // "auto", "off", "force": constants of the cost model between nodes
  std::string cache_dir;         // where measured constants are kept; empty: the user's cache folder
  double bucket_mb;              // gradient bucket size; negative: from the number of nodes
  double first_bucket_mb;        // size of the bucket that is ready first in backward
  std::string simd;              // "auto", "avx512vnni", "avx512", "avx2", "generic"
  double stall_check_time_s;     // an operation that some ranks did not submit for this long is reported
  double stall_shutdown_time_s;  // ... and for this long fails on all ranks; 0: never
  bool stall_check_disable;      // neither of the two
  bool compress_local = false;
  std::string gpu_engine = "auto";  // "auto", "dcoll", "nccl", "host"
  // Per local rank: the core its background thread is bound to; empty: unbound. A communicator's has this rank's alone.
  std::vector<int> thread_affinity;
  std::string log_level;  // see log_level_from()
  bool log_hide_time;

  // Reads the environment, Horovod's names included (horovod_settings.h). Throws ArgumentError with name, value,
  // allowed values.
  static Settings from_env();
  // With what was left to the number of nodes decided, for a job on one node or on several.
  Settings on_nodes(bool several) const;
  Log log_of(int rank) const { return {log_level_from(log_level), rank, log_hide_time}; }
};

struct SettingInfo {
  std::string_view name;      // "DCOLL_TIMEOUT"
  std::string_view fallback;  // the default, as text
  std::string_view allowed;
  std::string_view help;
};
std::span<const SettingInfo> setting_table();

// What a setting is now, as text: from its variable, else from Horovod's, else the default.
std::string setting_text(std::string_view name);

}  // namespace dcoll
