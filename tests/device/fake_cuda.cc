// CUDA's driver beside fake_cudart.cc: what csrc/device asks it for. Memory of its virtual memory management is a
// memfd, which appears where it is mapped, and may be used there once that was allowed.
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

#include "device/fake_cudart.h"

namespace {

using Address = unsigned long long;
using Allocation = unsigned long long;
constexpr int kSuccess = 0, kInvalid = 1;

struct Location {
  int type, id;
};
struct Properties {
  int type, handle_types;
  Location location;
  void* windows;
  unsigned char flags[8];
};
struct Access {
  Location location;
  int flags;
};

std::mutex mutex;
std::map<Allocation, int> files;
Allocation last = 0;

Allocation keep(int file) {
  const std::lock_guard lock(mutex);
  files[++last] = file;
  return last;
}
int file_of(Allocation allocation) {
  const std::lock_guard lock(mutex);
  const auto found = files.find(allocation);
  return found != files.end() ? found->second : -1;
}
void* pointer(Address at) { return reinterpret_cast<void*>(at); }
bool whole(size_t bytes) { return bytes != 0 && bytes % fake_cudart::kGranularity == 0; }
bool asks_for_descriptors(const Properties* wanted) {
  return wanted->type == 1 && wanted->handle_types == 1 && wanted->location.type == 1;
}

}  // namespace

extern "C" {

int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  *flags = 0;
  *active = fake_cudart::contexts().contains(device) ? 1 : 0;
  return kSuccess;
}
int cuGetErrorString(int status, const char** text) {
  *text = status == kInvalid ? "invalid argument" : "refused";
  return kSuccess;
}
// All but the last device.
int cuDeviceCanAccessPeer(int* can, int device, int /*peer*/) {
  *can = device + 1 < fake_cudart::kDevices ? 1 : 0;
  return kSuccess;
}

int cuMemGetAllocationGranularity(size_t* bytes, const Properties* wanted, int /*option*/) {
  *bytes = fake_cudart::kGranularity;
  return asks_for_descriptors(wanted) ? fake_cudart::enter_driver("cuMemGetAllocationGranularity") : kInvalid;
}
int cuMemCreate(Allocation* made, size_t bytes, const Properties* wanted, unsigned long long flags) {
  if (const int refused = fake_cudart::enter_driver("cuMemCreate")) return refused;
  if (!whole(bytes) || !asks_for_descriptors(wanted) || flags != 0) return kInvalid;
  const int file = memfd_create("fake-cuda", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) return kInvalid;
  *made = keep(file);
  return kSuccess;
}
int cuMemRelease(Allocation allocation) {
  close(file_of(allocation));
  const std::lock_guard lock(mutex);
  return files.erase(allocation) == 1 ? fake_cudart::enter_driver("cuMemRelease") : kInvalid;
}
int cuMemAddressReserve(Address* at, size_t bytes, size_t /*alignment*/, Address /*wish*/, unsigned long long) {
  if (const int refused = fake_cudart::enter_driver("cuMemAddressReserve")) return refused;
  if (!whole(bytes)) return kInvalid;
  void* const data = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  *at = reinterpret_cast<Address>(data);
  return data != MAP_FAILED ? kSuccess : kInvalid;
}
int cuMemAddressFree(Address at, size_t bytes) {
  const int refused = fake_cudart::enter_driver("cuMemAddressFree");
  return munmap(pointer(at), bytes) == 0 ? refused : kInvalid;
}
int cuMemMap(Address at, size_t bytes, size_t offset, Allocation allocation, unsigned long long flags) {
  if (const int refused = fake_cudart::enter_driver("cuMemMap")) return refused;
  if (!whole(bytes) || offset != 0 || flags != 0) return kInvalid;
  const int file = file_of(allocation);
  return mmap(pointer(at), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, file, 0) != MAP_FAILED ? kSuccess : kInvalid;
}
int cuMemUnmap(Address at, size_t bytes) {
  const int refused = fake_cudart::enter_driver("cuMemUnmap");
  constexpr int kNothing = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  return mmap(pointer(at), bytes, PROT_NONE, kNothing, -1, 0) != MAP_FAILED ? refused : kInvalid;
}
int cuMemSetAccess(Address at, size_t bytes, const Access* access, size_t count) {
  if (const int refused = fake_cudart::enter_driver("cuMemSetAccess")) return refused;
  if (!whole(bytes) || count != 1 || access->location.type != 1 || access->flags != 3) return kInvalid;
  fake_cudart::note_access(pointer(at), access->location.id);
  return mprotect(pointer(at), bytes, PROT_READ | PROT_WRITE) == 0 ? kSuccess : kInvalid;
}
int cuMemExportToShareableHandle(void* descriptor, Allocation allocation, int type, unsigned long long flags) {
  if (const int refused = fake_cudart::enter_driver("cuMemExportToShareableHandle")) return refused;
  if (type != 1 || flags != 0) return kInvalid;
  const int given = dup(file_of(allocation));
  *static_cast<int*>(descriptor) = given;
  return given >= 0 ? kSuccess : kInvalid;
}
int cuMemImportFromShareableHandle(Allocation* found, void* descriptor, int type) {
  if (const int refused = fake_cudart::enter_driver("cuMemImportFromShareableHandle")) return refused;
  const int file = dup(static_cast<int>(reinterpret_cast<intptr_t>(descriptor)));
  if (type != 1 || file < 0) return kInvalid;
  *found = keep(file);
  return kSuccess;
}

}  // extern "C"
