// What csrc/device/cuda.cc and virtual_memory.cc take for granted, against CUDA's own headers. It is compiled, and not
// run.
#include <cuda.h>
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

// The driver: what is looked up by a name has to be called so.
#if defined(cuGetErrorString) || defined(cuDeviceCanAccessPeer) || defined(cuMemGetAllocationGranularity) ||        \
    defined(cuMemCreate) || defined(cuMemRelease) || defined(cuMemAddressReserve) || defined(cuMemAddressFree) ||   \
    defined(cuMemMap) || defined(cuMemUnmap) || defined(cuMemSetAccess) || defined(cuMemExportToShareableHandle) || \
    defined(cuMemImportFromShareableHandle) || defined(cuDevicePrimaryCtxGetState)
#error "the header gives a function of the driver another version"
#endif

template <typename Function, typename... Arguments>
constexpr bool driver_takes = std::is_same_v<Function, CUresult(Arguments...)>;

static_assert(driver_takes<decltype(cuDevicePrimaryCtxGetState), CUdevice, unsigned*, int*>);
static_assert(driver_takes<decltype(cuGetErrorString), CUresult, const char**>);
static_assert(driver_takes<decltype(cuDeviceCanAccessPeer), int*, CUdevice, CUdevice>);
static_assert(driver_takes<decltype(cuMemGetAllocationGranularity), size_t*, const CUmemAllocationProp*,
                           CUmemAllocationGranularity_flags>);
static_assert(driver_takes<decltype(cuMemCreate), CUmemGenericAllocationHandle*, size_t, const CUmemAllocationProp*,
                           unsigned long long>);
static_assert(driver_takes<decltype(cuMemRelease), CUmemGenericAllocationHandle>);
static_assert(
    driver_takes<decltype(cuMemAddressReserve), CUdeviceptr*, size_t, size_t, CUdeviceptr, unsigned long long>);
static_assert(driver_takes<decltype(cuMemAddressFree), CUdeviceptr, size_t>);
static_assert(
    driver_takes<decltype(cuMemMap), CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long>);
static_assert(driver_takes<decltype(cuMemUnmap), CUdeviceptr, size_t>);
static_assert(driver_takes<decltype(cuMemSetAccess), CUdeviceptr, size_t, const CUmemAccessDesc*, size_t>);
static_assert(driver_takes<decltype(cuMemExportToShareableHandle), void*, CUmemGenericAllocationHandle,
                           CUmemAllocationHandleType, unsigned long long>);
static_assert(driver_takes<decltype(cuMemImportFromShareableHandle), CUmemGenericAllocationHandle*, void*,
                           CUmemAllocationHandleType>);

static_assert(std::is_same_v<CUdevice, int> && std::is_same_v<CUdeviceptr, unsigned long long>);
static_assert(std::is_same_v<CUmemGenericAllocationHandle, unsigned long long>);
static_assert(sizeof(CUresult) == 4 && sizeof(CUmemAllocationHandleType) == 4);
static_assert(sizeof(CUmemAllocationGranularity_flags) == 4 && CU_MEM_ALLOC_GRANULARITY_MINIMUM == 0);
static_assert(CUDA_SUCCESS == 0 && CU_MEM_ALLOCATION_TYPE_PINNED == 1 && CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR == 1);
static_assert(CU_MEM_LOCATION_TYPE_DEVICE == 1 && CU_MEM_ACCESS_FLAGS_PROT_READWRITE == 3);

static_assert(sizeof(CUmemLocation) == 8 && offsetof(CUmemLocation, type) == 0 && offsetof(CUmemLocation, id) == 4);
static_assert(sizeof(CUmemAllocationProp) == 32 && offsetof(CUmemAllocationProp, type) == 0 &&
              offsetof(CUmemAllocationProp, requestedHandleTypes) == 4 &&
              offsetof(CUmemAllocationProp, location) == 8 &&
              offsetof(CUmemAllocationProp, win32HandleMetaData) == 16 &&
              offsetof(CUmemAllocationProp, allocFlags) == 24);
static_assert(sizeof(CUmemAccessDesc) == 12 && offsetof(CUmemAccessDesc, location) == 0 &&
              offsetof(CUmemAccessDesc, flags) == 8);
