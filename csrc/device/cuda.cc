// CUDA's runtime, found when it is first needed: one build runs with and without a driver. Where torch has loaded its
// own libcudart, that one is used, so that no process has two.
#include <dlfcn.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "base/settings.h"
#include "base/thread_safety.h"
#include "device/descriptors.h"
#include "device/device.h"
#include "device/symbol.h"
#include "device/virtual_memory.h"
#if DCOLL_CUDA
#include "kernels/cuda.h"
#include "kernels/cuda_status.h"
#endif

namespace dcoll::device {
namespace {

using Status = int;  // cudaError_t
using CudaEvent = void*;
constexpr Status kSuccess = 0, kNotReady = 600, kCaptureImplicit = 906;
constexpr unsigned kNoTiming = 2;     // cudaEventDisableTiming
constexpr unsigned kAnyContext = 1;   // cudaHostRegisterPortable
constexpr unsigned kNonBlocking = 1;  // cudaStreamNonBlocking
constexpr int kFromAddresses = 4;     // cudaMemcpyDefault
constexpr unsigned kPeerAccess = 1;   // cudaIpcMemLazyEnablePeerAccess
constexpr int kRelaxed = 2;           // cudaStreamCaptureModeRelaxed
constexpr std::string_view kWay = "DCOLL_GPU_SHARE", kIpcAlone = "ipc", kDescriptorsAlone = "descriptors";

struct Runtime final : Library {
  Runtime() : Library({"libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0", "libcudart.so"}) {
    if (library_ == nullptr) missing = "no libcudart (of CUDA 11 to 13) is loaded or found";
  }
  static Symbol find_in_driver(const char* name) {
    void* const driver = dlopen("libcuda.so.1", RTLD_NOW);
    return {driver != nullptr ? dlsym(driver, name) : nullptr};
  }

  Status (*count_devices)(int*) = find("cudaGetDeviceCount");
  Status (*get_device)(int*) = find("cudaGetDevice");
  Status (*set_device)(int) = find("cudaSetDevice");
  Status (*capture_mode)(int*) = find("cudaThreadExchangeStreamCaptureMode");
  Status (*bus_id)(char*, int, int) = find("cudaDeviceGetPCIBusId");
  Status (*malloc)(void**, size_t) = find("cudaMalloc");
  Status (*free)(void*) = find("cudaFree");
  Status (*host_register)(void*, size_t, unsigned) = find("cudaHostRegister");
  Status (*host_unregister)(void*) = find("cudaHostUnregister");
  Status (*priorities)(int*, int*) = find("cudaDeviceGetStreamPriorityRange");
  Status (*stream_create)(Stream*, unsigned, int) = find("cudaStreamCreateWithPriority");
  Status (*stream_destroy)(Stream) = find("cudaStreamDestroy");
  Status (*stream_synchronize)(Stream) = find("cudaStreamSynchronize");
  Status (*stream_capture)(Stream, int*) = find("cudaStreamIsCapturing");
  Status (*stream_wait)(Stream, CudaEvent, unsigned) = find("cudaStreamWaitEvent");
  Status (*event_create)(CudaEvent*, unsigned) = find("cudaEventCreateWithFlags");
  Status (*event_destroy)(CudaEvent) = find("cudaEventDestroy");
  Status (*event_record)(CudaEvent, Stream) = find("cudaEventRecord");
  Status (*event_query)(CudaEvent) = find("cudaEventQuery");
  Status (*copy)(void*, const void*, size_t, int, Stream) = find("cudaMemcpyAsync");
  Status (*get_handle)(Handle*, void*) = find("cudaIpcGetMemHandle");  // the layout of cudaIpcMemHandle_t
  Status (*open_handle)(void**, Handle, unsigned) = find("cudaIpcOpenMemHandle");
  Status (*close_handle)(void*) = find("cudaIpcCloseMemHandle");
  Status (*synchronize)() = find("cudaDeviceSynchronize");
  // Of the driver, which whoever has a context has loaded. May be null.
  int (*context_state)(int, unsigned*, int*) = find_in_driver("cuDevicePrimaryCtxGetState");
  const char* (*error_text)(Status) = find("cudaGetErrorString");
  Status (*last_error)() = find("cudaGetLastError");  // and forgets it, where it can be forgotten
};

const Runtime& runtime() {
  static const Runtime found;
  return found;
}

void check(int device, Status status, const char* what) {
  if (status == kSuccess) return;
  runtime().last_error();
  throw DeviceError("cuda:" + std::to_string(device) + ": " + what + " failed: " + runtime().error_text(status) +
                    " (CUDA error " + std::to_string(status) + ")");
}

// For every call that looks at the device: of one that comes without it, the runtime gives the thread's current device
// a context, in most threads that of device 0. What is current is the caller's business; so is the capture mode, which
// is relaxed here: nothing of ours goes into a graph, and in any other mode we would break one that another thread
// captures.
class Current {
 public:
  explicit Current(int device) {
    check(device, runtime().get_device(&before_), "cudaGetDevice");
    if (before_ != device) check(device, runtime().set_device(device), "cudaSetDevice");
    changed_ = before_ != device;
    relaxed_ = runtime().capture_mode(&mode_) == kSuccess;  // makes a context too: behind set_device
  }
  ~Current() {
    if (relaxed_) runtime().capture_mode(&mode_);
    if (restores()) runtime().set_device(before_);
  }
  // To make a device current gives it a context, some hundred MB: one that has none is nobody's current device.
  bool restores() const {
    unsigned flags = 0;
    int active = 1;
    if (changed_ && runtime().context_state != nullptr) runtime().context_state(before_, &flags, &active);
    return changed_ && active != 0;
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  int before_ = 0, mode_ = kRelaxed;
  bool changed_ = false, relaxed_ = false;
};

// What may fail without harm: a device that has failed does nothing any more.
template <typename Call>
void let_go(int device, const Call& call) noexcept {
  try {
    const Current current(device);
    if (call() != kSuccess) runtime().last_error();
  } catch (const DeviceError&) {
  }
}

class RuntimeEvent final : public Event {
 public:
  explicit RuntimeEvent(int device) : device_(device) {
    const Current current(device);
    check(device, runtime().event_create(&event_, kNoTiming), "cudaEventCreateWithFlags");
  }
  ~RuntimeEvent() override {
    let_go(device_, [this] { return runtime().event_destroy(event_); });
  }
  void record(Stream stream) override {
    const Current current(device_);
    check(device_, runtime().event_record(event_, stream), "cudaEventRecord");
  }
  void hold(Stream stream) override {
    const Current current(device_);
    check(device_, runtime().stream_wait(stream, event_, 0), "cudaStreamWaitEvent");
  }
  bool done() override {
    const Current current(device_);
    const Status status = runtime().event_query(event_);
    if (status == kNotReady) {
      runtime().last_error();  // or torch's next check finds it
      return false;
    }
    check(device_, status, "what was put into a stream");
    return true;
  }
  // cudaEventSynchronize() keeps a core busy, or, of an event that is made not to, each one interrupts the host.
  void wait() override {
    while (!done()) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }

 private:
  int device_;
  CudaEvent event_ = nullptr;
};

class Cuda final : public Device {
 public:
  Cuda(int number, int devices) : number_(number), virtual_memory_(number, devices) {}
  std::string name() const override { return "cuda:" + std::to_string(number_); }
  std::string place() override {
    std::array<char, 32> id{};
    check(number_, runtime().bus_id(id.data(), static_cast<int>(id.size()), number_), "cudaDeviceGetPCIBusId");
    return id.data();
  }
  bool has_kernels() override {
#if DCOLL_CUDA
    if (has_kernels_.load(std::memory_order_relaxed)) return true;
    try {
      launch([&] {
        has_kernels_.store(kernels::cuda::load_reductions() && kernels::cuda::load_casts(), std::memory_order_relaxed);
      });
      return has_kernels_.load(std::memory_order_relaxed);
    } catch (const DeviceError&) {  // its driver is older than the runtime that the kernels are linked with
    }
#endif
    return false;
  }
  void as_current(const std::function<void()>& call) override {
    const Current current(number_);
    call();
  }
  // By cudaMalloc(), unless CUDA IPC does not show that, or is not to be used.
  void* allocate(size_t bytes) override {
    const Current current(number_);
    const std::string way = setting_text(kWay);
    if (way != kDescriptorsAlone) {
      void* const data = allocate_plain(bytes);
      Handle handle;
      if (way == kIpcAlone || runtime().get_handle(&handle, data) == kSuccess) return data;
      runtime().last_error();
      check(number_, runtime().free(data), "cudaFree");
    }
    try {
      return virtual_memory_.allocate(bytes);
    } catch (const DeviceError&) {  // handle_of() says so
      return allocate_plain(bytes);
    }
  }
  void free(void* data) noexcept override {
    let_go(number_, [&] { return virtual_memory_.free(data) ? kSuccess : runtime().free(data); });
  }
  Handle handle_of(void* data) override {
    if (const auto handle = virtual_memory_.handle_of(data)) return *handle;
    const Current current(number_);
    Handle handle{};
    const std::string way = setting_text(kWay);
    if (way == kDescriptorsAlone) throw DeviceError(virtual_memory_.failure());
    try {
      check(number_, runtime().get_handle(&handle, data), "cudaIpcGetMemHandle");
    } catch (const DeviceError& e) {
      if (way == kIpcAlone) throw;
      throw DeviceError(std::string(e.what()) + ", and " + virtual_memory_.failure());
    }
    return handle;
  }
  void* open(const Handle& handle) override {
    const Current current(number_);
    if (has_descriptor(handle)) return virtual_memory_.open(handle);
    void* opened = nullptr;
    check(number_, runtime().open_handle(&opened, handle, kPeerAccess), "cudaIpcOpenMemHandle");
    return opened;
  }
  void close(void* opened) noexcept override {  // it was the exporter's, who may be gone
    let_go(number_, [&] { return virtual_memory_.free(opened) ? kSuccess : runtime().close_handle(opened); });
  }
  bool pin(void* data, size_t bytes) override {
    const Current current(number_);
    if (runtime().host_register(data, bytes, kAnyContext) == kSuccess) return true;
    runtime().last_error();
    return false;
  }
  void unpin(void* data) noexcept override {
    let_go(number_, [data] { return runtime().host_unregister(data); });
  }
  Stream make_stream() override {
    const Current current(number_);
    int least = 0, greatest = 0;
    check(number_, runtime().priorities(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
    Stream stream = nullptr;
    check(number_, runtime().stream_create(&stream, kNonBlocking, greatest), "cudaStreamCreateWithPriority");
    return stream;
  }
  void destroy_stream(Stream stream) noexcept override {
    let_go(number_, [stream] { return runtime().stream_destroy(stream); });
  }
  bool is_capturing(Stream stream) override {
    const Current current(number_);
    int captures = 0;  // cudaStreamCaptureStatusNone
    const Status status = runtime().stream_capture(stream, &captures);
    if (status == kCaptureImplicit) {  // the default stream, while one that waits for it is captured
      runtime().last_error();
      return true;
    }
    check(number_, status, "cudaStreamIsCapturing");
    return captures != 0;
  }
  std::unique_ptr<Event> make_event() override { return std::make_unique<RuntimeEvent>(number_); }
  void copy(void* to, const void* from, size_t bytes, Stream stream) override {
    if (bytes == 0) return;
    const Current current(number_);
    check(number_, runtime().copy(to, from, bytes, kFromAddresses, stream), "cudaMemcpyAsync");
  }
  void wait_for_all() override {
    const Current current(number_);
    check(number_, runtime().synchronize(), "what was put into a stream");
  }
  void drain(Stream stream) noexcept override {
    let_go(number_, [stream] { return runtime().stream_synchronize(stream); });
  }
  void reduce_n_to_n(std::span<void* const> to, std::span<const void* const> from, size_t count, DType dtype,
                     ReduceOp op, double scale, Stream stream) override {
#if DCOLL_CUDA
    launch([&] { kernels::cuda::reduce_n_to_n(to, from, count, dtype, op, scale, stream); });
#else
    refuse(to, from, count, dtype, op, scale, stream);
#endif
  }
  void scale(void* to, const void* from, size_t count, DType dtype, double factor, Stream stream) override {
#if DCOLL_CUDA
    launch([&] { kernels::cuda::scale(to, from, count, dtype, factor, stream); });
#else
    refuse(to, from, count, dtype, factor, stream);
#endif
  }
  void cast(void* to, DType to_type, const void* from, DType from_type, size_t count, Stream stream) override {
#if DCOLL_CUDA
    launch([&] { kernels::cuda::cast(to, to_type, from, from_type, count, stream); });
#else
    refuse(to, to_type, from, from_type, count, stream);
#endif
  }

 private:
  void* allocate_plain(size_t bytes) const {
    void* data = nullptr;
    check(number_, runtime().malloc(&data, bytes), "cudaMalloc");
    return data;
  }
#if DCOLL_CUDA
  template <typename Launch>
  void launch(const Launch& work) {
    try {
      const Current current(number_);
      const kernels::cuda::CurrentDevice for_kernels(number_, current.restores());
      work();
    } catch (const DeviceError&) {
      throw;
    } catch (const Error& e) {
      throw DeviceError(name() + ": " + e.what());
    }
  }
#else
  template <typename... Arguments>
  [[noreturn]] void refuse(const Arguments&...) const {
    throw DeviceError(name() + ": this build of dcoll has no CUDA kernels");
  }
#endif
  int number_;
  VirtualMemory virtual_memory_;
#if DCOLL_CUDA
  std::atomic<bool> has_kernels_{false};  // and has loaded them
#endif
};

}  // namespace

Device& cuda_device(int number) {
  const std::string name = "cuda:" + std::to_string(number);
  if (!runtime().missing.empty()) throw ArgumentError(name + " cannot be used: " + runtime().missing + ".");
  static Mutex mutex;
  static auto* devices = new std::vector<std::unique_ptr<Cuda>>;  // never destroyed
  const MutexLock lock(mutex);
  if (devices->empty()) {
    int count = 0;
    const Status status = runtime().count_devices(&count);
    if (status != kSuccess) {
      runtime().last_error();
      throw ArgumentError(name + " cannot be used: " + runtime().error_text(status) + ".");
    }
    for (int i = 0; i < count; ++i) devices->push_back(std::make_unique<Cuda>(i, count));
  }
  if (number < 0 || static_cast<size_t>(number) >= devices->size()) {
    throw ArgumentError(name + " does not exist; this process sees " + std::to_string(devices->size()) +
                        " (CUDA_VISIBLE_DEVICES).");
  }
  return *(*devices)[static_cast<size_t>(number)];
}

}  // namespace dcoll::device
