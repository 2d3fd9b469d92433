#include "base/settings.h"

#include <array>
#include <cmath>
#include <cstdlib>
#include <optional>
#include <sstream>

#include "base/error.h"
#include "base/horovod_settings.h"
#include "base/number.h"

namespace dcoll {
namespace {

constexpr std::array kTable = {
    SettingInfo{"DCOLL_TRANSPORT", "auto", "auto, mpi",
                "auto: shared memory inside a node, MPI (under torchrun UCX) between nodes; mpi: MPI always"},
    SettingInfo{"DCOLL_ALGO", "auto", "auto, ring, tree, halving_doubling, recursive_doubling, direct, hierarchical",
                "the all-reduce algorithm"},
    SettingInfo{"DCOLL_NODES", "", "numbers like 0,0,1,1",
                "treat one machine as several: the node of rank 0, 1, ...; a shorter list repeats. For tests"},
    SettingInfo{"DCOLL_TIMEOUT", "300", "seconds > 0",
                "a wait without progress for this long fails and names the ranks"},
    SettingInfo{"DCOLL_SPIN_US", "-1", "microseconds, -1 = from cores and ranks",
                "how long a waiting rank polls before it sleeps; on a shared core it yields between polls"},
    SettingInfo{"DCOLL_ARENA_MB", "0", "MiB >= 16, 0 = physical memory", "address space per rank for mapped buffers"},
    SettingInfo{"DCOLL_SLICE_KB", "0", "KiB, 1 to 4096, 0 = 64 on one node, 60 on several",
                "longest message between two ranks (pipelining unit)"},
    SettingInfo{"DCOLL_SLOTS", "4", "1 to 64", "messages in flight per pair of ranks and channel"},
    SettingInfo{"DCOLL_TCP_CONGESTION", "auto", "auto, keep, a name like cubic",
                "congestion control of MPI's TCP connections to other nodes; auto: cubic in place of bbr"},
    SettingInfo{"DCOLL_CALIBRATE", "auto", "auto, off, force",
                "constants of the cost model between nodes: auto measures them once and keeps them, force measures "
                "them in every job, off takes the built-in ones"},
    SettingInfo{"DCOLL_CACHE_DIR", "", "a folder, empty = the user's cache",
                "where measured constants are kept; empty: ~/.cache/dcoll"},
    SettingInfo{"DCOLL_BUCKET_MB", "-1", "MiB, 0 = one per parameter, -1 = 4, more on many nodes and GPUs of several",
                "size of a gradient bucket"},
    SettingInfo{"DCOLL_FIRST_BUCKET_MB", "1", "MiB > 0",
                "size of the bucket that is ready first in backward, instead of DCOLL_BUCKET_MB"},
    SettingInfo{"DCOLL_COMPRESS_LOCAL", "0", "0, 1",
                "1: compress inside a node too, and tensors of any size. For tests and studies"},
    SettingInfo{
        "DCOLL_GPU_ENGINE", "auto", "auto, dcoll, nccl, host",
        "who moves and reduces GPU tensors. host: host memory. dcoll: GPU memory if all ranks of a node can open each "
        "other's (tested at the first GPU tensor), else host memory. nccl: NCCL. auto: NCCL if each rank has "
        "a GPU of its own, unless dcoll is faster; else as dcoll"},
    SettingInfo{"DCOLL_GPU_SHARE", "auto", "auto, ipc, descriptors",
                "how ranks of a node open each other's GPU memory. ipc: CUDA IPC. descriptors: CUDA's virtual memory "
                "management. auto: descriptors where the GPU's driver refuses CUDA IPC"},
    SettingInfo{"DCOLL_NCCL", "", "a file, empty = torch's", "NCCL's library"},
    SettingInfo{"DCOLL_DEVICE", "auto", "auto, emulated",
                "emulated: torch's CPU tensors are taken for those of an imitated GPU. For tests"},
    SettingInfo{"DCOLL_SIMD", "auto", "auto, avx512vnni, avx512, avx2, generic", "instruction set of the CPU kernels"},
    SettingInfo{"DCOLL_STALL_CHECK_TIME", "60", "seconds > 0",
                "an operation that some ranks did not submit for this long is reported, naming them"},
    SettingInfo{"DCOLL_STALL_SHUTDOWN_TIME", "0", "seconds, 0 = never",
                "an operation that some ranks did not submit for this long is an error on all ranks"},
    SettingInfo{"DCOLL_STALL_CHECK_DISABLE", "0", "0, 1", "1: neither reports nor ends stalled operations"},
    SettingInfo{"DCOLL_TIMELINE", "", "a file, DYNAMIC, empty = none",
                "dcoll.init() begins rank 0's timeline there; {rank} in the name: one file per rank; DYNAMIC: "
                "start_timeline() does"},
    SettingInfo{"DCOLL_TIMELINE_MARK_CYCLES", "0", "0, 1", "the timeline marks where each step's gradients begin"},
    SettingInfo{"DCOLL_THREAD_AFFINITY", "", "cores, one per local rank: 2,6; empty = anywhere",
                "the core that a rank's background thread is bound to"},
    SettingInfo{"DCOLL_LOG_LEVEL", "notice", "trace, debug, info, notice, warning, error, fatal",
                "what is written to standard error"},
    SettingInfo{"DCOLL_LOG_HIDE_TIME", "0", "0, 1", "1: lines on standard error begin without the time"},
};

const SettingInfo& info(std::string_view name) {
  for (const SettingInfo& entry : kTable) {
    if (entry.name == name) return entry;
  }
  throw Error("internal: no setting " + std::string(name));
}

bool is_set(std::string_view name) {
  const char* value = std::getenv(std::string(name).c_str());
  return value != nullptr && *value != '\0';
}

std::string text(std::string_view name) { return setting_text(name); }

[[noreturn]] void reject(std::string_view name, const std::string& value) {
  std::string source;  // the variable the value came from
  if (!is_set(name)) {
    if (const auto taken = from_horovod(name)) source = " (from " + taken->variable + ")";
  }
  throw ArgumentError(std::string(name) + "='" + value + "'" + source + " is not valid: allowed are " +
                      std::string(info(name).allowed) + ". Change or unset the variable on every rank.");
}

double number(std::string_view name, double low, double high) {
  const std::string value = text(name);
  const std::optional<double> parsed = number_from(value);
  if (!parsed || *parsed < low || *parsed > high) reject(name, value);
  return *parsed;
}

int64_t integer(std::string_view name, int64_t low, int64_t high) {
  const double parsed = number(name, static_cast<double>(low), static_cast<double>(high));
  if (parsed != std::floor(parsed)) reject(name, text(name));
  return static_cast<int64_t>(parsed);
}

// Numbers below 65536, separated by commas; none when the setting is empty.
std::vector<int> numbers(std::string_view name) {
  const std::string value = text(name);
  std::vector<int> found;
  std::stringstream list{value};
  for (std::string word; std::getline(list, word, ',');) {
    if (word.empty() || word.size() > 5 || word.find_first_not_of("0123456789") != std::string::npos) {
      reject(name, value);
    }
    found.push_back(std::stoi(word));
  }
  return found;
}

// One of the words listed in the table's "allowed" column.
std::string choice(std::string_view name) {
  const std::string value = text(name);
  std::stringstream allowed{std::string(info(name).allowed)};
  for (std::string word; std::getline(allowed, word, ',');) {
    if (word.substr(word.find_first_not_of(' ')) == value) return value;
  }
  reject(name, value);
}

bool flag(std::string_view name) { return integer(name, 0, 1) != 0; }

}  // namespace

std::string setting_text(std::string_view name) {
  if (is_set(name)) return std::getenv(std::string(name).c_str());
  if (const auto taken = from_horovod(name)) return taken->value;
  return std::string(info(name).fallback);
}

std::span<const SettingInfo> setting_table() { return kTable; }

Settings Settings::from_env() {
  constexpr double kSmallest = 1e-3;  // "greater than zero", in the unit of the setting
  Settings s;
  s.transport = choice("DCOLL_TRANSPORT");
  s.algo = choice("DCOLL_ALGO");
  s.nodes = numbers("DCOLL_NODES");
  if (text("DCOLL_NODES").ends_with(',')) reject("DCOLL_NODES", text("DCOLL_NODES"));  // a rank's number is missing
  s.timeout_s = number("DCOLL_TIMEOUT", kSmallest, 1e9);
  s.spin_us = number("DCOLL_SPIN_US", -1, 1e9);
  s.arena_mb = integer("DCOLL_ARENA_MB", 0, int64_t{1} << 26);
  if (s.arena_mb != 0 && s.arena_mb < 16) reject("DCOLL_ARENA_MB", text("DCOLL_ARENA_MB"));
  s.slice_kb = integer("DCOLL_SLICE_KB", 0, 4096);
  s.slots = integer("DCOLL_SLOTS", 1, 64);
  s.tcp_congestion = text("DCOLL_TCP_CONGESTION");
  s.calibrate = choice("DCOLL_CALIBRATE");
  s.cache_dir = text("DCOLL_CACHE_DIR");
  s.bucket_mb = number("DCOLL_BUCKET_MB", -1, 1e6);
  s.first_bucket_mb = number("DCOLL_FIRST_BUCKET_MB", kSmallest, 1e6);
  s.gpu_engine = choice("DCOLL_GPU_ENGINE");
  (void)choice("DCOLL_GPU_SHARE");  // read by the device
  (void)choice("DCOLL_DEVICE");     // which Python asks for before there is a job
  s.simd = choice("DCOLL_SIMD");
  s.stall_check_time_s = number("DCOLL_STALL_CHECK_TIME", kSmallest, 1e9);
  s.stall_shutdown_time_s = number("DCOLL_STALL_SHUTDOWN_TIME", 0, 1e9);
  s.stall_check_disable = flag("DCOLL_STALL_CHECK_DISABLE");
  (void)flag("DCOLL_TIMELINE_MARK_CYCLES");  // read by Python
  s.thread_affinity = numbers("DCOLL_THREAD_AFFINITY");
  s.log_level = choice("DCOLL_LOG_LEVEL");
  s.log_hide_time = flag("DCOLL_LOG_HIDE_TIME");
  s.compress_local = flag("DCOLL_COMPRESS_LOCAL");
  return s;
}

Settings Settings::on_nodes(bool several) const {
  Settings s = *this;
  if (s.slice_kb == 0) s.slice_kb = several ? kEagerSliceKb : 64;
  return s;
}

}  // namespace dcoll
