// Memory of a GPU by CUDA's virtual memory management, which other processes open by descriptors: for GPUs and
// machines whose memory CUDA IPC does not share.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>

#include "base/thread_safety.h"
#include "device/device.h"

namespace dcoll::device {

// The device is the calling thread's current one. Functions throw DeviceError, which names it.
class VirtualMemory {
 public:
  // Of that device; `devices`: how many this process has.
  VirtualMemory(int number, int devices);
  ~VirtualMemory();
  void* allocate(size_t bytes);
  void* open(const Handle& handle);
  // Nothing works on it any more. False: it is none that was allocated or opened here.
  bool free(void* data) noexcept;
  std::optional<Handle> handle_of(void* data);
  // Why the last allocate() has failed.
  std::string failure();

 private:
  struct Mapping;
  void* keep(std::unique_ptr<Mapping> mapping);

  const int number_, devices_;
  Mutex mutex_;
  std::map<void*, std::unique_ptr<Mapping>> mappings_ DCOLL_GUARDED_BY(mutex_);
  std::string failure_ DCOLL_GUARDED_BY(mutex_);
};

}  // namespace dcoll::device
