// NCCL, for ranks that own a GPU each. Its library is looked up when it is first needed: the file that DCOLL_NCCL
// names, or the one that torch has loaded, so that no process has two.
//
// Its communicators do not block (ncclConfig_t::blocking = 0, NCCL 2.14): what a call begins is begun by a thread of
// the library, and settled() tells when it is in its stream. So whoever drives keeps its deadlines.
#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <string>

#include "base/types.h"
#include "device/device.h"

namespace dcoll::device {

// ncclUniqueId: by it the ranks of a communicator find each other.
using NcclId = std::array<std::byte, 128>;

// Why there is none for devices of this number; "": there is.
std::string nccl_missing(int number);
// As ncclGetVersion() has it, 22703 for 2.27.3; 0: there is none for CUDA.
int nccl_version();
// DeviceError
NcclId make_nccl_id(int number);

// Whether it has the type and the operator. Not the least and the greatest of floating types: where one rank has a NaN,
// it gives another's number, and ours the NaN.
bool nccl_reduces(DType dtype, ReduceOp op);

// A rank's part of a communicator. Functions that throw throw DeviceError, with NCCL's words.
class Nccl {
 public:
  // Begins to meet the others.
  Nccl(Device& device, const NcclId& id, int size, int rank);
  ~Nccl() { abort(); }  // all that was begun is done, or the communicator has failed
  Nccl(const Nccl&) = delete;
  Nccl& operator=(const Nccl&) = delete;

  // Whether what was begun last is in its stream, or the others were met. Before, nothing else may be begun.
  bool settled();
  // Average: of floating types.
  void all_reduce(const void* in, void* out, size_t count, DType dtype, ReduceOp op, Stream stream);
  // count: elements of each rank's share.
  void reduce_scatter(const void* in, void* out, size_t count, DType dtype, ReduceOp op, Stream stream);
  void broadcast(const void* in, void* out, size_t bytes, int root, Stream stream);
  // bytes: of each rank.
  void all_gather(const void* in, void* out, size_t bytes, Stream stream);
  // Bytes for each rank, and from each.
  void all_to_all(const void* in, void* out, std::span<const size_t> send, std::span<const size_t> receive,
                  Stream stream);
  // What is in streams ends, wherever the others are. Nothing may be begun any more.
  void abort() noexcept;

 private:
  void check(int result, const char* what);
  template <typename Call>
  void call(const char* what, const Call& begin);
  // Several calls as one.
  template <typename Calls>
  void group(const char* what, const Calls& begin);

  Device& device_;
  void* comm_ = nullptr;
};

}  // namespace dcoll::device
