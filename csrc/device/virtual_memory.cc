#include "device/virtual_memory.h"

#include <cstdint>
#include <utility>

#include "base/types.h"
#include "device/descriptors.h"
#include "device/symbol.h"

namespace dcoll::device {
namespace {

using DriverStatus = int;               // CUresult
using Address = unsigned long long;     // CUdeviceptr
using Allocation = unsigned long long;  // CUmemGenericAllocationHandle
constexpr int kPinned = 1;              // CU_MEM_ALLOCATION_TYPE_PINNED
constexpr int kDescriptor = 1;          // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
constexpr int kOnDevice = 1;            // CU_MEM_LOCATION_TYPE_DEVICE
constexpr int kReadWrite = 3;           // CU_MEM_ACCESS_FLAGS_PROT_READWRITE

struct Location {  // CUmemLocation
  int type, id;
};
struct Properties {  // CUmemAllocationProp
  int type, handle_types;
  Location location;
  void* for_windows;
  unsigned char flags[8];
};
struct Access {  // CUmemAccessDesc
  Location location;
  int flags;
};
static_assert(sizeof(Location) == 8 && sizeof(Properties) == 32 && sizeof(Access) == 12);

struct Driver final : Library {
  Driver() : Library({"libcuda.so.1"}) {}
  DriverStatus (*text)(DriverStatus, const char**) = find("cuGetErrorString");
  DriverStatus (*can_access)(int*, int, int) = find("cuDeviceCanAccessPeer");
  DriverStatus (*granularity)(size_t*, const Properties*, int) = find("cuMemGetAllocationGranularity");
  DriverStatus (*create)(Allocation*, size_t, const Properties*, unsigned long long) = find("cuMemCreate");
  DriverStatus (*release)(Allocation) = find("cuMemRelease");
  DriverStatus (*reserve)(Address*, size_t, size_t, Address, unsigned long long) = find("cuMemAddressReserve");
  DriverStatus (*unreserve)(Address, size_t) = find("cuMemAddressFree");
  DriverStatus (*map)(Address, size_t, size_t, Allocation, unsigned long long) = find("cuMemMap");
  DriverStatus (*unmap)(Address, size_t) = find("cuMemUnmap");
  DriverStatus (*allow)(Address, size_t, const Access*, size_t) = find("cuMemSetAccess");
  DriverStatus (*give)(void*, Allocation, int, unsigned long long) = find("cuMemExportToShareableHandle");
  DriverStatus (*take)(Allocation*, void*, int) = find("cuMemImportFromShareableHandle");
};

const Driver& driver() {
  static const Driver found;
  return found;
}

std::string name_of(int number) { return "cuda:" + std::to_string(number); }

void check(int number, DriverStatus status, const char* what) {
  if (status == 0) return;
  const char* text = nullptr;
  driver().text(status, &text);
  throw DeviceError(name_of(number) + ": " + what + " failed: " + (text != nullptr ? text : "an unknown error") +
                    " (CUDA error " + std::to_string(status) + ")");
}

// What is mapped lives on without it.
struct Held {
  ~Held() { driver().release(allocation); }
  const Allocation allocation;
};

}  // namespace

// Of what was made of it, the end undoes as much.
struct VirtualMemory::Mapping {
  explicit Mapping(size_t length) : bytes(length) {}
  ~Mapping() {
    if (mapped) driver().unmap(at, bytes);
    if (at != 0) driver().unreserve(at, bytes);
    if (shown) hide_descriptor(*shown);
  }
  void put(int number, const Held& held) {
    check(number, driver().reserve(&at, bytes, 0, 0, 0), "cuMemAddressReserve");
    check(number, driver().map(at, bytes, 0, held.allocation, 0), "cuMemMap");
    mapped = true;
    check(number, allow(number), "cuMemSetAccess");
  }
  DriverStatus allow(int number) const {
    const Access access{{kOnDevice, number}, kReadWrite};
    return driver().allow(at, bytes, &access, 1);
  }

  const size_t bytes;
  Address at = 0;
  bool mapped = false;
  std::optional<Handle> shown = std::nullopt;
};

VirtualMemory::VirtualMemory(int number, int devices) : number_(number), devices_(devices) {}
VirtualMemory::~VirtualMemory() = default;

void* VirtualMemory::allocate(size_t bytes) {
  try {
    if (!driver().missing.empty()) throw DeviceError(name_of(number_) + ": " + driver().missing);
    const Properties wanted{kPinned, kDescriptor, {kOnDevice, number_}, nullptr, {}};
    size_t unit = 0;
    check(number_, driver().granularity(&unit, &wanted, 0), "cuMemGetAllocationGranularity");
    auto mapping = std::make_unique<Mapping>(round_up(bytes, unit));
    Allocation made = 0;
    check(number_, driver().create(&made, mapping->bytes, &wanted, 0), "cuMemCreate");
    const Held held{made};
    int descriptor = -1;
    check(number_, driver().give(&descriptor, made, kDescriptor, 0), "cuMemExportToShareableHandle");
    mapping->shown = show_descriptor(name_of(number_), Fd(descriptor), mapping->bytes);
    mapping->put(number_, held);
    for (int other = 0; other < devices_; ++other) {  // which read what cudaMalloc() gives, if they can
      int can = 0;
      if (other != number_ && driver().can_access(&can, other, number_) == 0 && can != 0) mapping->allow(other);
    }
    return keep(std::move(mapping));
  } catch (const DeviceError& e) {
    const MutexLock lock(mutex_);
    failure_ = e.what();
    throw;
  }
}

void* VirtualMemory::open(const Handle& handle) {
  if (!driver().missing.empty()) throw DeviceError(name_of(number_) + ": " + driver().missing);
  const Taken taken = take_descriptor(name_of(number_), handle);
  auto mapping = std::make_unique<Mapping>(taken.bytes);
  Allocation found = 0;
  void* const descriptor = reinterpret_cast<void*>(static_cast<intptr_t>(taken.descriptor.get()));
  check(number_, driver().take(&found, descriptor, kDescriptor), "cuMemImportFromShareableHandle");
  const Held held{found};
  mapping->put(number_, held);
  return keep(std::move(mapping));
}

void* VirtualMemory::keep(std::unique_ptr<Mapping> mapping) {
  void* const data = reinterpret_cast<void*>(mapping->at);
  const MutexLock lock(mutex_);
  mappings_[data] = std::move(mapping);
  return data;
}

bool VirtualMemory::free(void* data) noexcept {
  const MutexLock lock(mutex_);
  return mappings_.erase(data) != 0;
}

std::optional<Handle> VirtualMemory::handle_of(void* data) {
  const MutexLock lock(mutex_);
  const auto found = mappings_.find(data);
  return found != mappings_.end() ? found->second->shown : std::nullopt;
}

std::string VirtualMemory::failure() {
  const MutexLock lock(mutex_);
  return failure_;
}

}  // namespace dcoll::device
