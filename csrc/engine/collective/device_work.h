// What one rank does of a collective that stays on the device (on_device.h): it shows its operand, where the others can
// read it, and then reduces, or takes, what is meant for it. A long operand that others cannot open is shown in slices.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "engine/collective/fabric.h"
#include "engine/core/operation.h"
#include "engine/core/staging.h"

namespace dcoll {

class DeviceWork {
 public:
  DeviceWork(Fabric& fabric, Operation& operation);
  virtual ~DeviceWork() = default;
  DeviceWork(const DeviceWork&) = delete;
  DeviceWork& operator=(const DeviceWork&) = delete;

  // Brings the operand, or its first slice, to where others read it. False, and why: there is no room for that.
  bool prepare(std::string& why);
  bool ready() const { return in_ != Window::kUnmapped; }
  // What the next post says.
  virtual BoardEntry::Post post(bool by_host) = 0;

  // All ranks are ready and said so in the post `ticket`.
  virtual void begin(uint64_t ticket) = 0;
  // All operands, or slices of them, are where that post says: puts this rank's part into the stream.
  virtual void move(uint64_t ticket) = 0;
  // All ranks' parts are done. False: that was all; else the next slice is being shown.
  virtual bool next() = 0;
  // What the timeline calls it.
  virtual std::string_view form() const = 0;

 protected:
  static constexpr size_t kSlice = DeviceMemory::kSliceBytes;

  // Whether others wait for this rank's operand.
  virtual bool gives() const { return true; }
  // Whether others write to its result.
  virtual bool shows_result() const = 0;
  bool is_small() const { return request_.bytes() <= DeviceMemory::kSmallBytes; }
  BoardEntry::Post post(uint64_t second, bool by_host) const;
  // Copies a part of the operand to where others read it.
  void show(size_t begin, size_t bytes);

  Fabric& f_;
  DeviceMemory& memory_;
  Staging& staging_;
  Operation& op_;
  const Request& request_;
  const int device_;
  bool in_place_ = false;
  std::byte* block_ = nullptr;  // what others read else: all of a small operand, a slice of a long one
  uint64_t in_ = Window::kUnmapped, out_ = Window::kUnmapped;
  size_t slice_ = 0;  // bytes
};

// The fabric has device memory (stays_on_device()).
std::unique_ptr<DeviceWork> device_work(Fabric& fabric, Operation& operation);

}  // namespace dcoll
