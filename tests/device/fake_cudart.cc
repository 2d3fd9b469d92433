#include "device/fake_cudart.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <utility>

namespace fake_cudart {
namespace {

constexpr int kSuccess = 0, kInvalid = 1, kNotReady = 600, kLaunchFailure = 719, kRefused = 801, kUnsupported = 900,
              kIsolation = 905, kImplicit = 906;

struct Stream {
  std::atomic<bool> captured{false}, held{false};
};
struct Event {
  const Stream* stream = nullptr;
};
struct State {
  std::mutex mutex;
  std::map<int, std::string> contexts;
  std::vector<std::string> broken;
  std::set<std::string> failing;
  std::map<const void*, std::set<int>> allowed;
  bool captures = false, captures_beside_default = false;
};
State& state() {
  static State all;
  return all;
}
thread_local int current = 0, thread_mode = kGlobal, last = kSuccess;

// Of a call that works on the current device.
int enter(const char* call) {
  const std::lock_guard lock(state().mutex);
  state().contexts.emplace(current, call);
  return state().failing.contains(call) ? kLaunchFailure : kSuccess;
}

bool breaks(const char* call, bool always = false) {
  const std::lock_guard lock(state().mutex);
  if (!state().captures || (thread_mode == kRelaxed && !always)) return false;
  state().broken.emplace_back(call);
  return true;
}

// Of one that is unsafe while a graph is captured. CUDA's documentation names few; others have been found out, and here
// all are that may be.
int enter_unsafe(const char* call, bool always = false) {
  const int entered = enter(call);
  return breaks(call, always) ? kUnsupported : entered;
}

}  // namespace

std::map<int, std::string> contexts() {
  const std::lock_guard lock(state().mutex);
  return state().contexts;
}
void capture_elsewhere(bool captures) {
  const std::lock_guard lock(state().mutex);
  state().captures = captures;
}
std::vector<std::string> broken() {
  const std::lock_guard lock(state().mutex);
  return state().broken;
}
int mode() { return thread_mode; }
void capture(void* stream, bool captures) { static_cast<Stream*>(stream)->captured = captures; }
void hold_up(void* stream, bool held) { static_cast<Stream*>(stream)->held = held; }
void capture_beside_default(bool captures) {
  const std::lock_guard lock(state().mutex);
  state().captures_beside_default = captures;
}
int last_error() { return last; }
void fail(const std::string& call) {
  const std::lock_guard lock(state().mutex);
  state().failing.insert(call);
}
std::set<int> devices_of(const void* data) {
  const std::lock_guard lock(state().mutex);
  return state().allowed[data];
}
int enter_driver(const char* call) {
  if (breaks(call)) return kUnsupported;
  const std::lock_guard lock(state().mutex);
  return state().failing.contains(call) ? kRefused : kSuccess;
}
void note_access(const void* data, int device) {
  const std::lock_guard lock(state().mutex);
  state().allowed[data].insert(device);
}
void reset() {
  const std::lock_guard lock(state().mutex);
  state().contexts.clear();
  state().broken.clear();
  state().failing.clear();
  state().allowed.clear();
  state().captures = state().captures_beside_default = false;
}

}  // namespace fake_cudart

using namespace fake_cudart;

extern "C" {

using Handle = std::array<std::byte, 64>;

int cudaGetDeviceCount(int* count) {
  *count = kDevices;
  return kSuccess;
}
int cudaGetDevice(int* device) {
  *device = current;
  return kSuccess;
}
int cudaSetDevice(int device) {
  if (device < 0 || device >= kDevices) return kInvalid;
  current = device;
  return enter("cudaSetDevice");
}
int cudaDeviceGetPCIBusId(char* id, int length, int device) {
  std::snprintf(id, static_cast<size_t>(length), "0000:%02x:00.0", static_cast<unsigned>(device));
  return kSuccess;
}
const char* cudaGetErrorString(int status) { return status == kLaunchFailure ? "launch failure" : "another error"; }
int cudaGetLastError() { return std::exchange(last, kSuccess); }
int cudaThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(thread_mode, *mode);
  return enter("cudaThreadExchangeStreamCaptureMode");
}

int cudaMalloc(void** data, size_t bytes) {
  const int entered = enter_unsafe("cudaMalloc");
  *data = entered == kSuccess ? std::malloc(bytes) : nullptr;
  return entered;
}
int cudaFree(void* data) {
  std::free(data);
  return enter_unsafe("cudaFree");
}
int cudaHostRegister(void* /*data*/, size_t /*bytes*/, unsigned /*flags*/) { return enter_unsafe("cudaHostRegister"); }
int cudaHostUnregister(void* /*data*/) { return enter_unsafe("cudaHostUnregister"); }
int cudaIpcGetMemHandle(Handle* handle, void* data) {
  std::memcpy(handle->data(), static_cast<void*>(&data), sizeof(data));
  return enter_unsafe("cudaIpcGetMemHandle");
}
int cudaIpcOpenMemHandle(void** data, Handle handle, unsigned /*flags*/) {
  std::memcpy(static_cast<void*>(data), handle.data(), sizeof(*data));
  return enter_unsafe("cudaIpcOpenMemHandle");
}
int cudaIpcCloseMemHandle(void* /*data*/) { return enter_unsafe("cudaIpcCloseMemHandle"); }
int cudaMemcpyAsync(void* to, const void* from, size_t bytes, int /*kind*/, void* /*stream*/) {
  std::memcpy(to, from, bytes);
  return enter("cudaMemcpyAsync");
}
int cudaDeviceSynchronize() { return enter_unsafe("cudaDeviceSynchronize", /*always=*/true); }

int cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = *greatest = 0;
  return enter("cudaDeviceGetStreamPriorityRange");
}
int cudaStreamCreateWithPriority(void** stream, unsigned /*flags*/, int /*priority*/) {
  *stream = new Stream;
  return enter_unsafe("cudaStreamCreateWithPriority");
}
int cudaStreamDestroy(void* stream) {
  delete static_cast<Stream*>(stream);
  return enter_unsafe("cudaStreamDestroy");
}
int cudaStreamSynchronize(void* /*stream*/) { return enter_unsafe("cudaStreamSynchronize"); }
int cudaStreamIsCapturing(void* stream, int* status) {
  {
    const std::lock_guard lock(state().mutex);
    if (stream == nullptr && state().captures_beside_default) return last = kImplicit;
  }
  *status = stream != nullptr && static_cast<Stream*>(stream)->captured ? 1 : 0;
  return enter("cudaStreamIsCapturing");
}
// No event here was recorded in a capture, so a stream that is captured cannot wait for it.
int cudaStreamWaitEvent(void* stream, void* /*event*/, unsigned /*flags*/) {
  const int entered = enter("cudaStreamWaitEvent");
  if (stream == nullptr || !static_cast<Stream*>(stream)->captured) return entered;
  const std::lock_guard lock(state().mutex);
  state().broken.emplace_back("cudaStreamWaitEvent");
  return kIsolation;
}

int cudaEventCreateWithFlags(void** event, unsigned /*flags*/) {
  *event = new Event;
  return enter("cudaEventCreateWithFlags");
}
int cudaEventDestroy(void* event) {
  delete static_cast<Event*>(event);
  return enter("cudaEventDestroy");
}
int cudaEventRecord(void* event, void* stream) {
  static_cast<Event*>(event)->stream = static_cast<Stream*>(stream);
  return enter("cudaEventRecord");
}
int cudaEventQuery(void* event) {
  const int entered = enter_unsafe("cudaEventQuery");
  const Stream* const stream = static_cast<Event*>(event)->stream;
  return entered == kSuccess && stream != nullptr && stream->held ? kNotReady : entered;
}

}  // extern "C"
