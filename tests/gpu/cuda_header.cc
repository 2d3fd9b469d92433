// What csrc/device/cuda.cc takes for granted, against CUDA's own header. It is compiled, and not run.
#include <cuda_runtime_api.h>

#include <cstddef>
#include <type_traits>

template <typename Function, typename... Arguments>
constexpr bool takes = std::is_same_v<Function, cudaError_t(Arguments...)>;

static_assert(takes<decltype(cudaGetDeviceCount), int*>);
static_assert(takes<decltype(cudaGetDevice), int*>);
static_assert(takes<decltype(cudaSetDevice), int>);
static_assert(takes<decltype(cudaThreadExchangeStreamCaptureMode), cudaStreamCaptureMode*>);
static_assert(takes<decltype(cudaDeviceGetPCIBusId), char*, int, int>);
static_assert(takes<decltype(cudaMalloc), void**, size_t>);
static_assert(takes<decltype(cudaFree), void*>);
static_assert(takes<decltype(cudaHostRegister), void*, size_t, unsigned>);
static_assert(takes<decltype(cudaHostUnregister), void*>);
static_assert(takes<decltype(cudaDeviceGetStreamPriorityRange), int*, int*>);
static_assert(takes<decltype(cudaStreamCreateWithPriority), cudaStream_t*, unsigned, int>);
static_assert(takes<decltype(cudaStreamDestroy), cudaStream_t>);
static_assert(takes<decltype(cudaStreamSynchronize), cudaStream_t>);
static_assert(takes<decltype(cudaStreamIsCapturing), cudaStream_t, cudaStreamCaptureStatus*>);
static_assert(takes<decltype(cudaStreamWaitEvent), cudaStream_t, cudaEvent_t, unsigned>);
static_assert(takes<decltype(cudaEventCreateWithFlags), cudaEvent_t*, unsigned>);
static_assert(takes<decltype(cudaEventDestroy), cudaEvent_t>);
static_assert(takes<decltype(cudaEventRecord), cudaEvent_t, cudaStream_t>);
static_assert(takes<decltype(cudaEventQuery), cudaEvent_t>);
static_assert(takes<decltype(cudaMemcpyAsync), void*, const void*, size_t, cudaMemcpyKind, cudaStream_t>);
static_assert(takes<decltype(cudaIpcGetMemHandle), cudaIpcMemHandle_t*, void*>);
static_assert(takes<decltype(cudaIpcOpenMemHandle), void**, cudaIpcMemHandle_t, unsigned>);
static_assert(takes<decltype(cudaIpcCloseMemHandle), void*>);
static_assert(takes<decltype(cudaDeviceSynchronize)>);
static_assert(takes<decltype(cudaGetLastError)>);
static_assert(std::is_same_v<decltype(cudaGetErrorString), const char*(cudaError_t)>);

static_assert(sizeof(cudaIpcMemHandle_t) == 64 && alignof(cudaIpcMemHandle_t) == 1);
static_assert(std::is_pointer_v<cudaStream_t> && std::is_pointer_v<cudaEvent_t>);
static_assert(sizeof(cudaError_t) == 4 && sizeof(cudaMemcpyKind) == 4);
static_assert(sizeof(cudaStreamCaptureMode) == 4 && sizeof(cudaStreamCaptureStatus) == 4);

static_assert(cudaSuccess == 0 && cudaErrorNotReady == 600 && cudaErrorStreamCaptureImplicit == 906);
static_assert(cudaEventDisableTiming == 2 && cudaHostRegisterPortable == 1 && cudaStreamNonBlocking == 1);
static_assert(cudaMemcpyDefault == 4 && cudaIpcMemLazyEnablePeerAccess == 1);
static_assert(cudaStreamCaptureModeGlobal == 0 && cudaStreamCaptureModeRelaxed == 2);
static_assert(cudaStreamCaptureStatusNone == 0);
