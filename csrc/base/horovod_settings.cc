#include "base/horovod_settings.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdlib>

#include "base/number.h"

namespace dcoll {
namespace {

constexpr std::string_view kNoCycle = "there is no cycle: a collective starts when it is called";
constexpr std::string_view kNoTuning = "the cost model chooses, and buckets follow the order of the gradients";
constexpr std::string_view kNoNccl = "NCCL chooses its own streams";
constexpr std::string_view kNoGloo = "dcoll does not use Gloo; DCOLL_TIMEOUT is the deadline of a wait";
constexpr std::string_view kPlace = "set by Horovod's launcher: MPI tells a rank its place";
constexpr std::string_view kMpi = "MPI is what dcoll always runs on";
constexpr std::string_view kFixedRanks = "the ranks of a job are those that mpirun starts";

constexpr std::array kHorovodTable = {
    HorovodSetting{"HOROVOD_FUSION_THRESHOLD", "DCOLL_BUCKET_MB", ""},
    HorovodSetting{"HOROVOD_TIMELINE", "DCOLL_TIMELINE", ""},
    HorovodSetting{"HOROVOD_TIMELINE_MARK_CYCLES", "DCOLL_TIMELINE_MARK_CYCLES", ""},
    HorovodSetting{"HOROVOD_STALL_CHECK_DISABLE", "DCOLL_STALL_CHECK_DISABLE", ""},
    HorovodSetting{"HOROVOD_STALL_CHECK_TIME_SECONDS", "DCOLL_STALL_CHECK_TIME", ""},
    HorovodSetting{"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "DCOLL_STALL_SHUTDOWN_TIME", ""},
    HorovodSetting{"HOROVOD_HIERARCHICAL_ALLREDUCE", "DCOLL_ALGO", ""},
    HorovodSetting{"HOROVOD_TORUS_ALLREDUCE", "DCOLL_ALGO", ""},
    HorovodSetting{"HOROVOD_THREAD_AFFINITY", "DCOLL_THREAD_AFFINITY", ""},
    HorovodSetting{"HOROVOD_LOG_LEVEL", "DCOLL_LOG_LEVEL", ""},
    HorovodSetting{"HOROVOD_LOG_HIDE_TIME", "DCOLL_LOG_HIDE_TIME", ""},
    HorovodSetting{"HOROVOD_CYCLE_TIME", "", kNoCycle},
    HorovodSetting{"HOROVOD_CACHE_CAPACITY", "", "buckets need no negotiation, so there is no cache of responses"},
    HorovodSetting{"HOROVOD_DYNAMIC_PROCESS_SETS", "", "process sets can be added and removed at any time"},
    HorovodSetting{"HOROVOD_HIERARCHICAL_ALLGATHER", "", "dcoll chooses the algorithm"},
    HorovodSetting{"HOROVOD_DISABLE_GROUP_FUSION", "", "a group is always reduced as one"},
    HorovodSetting{"HOROVOD_AUTOTUNE", "", kNoTuning},
    HorovodSetting{"HOROVOD_AUTOTUNE_LOG", "", kNoTuning},
    HorovodSetting{"HOROVOD_AUTOTUNE_WARMUP_SAMPLES", "", kNoTuning},
    HorovodSetting{"HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", "", kNoTuning},
    HorovodSetting{"HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", "", kNoTuning},
    HorovodSetting{"HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", "", kNoTuning},
    HorovodSetting{"HOROVOD_ADASUM_MPI_CHUNK_SIZE", "", "messages are as long as DCOLL_SLICE_KB says"},
    HorovodSetting{"HOROVOD_NUM_NCCL_STREAMS", "", kNoNccl},
    HorovodSetting{"HOROVOD_BATCH_D2D_MEMCOPIES", "", "gradients are packed by one kernel"},
    HorovodSetting{"HOROVOD_ENABLE_ASYNC_COMPLETION", "", kNoNccl},
    HorovodSetting{"HOROVOD_DISABLE_NVTX_RANGES", "", "there are no NVTX ranges; DCOLL_TIMELINE shows the phases"},
    HorovodSetting{"HOROVOD_MPI_THREADS_DISABLE", "", "dcoll needs no more than MPI_THREAD_SERIALIZED"},
    HorovodSetting{"HOROVOD_CONTROLLER", "", kMpi},
    HorovodSetting{"HOROVOD_CPU_OPERATIONS", "", kMpi},
    HorovodSetting{"HOROVOD_GLOO_RENDEZVOUS_ADDR", "", kNoGloo},
    HorovodSetting{"HOROVOD_GLOO_RENDEZVOUS_PORT", "", kNoGloo},
    HorovodSetting{"HOROVOD_GLOO_IFACE", "", kNoGloo},
    HorovodSetting{"HOROVOD_GLOO_TIMEOUT_SECONDS", "", kNoGloo},
    HorovodSetting{"HOROVOD_ELASTIC", "", kFixedRanks},
    HorovodSetting{"HOROVOD_ELASTIC_TIMEOUT", "", kFixedRanks},
    HorovodSetting{"HOROVOD_START_TIMEOUT", "", "ranks meet within DCOLL_TIMEOUT, or say who is missing"},
    HorovodSetting{"HOROVOD_SECRET_KEY", "", "mpirun starts the ranks"},
    HorovodSetting{"HOROVOD_RANK", "", kPlace},
    HorovodSetting{"HOROVOD_SIZE", "", kPlace},
    HorovodSetting{"HOROVOD_LOCAL_RANK", "", kPlace},
    HorovodSetting{"HOROVOD_LOCAL_SIZE", "", kPlace},
    HorovodSetting{"HOROVOD_CROSS_RANK", "", kPlace},
    HorovodSetting{"HOROVOD_CROSS_SIZE", "", kPlace},
    HorovodSetting{"HOROVOD_HOSTNAME", "", kPlace},
};

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::tolower(c); });
  return text;
}

// Horovod reads a flag as a number: what is not 0 is true.
bool is_true(const std::string& value) {
  char* end = nullptr;
  const long number = std::strtol(value.c_str(), &end, 10);
  const std::string word = lower(value);
  return end != value.c_str() ? number != 0 : word == "true" || word == "on" || word == "yes";
}

std::string mib_of_bytes(const std::string& bytes) {
  const std::optional<double> number = number_from(bytes);
  if (!number || *number < 0) return bytes + " bytes";  // refused, with the words as given
  return text_of(*number / (1 << 20), 10);
}

// The value in dcoll's words; nothing: the variable asks for what dcoll does anyway.
std::optional<std::string> translate(std::string_view variable, const std::string& value) {
  if (variable == "HOROVOD_FUSION_THRESHOLD") return mib_of_bytes(value);
  if (variable == "HOROVOD_LOG_LEVEL") return lower(value);
  if (variable.ends_with("_ALLREDUCE")) {
    return is_true(value) ? std::optional<std::string>("hierarchical") : std::nullopt;
  }
  if (variable.ends_with("_DISABLE") || variable.ends_with("_CYCLES") || variable.ends_with("_HIDE_TIME")) {
    return is_true(value) ? "1" : "0";
  }
  return value;
}

}  // namespace

std::span<const HorovodSetting> horovod_settings() { return kHorovodTable; }

std::optional<FromHorovod> from_horovod(std::string_view setting) {
  for (const HorovodSetting& entry : kHorovodTable) {
    if (entry.setting != setting) continue;
    const char* value = std::getenv(std::string(entry.variable).c_str());
    if (value == nullptr || *value == '\0') continue;
    if (auto translated = translate(entry.variable, value))
      return FromHorovod{std::string(entry.variable), *translated};
  }
  return std::nullopt;
}

}  // namespace dcoll
