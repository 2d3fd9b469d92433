// What csrc/device/nccl.cc takes for granted, against NCCL's own header. It is compiled, and not run.
#include <nccl.h>

#include <cstddef>
#include <type_traits>

template <typename Function, typename... Arguments>
constexpr bool takes = std::is_same_v<Function, ncclResult_t(Arguments...)>;

using In = const void*;
static_assert(takes<decltype(ncclGetVersion), int*>);
static_assert(takes<decltype(ncclGetUniqueId), ncclUniqueId*>);
static_assert(takes<decltype(ncclCommInitRankConfig), ncclComm_t*, int, ncclUniqueId, int, ncclConfig_t*>);
static_assert(takes<decltype(ncclCommAbort), ncclComm_t>);
static_assert(takes<decltype(ncclCommGetAsyncError), ncclComm_t, ncclResult_t*>);
static_assert(takes<decltype(ncclAllReduce), In, void*, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t>);
static_assert(
    takes<decltype(ncclReduceScatter), In, void*, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t>);
static_assert(takes<decltype(ncclBroadcast), In, void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t>);
static_assert(takes<decltype(ncclAllGather), In, void*, size_t, ncclDataType_t, ncclComm_t, cudaStream_t>);
static_assert(takes<decltype(ncclSend), In, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t>);
static_assert(takes<decltype(ncclRecv), void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t>);
static_assert(takes<decltype(ncclGroupStart)> && takes<decltype(ncclGroupEnd)>);
static_assert(std::is_same_v<decltype(ncclGetErrorString), const char*(ncclResult_t)>);
static_assert(std::is_same_v<decltype(ncclGetLastError), const char*(ncclComm_t)>);

static_assert(sizeof(ncclUniqueId) == 128);
static_assert(sizeof(ncclResult_t) == 4 && sizeof(ncclDataType_t) == 4 && sizeof(ncclRedOp_t) == 4);
static_assert(offsetof(ncclConfig_t, size) == 0 && offsetof(ncclConfig_t, magic) == 8);
static_assert(offsetof(ncclConfig_t, version) == 12 && offsetof(ncclConfig_t, blocking) == 16);

static_assert(ncclSuccess == 0 && ncclInProgress == 7);
static_assert(ncclInt8 == 0 && ncclUint8 == 1 && ncclInt32 == 2 && ncclUint32 == 3 && ncclInt64 == 4);
static_assert(ncclUint64 == 5 && ncclFloat16 == 6 && ncclFloat32 == 7 && ncclFloat64 == 8 && ncclBfloat16 == 9);
static_assert(ncclSum == 0 && ncclProd == 1 && ncclMax == 2 && ncclMin == 3 && ncclAvg == 4);
