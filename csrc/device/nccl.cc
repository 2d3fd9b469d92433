#include "device/nccl.h"

#include <atomic>

#include "base/settings.h"
#include "device/symbol.h"

namespace dcoll::device {
namespace {

// nccl.h, which no build needs. Its numbers and structs have not changed since 2.14.
using Result = int;
using Comm = void*;
constexpr Result kSuccess = 0, kInProgress = 7;
constexpr int kLeastVersion = 21400;
struct Id {
  NcclId bytes;  // passed by value
};
struct Config {
  size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = kLeastVersion;  // by it NCCL knows which fields there are
  int blocking = 0;
};

// By DType; -1: it has no such type.
constexpr std::array<int, kNumDTypes> kTypes = {6, 9, 7, 8, 0, 1, 2, 4, -1, -1, -1, 3, 5};
constexpr int kBytes = 1;  // ncclUint8

// -1: it has no such operator.
constexpr int op_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return 0;
    case ReduceOp::kProduct:
      return 1;
    case ReduceOp::kMax:
      return 2;
    case ReduceOp::kMin:
      return 3;
    case ReduceOp::kAverage:
      return 4;
    default:
      return -1;
  }
}

std::string chosen_name() {
  const std::string chosen = setting_text("DCOLL_NCCL");
  return chosen.empty() ? "libnccl.so.2" : chosen;
}

struct NcclLibrary final : Library {
  Result (*get_version)(int*) = find("ncclGetVersion");
  Result (*make_id)(Id*) = find("ncclGetUniqueId");
  Result (*init)(Comm*, int, Id, int, Config*) = find("ncclCommInitRankConfig");
  Result (*abort)(Comm) = find("ncclCommAbort");
  Result (*async_error)(Comm, Result*) = find("ncclCommGetAsyncError");
  Result (*all_reduce)(const void*, void*, size_t, int, int, Comm, Stream) = find("ncclAllReduce");
  Result (*reduce_scatter)(const void*, void*, size_t, int, int, Comm, Stream) = find("ncclReduceScatter");
  Result (*broadcast)(const void*, void*, size_t, int, int, Comm, Stream) = find("ncclBroadcast");
  Result (*all_gather)(const void*, void*, size_t, int, Comm, Stream) = find("ncclAllGather");
  Result (*send)(const void*, size_t, int, int, Comm, Stream) = find("ncclSend");
  Result (*receive)(void*, size_t, int, int, Comm, Stream) = find("ncclRecv");
  Result (*begin_group)() = find("ncclGroupStart");
  Result (*end_group)() = find("ncclGroupEnd");
  const char* (*error_text)(Result) = find("ncclGetErrorString");
  const char* (*last_error)(Comm) = find("ncclGetLastError");

  int version = 0;
  // Tests bring a library that works in the emulated device's streams, and in no other's.
  const bool is_emulated = library_ != nullptr && dlsym(library_, "dcoll_emulated_nccl") != nullptr;

  NcclLibrary() : Library({chosen_name().c_str()}) {
    if (!missing.empty()) return;
    if (get_version(&version) == kSuccess && version >= kLeastVersion) return;
    missing = "it is of version " + std::to_string(version) + ", and " + std::to_string(kLeastVersion) + " is needed";
  }
};

// After nccl_missing() has said that there is one.
const NcclLibrary& library() {
  static const NcclLibrary found;
  return found;
}

}  // namespace

// One that is missing is looked for again: torch has it in a folder of its own, and may be imported later.
std::string nccl_missing(int number) {
  static std::atomic<bool> is_there{false};
  if (!is_there) {
    const NcclLibrary now;
    if (!now.missing.empty()) return "no NCCL: " + now.missing;
    is_there = true;
  }
  if (library().is_emulated == is_emulated(number)) return "";
  return "this NCCL works on other devices";
}

int nccl_version() { return nccl_missing(0).empty() ? library().version : 0; }

NcclId make_nccl_id(int number) {
  Id id{};
  Result result = kSuccess;
  device_of(number).as_current([&] { result = library().make_id(&id); });
  if (result == kSuccess) return id.bytes;
  throw DeviceError(device_of(number).name() + ": ncclGetUniqueId failed: " + library().error_text(result));
}

bool nccl_reduces(DType dtype, ReduceOp op) {
  const bool loses_nan = is_floating(dtype) && (op == ReduceOp::kMin || op == ReduceOp::kMax);
  return kTypes[static_cast<size_t>(dtype)] >= 0 && op_of(op) >= 0 && !loses_nan;
}

// One that is there although to begin failed has to be given back: a thread of the library may still use it.
Nccl::Nccl(Device& device, const NcclId& id, int size, int rank) : device_(device) {
  Config config;
  try {
    call("ncclCommInitRankConfig", [&] { return library().init(&comm_, size, Id{id}, rank, &config); });
  } catch (const DeviceError&) {
    abort();
    throw;
  }
}

void Nccl::check(int result, const char* what) {
  if (result == kSuccess || result == kInProgress) return;
  std::string text = device_.name() + ": " + what + " failed: " + library().error_text(result);
  const char* const more = library().last_error(comm_);
  if (more != nullptr && *more != '\0') text += std::string(" (") + more + ")";
  throw DeviceError(text);
}

template <typename Call>
void Nccl::call(const char* what, const Call& begin) {
  Result result = kSuccess;
  device_.as_current([&] { result = begin(); });
  check(result, what);
}

// What one of them says is the group's; the group must end all the same.
template <typename Calls>
void Nccl::group(const char* what, const Calls& begin) {
  call(what, [&] {
    Result first = library().begin_group();
    begin([&](Result result) {
      if (first == kSuccess || first == kInProgress) first = result;
    });
    const Result last = library().end_group();
    return first == kSuccess || first == kInProgress ? last : first;
  });
}

bool Nccl::settled() {
  Result state = kSuccess;
  check(library().async_error(comm_, &state), "ncclCommGetAsyncError");
  check(state, "NCCL");
  return state != kInProgress;
}

void Nccl::all_reduce(const void* in, void* out, size_t count, DType dtype, ReduceOp op, Stream stream) {
  const int type = kTypes[static_cast<size_t>(dtype)];
  call("ncclAllReduce", [&] { return library().all_reduce(in, out, count, type, op_of(op), comm_, stream); });
}

void Nccl::reduce_scatter(const void* in, void* out, size_t count, DType dtype, ReduceOp op, Stream stream) {
  const int type = kTypes[static_cast<size_t>(dtype)];
  call("ncclReduceScatter", [&] { return library().reduce_scatter(in, out, count, type, op_of(op), comm_, stream); });
}

void Nccl::broadcast(const void* in, void* out, size_t bytes, int root, Stream stream) {
  call("ncclBroadcast", [&] { return library().broadcast(in, out, bytes, kBytes, root, comm_, stream); });
}

void Nccl::all_gather(const void* in, void* out, size_t bytes, Stream stream) {
  call("ncclAllGather", [&] { return library().all_gather(in, out, bytes, kBytes, comm_, stream); });
}

void Nccl::all_to_all(const void* in, void* out, std::span<const size_t> send, std::span<const size_t> receive,
                      Stream stream) {
  const auto* from = static_cast<const std::byte*>(in);
  auto* to = static_cast<std::byte*>(out);
  group("ncclSend and ncclRecv", [&](const auto& note) {
    for (size_t peer = 0; peer < send.size(); ++peer) {
      const int rank = static_cast<int>(peer);
      if (send[peer] > 0) note(library().send(from, send[peer], kBytes, rank, comm_, stream));
      if (receive[peer] > 0) note(library().receive(to, receive[peer], kBytes, rank, comm_, stream));
      from += send[peer];
      to += receive[peer];
    }
  });
}

void Nccl::abort() noexcept {
  if (comm_ == nullptr) return;
  try {
    device_.as_current([this] { library().abort(comm_); });
  } catch (const DeviceError&) {  // a device that has failed does nothing any more
  }
  comm_ = nullptr;
}

}  // namespace dcoll::device
