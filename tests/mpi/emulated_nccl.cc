// NCCL for tests, on the emulated device: the functions that csrc/device/nccl.cc calls, between processes of one
// machine. As NCCL's do, a kernel waits in its stream until all ranks have begun theirs, and a call returns before its
// kernel is in the stream.
//
// CHECKS_NCCL has it fail: "init 1", ncclCommInitRankConfig of rank 1; "begun 1", the same, but there is a
// communicator, whose end standard error tells; "lost 1", the same, as a thread of the library finds out; "never 1", it
// never meets the others; "call 1 3", the third call of rank 1; "late 1 3", that call's kernel, as a thread of the
// library finds out; "hang 1 3", it waits for ever; "kill 1 3", the process is killed in it; "break 1 3", it waits for
// ever, and the device does nothing else any more. CHECKS_NCCL_MS: how long each kernel takes beside its work.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "device/device.h"
#include "kernels/reduce.h"

namespace {

using dcoll::DType;
using dcoll::ReduceOp;
constexpr int kSuccess = 0, kSystemError = 2, kRemoteError = 6, kInProgress = 7;
constexpr size_t kChunk = size_t{1} << 20;

// A piece of a message from one rank to another; left: of the message, this piece included. 0: there is none.
struct Slot {
  std::atomic<size_t> left;
  std::array<std::byte, 64 << 10> data;
};
struct Shared {
  static constexpr int kMostRanks = 8;
  std::atomic<int> joined;
  std::atomic<uint64_t> arrived;
  std::array<Slot, size_t{kMostRanks} * kMostRanks> slots;
  Slot& slot(int from, int to) { return slots.at(static_cast<size_t>(from * kMostRanks + to)); }
};

// Between looks at what others do. Not a yield: two streams of a rank that yielded without end had both cores of a
// machine for 44 s (Linux 6.18), while all threads of the ranks that they waited for were ready to run.
void rest() { std::this_thread::sleep_for(std::chrono::microseconds(20)); }

struct Comm {
  std::string name;
  int size = 0, rank = 0, calls = 0;
  Shared* shared = nullptr;
  std::byte* data = nullptr;
  uint64_t barriers = 0;  // of the stream's thread
  std::atomic<bool> aborted{false};
  std::function<void()> not_begun;
  int failed = kSuccess;
  bool begun_in_vain = false;

  std::byte* chunk(int of) const { return data + static_cast<size_t>(of) * kChunk; }
  bool meet() {
    shared->arrived.fetch_add(1);
    const uint64_t all = ++barriers * static_cast<uint64_t>(size);
    while (shared->arrived.load() < all && !aborted.load()) rest();
    return !aborted.load();
  }
};
using Handle = std::shared_ptr<Comm>;
Comm& of(void* comm) { return **static_cast<Handle*>(comm); }

struct Failure {
  char what[8] = "";
  int rank = -1, call = 0;
};
Failure failure() {
  Failure found;
  const char* const text = std::getenv("CHECKS_NCCL");
  if (text != nullptr) std::sscanf(text, "%7s %d %d", found.what, &found.rank, &found.call);
  return found;
}

DType dtype_of(int type) {
  constexpr std::array kTypes = {DType::kInt8,   DType::kUInt8,   DType::kInt32,   DType::kUInt32,  DType::kInt64,
                                 DType::kUInt64, DType::kFloat16, DType::kFloat32, DType::kFloat64, DType::kBFloat16};
  return kTypes.at(static_cast<size_t>(type));
}
ReduceOp op_of(int op) {
  constexpr std::array kOps = {ReduceOp::kSum, ReduceOp::kProduct, ReduceOp::kMax, ReduceOp::kMin, ReduceOp::kSum};
  return kOps.at(static_cast<size_t>(op));
}

using Take = std::function<void(Comm&, std::byte* out, size_t bytes)>;
using Kernel = std::function<void(Comm&)>;

// The messages of a group, which are sent at once.
struct Message {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  size_t send = 0, receive = 0;
};
struct Group {
  bool open = false;
  void *comm = nullptr, *stream = nullptr;
  std::map<int, Message> messages;  // by peer
};
thread_local Group group;

// All of them at once, in pieces; without the ranks that none is for.
void exchange(Comm& comm, std::map<int, Message> messages) {
  const auto done = [](const auto& one) { return one.second.send == 0 && one.second.receive == 0; };
  while (!std::ranges::all_of(messages, done) && !comm.aborted.load()) {
    for (auto& [peer, message] : messages) {
      Slot& out = comm.shared->slot(comm.rank, peer);
      if (message.send > 0 && out.left.load() == 0) {
        const size_t bytes = std::min(out.data.size(), message.send);
        std::memcpy(out.data.data(), message.from, bytes);
        out.left.store(message.send);
        message.from += bytes;
        message.send -= bytes;
      }
      Slot& in = comm.shared->slot(peer, comm.rank);
      const size_t left = message.receive > 0 ? in.left.load() : 0;
      if (left == 0) continue;
      if (left != message.receive) std::abort();  // the ranks do not agree on how long it is
      const size_t bytes = std::min(in.data.size(), left);
      std::memcpy(message.to, in.data.data(), bytes);
      in.left.store(0);
      message.to += bytes;
      message.receive -= bytes;
    }
    rest();
  }
}

// Every rank shows a part of `bytes`; out: what take() writes, null where this rank has none of it.
bool by_chunks(Comm& comm, const std::byte* in, std::byte* out, size_t bytes, const Take& take) {
  for (size_t at = 0; at < bytes; at += kChunk) {
    const size_t length = std::min(kChunk, bytes - at);
    if (in != nullptr) std::memcpy(comm.chunk(comm.rank), in + at, length);
    if (!comm.meet()) return false;
    if (out != nullptr) take(comm, out + at, length);
    if (!comm.meet()) return false;
  }
  return true;
}

// As NCCL's do: a NaN gives way to a number.
void drop_nans(Comm& comm, float* out, size_t count, bool least) {
  for (size_t i = 0; i < count; ++i) {
    out[i] = std::numeric_limits<float>::quiet_NaN();
    for (int rank = 0; rank < comm.size; ++rank) {
      const float one = reinterpret_cast<const float*>(comm.chunk(rank))[i];
      out[i] = least ? std::fmin(out[i], one) : std::fmax(out[i], one);
    }
  }
}

Take reduction(int type, int op) {
  constexpr int kMax = 2, kMin = 3, kFloat32 = 7;
  return [=](Comm& comm, std::byte* out, size_t bytes) {
    if (type == kFloat32 && (op == kMax || op == kMin)) {
      return drop_nans(comm, reinterpret_cast<float*>(out), bytes / sizeof(float), op == kMin);
    }
    std::vector<const void*> from;
    for (int rank = 0; rank < comm.size; ++rank) from.push_back(comm.chunk(rank));
    void* const to = out;
    constexpr int kAverage = 4;
    const DType dtype = dtype_of(type);
    dcoll::kernels::reduce_n_to_n({&to, 1}, from, bytes / dcoll::dtype_bytes(dtype), dtype, op_of(op),
                                  op == kAverage ? 1.0 / comm.size : 1.0);
  };
}

int begin(void* handle, void* stream, Kernel kernel) {
  const Handle comm = *static_cast<Handle*>(handle);
  if (comm->not_begun) return kSystemError;  // a call before the last one has settled
  const Failure fails = failure();
  const bool now = fails.rank == comm->rank && ++comm->calls == fails.call;
  if (now && std::strcmp(fails.what, "call") == 0) return kSystemError;
  const std::string fate = now ? fails.what : "";
  comm->not_begun = [=, kernel = std::move(kernel)] {
    if (fate == "late") comm->failed = kRemoteError;  // and the kernel never comes, for which the others wait
    const auto broken = std::make_shared<std::atomic<bool>>(false);
    dcoll::device::put_into_emulated(stream, [=] {
      if (fate == "kill") raise(SIGKILL);
      if (fate == "break") {
        dcoll::device::fail_emulated_after(0);
        broken->store(true);
      }
      const char* const takes = std::getenv("CHECKS_NCCL_MS");
      if (takes != nullptr) std::this_thread::sleep_for(std::chrono::milliseconds(std::atoi(takes)));
      if (fate.empty()) return kernel(*comm);
      while (!comm->aborted.load()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    });
    while (fate == "break" && !broken->load()) rest();
  };
  return kInProgress;
}

}  // namespace

extern "C" {

extern const int dcoll_emulated_nccl;
const int dcoll_emulated_nccl = 1;

struct Id {
  std::array<std::byte, 128> bytes;
};

int ncclGetVersion(int* version) {
  *version = 22703;
  return kSuccess;
}

int ncclGetUniqueId(Id* id) {
  const std::string name = "/emulated-nccl-" + std::to_string(getpid()) + "-" + std::to_string(std::random_device()());
  std::memcpy(id->bytes.data(), name.c_str(), name.size() + 1);
  return kSuccess;
}

int ncclCommInitRankConfig(void** comm, int size, Id id, int rank, void* /*config*/) {
  const Failure fails = failure();
  if (fails.rank == rank && std::strcmp(fails.what, "init") == 0) return kSystemError;
  const auto* const name = reinterpret_cast<const char*>(id.bytes.data());
  const size_t bytes = sizeof(Shared) + static_cast<size_t>(size) * kChunk;
  const int file = shm_open(name, O_RDWR | O_CREAT, 0600);
  if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) return kSystemError;
  void* const at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (at == MAP_FAILED) return kSystemError;
  auto made = std::make_shared<Comm>();
  made->name = name;
  made->size = size;
  made->rank = rank;
  made->shared = static_cast<Shared*>(at);
  made->data = static_cast<std::byte*>(at) + sizeof(Shared);
  const std::string fate = fails.rank == rank ? fails.what : "";
  made->begun_in_vain = fate == "begun";
  if (fate == "lost") made->failed = kSystemError;
  if (fate != "lost" && fate != "never" && fate != "begun" && made->shared->joined.fetch_add(1) + 1 == size)
    shm_unlink(name);
  *comm = new Handle(std::move(made));
  return fate == "begun" ? kSystemError : kInProgress;
}

int ncclCommAbort(void* comm) {
  if (of(comm).begun_in_vain) std::fprintf(stderr, "what began in vain has been aborted\n");
  of(comm).aborted.store(true);
  shm_unlink(of(comm).name.c_str());  // not all have joined, or it is gone
  delete static_cast<Handle*>(comm);
  return kSuccess;
}

int ncclCommGetAsyncError(void* handle, int* state) {
  Comm& comm = of(handle);
  const bool waits = comm.failed == kSuccess && comm.shared->joined.load() < comm.size;
  *state = waits || comm.not_begun ? kInProgress : comm.failed;
  if (comm.not_begun) std::exchange(comm.not_begun, nullptr)();
  return kSuccess;
}

int ncclAllReduce(const void* in, void* out, size_t count, int type, int op, void* comm, void* stream) {
  const size_t bytes = count * dcoll::dtype_bytes(dtype_of(type));
  return begin(comm, stream, [=](Comm& self) {
    by_chunks(self, static_cast<const std::byte*>(in), static_cast<std::byte*>(out), bytes, reduction(type, op));
  });
}

int ncclReduceScatter(const void* in, void* out, size_t count, int type, int op, void* comm, void* stream) {
  const size_t bytes = count * dcoll::dtype_bytes(dtype_of(type));
  return begin(comm, stream, [=](Comm& self) {
    for (int rank = 0; rank < self.size; ++rank) {
      const auto* const part = static_cast<const std::byte*>(in) + static_cast<size_t>(rank) * bytes;
      auto* const to = rank == self.rank ? static_cast<std::byte*>(out) : nullptr;
      if (!by_chunks(self, part, to, bytes, reduction(type, op))) return;
    }
  });
}

int ncclBroadcast(const void* in, void* out, size_t count, int type, int root, void* comm, void* stream) {
  const size_t bytes = count * dcoll::dtype_bytes(dtype_of(type));
  return begin(comm, stream, [=](Comm& self) {
    const auto* const from = self.rank == root ? static_cast<const std::byte*>(in) : nullptr;
    by_chunks(self, from, static_cast<std::byte*>(out), bytes,
              [root](Comm& one, std::byte* to, size_t length) { std::memcpy(to, one.chunk(root), length); });
  });
}

int ncclAllGather(const void* in, void* out, size_t count, int type, void* comm, void* stream) {
  const size_t bytes = count * dcoll::dtype_bytes(dtype_of(type));
  return begin(comm, stream, [=](Comm& self) {
    for (int root = 0; root < self.size; ++root) {
      const auto* const from = self.rank == root ? static_cast<const std::byte*>(in) : nullptr;
      const auto take = [root](Comm& one, std::byte* to, size_t length) { std::memcpy(to, one.chunk(root), length); };
      if (!by_chunks(self, from, static_cast<std::byte*>(out) + static_cast<size_t>(root) * bytes, bytes, take)) return;
    }
  });
}

int ncclSend(const void* from, size_t count, int type, int peer, void* comm, void* stream) {
  if (!group.open) return kSystemError;  // it would wait for its receive
  group.comm = comm;
  group.stream = stream;
  group.messages[peer].from = static_cast<const std::byte*>(from);
  group.messages[peer].send = count * dcoll::dtype_bytes(dtype_of(type));
  return kSuccess;
}

int ncclRecv(void* to, size_t count, int type, int peer, void* comm, void* stream) {
  if (!group.open) return kSystemError;
  group.comm = comm;
  group.stream = stream;
  group.messages[peer].to = static_cast<std::byte*>(to);
  group.messages[peer].receive = count * dcoll::dtype_bytes(dtype_of(type));
  return kSuccess;
}

int ncclGroupStart() {
  if (group.open) return kSystemError;
  group = {};
  group.open = true;
  return kSuccess;
}

int ncclGroupEnd() {
  if (!group.open) return kSystemError;
  const Group all = std::exchange(group, {});
  if (all.comm == nullptr) return kSuccess;
  return begin(all.comm, all.stream, [messages = all.messages](Comm& self) { exchange(self, messages); });
}

const char* ncclGetErrorString(int result) {
  return result == kSystemError ? "unhandled system error" : "remote error";
}
const char* ncclGetLastError(void* /*comm*/) { return ""; }

}  // extern "C"
