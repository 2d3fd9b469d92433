// What the ranks of a fabric have agreed on about NCCL (by_nccl.h): the same on all of them, but for `device`.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "device/device.h"
#include "device/nccl.h"
#include "engine/links/trial.h"

namespace dcoll {

struct NcclState {
  NcclState(bool is_demanded, double seconds) : demanded(is_demanded), patience_s(seconds) {}
  ~NcclState() {
    comm.reset();  // ends what waits for other ranks
    if (casts_ == nullptr) return;
    if (stream != nullptr) casts_on_->drain(stream);
    casts_on_->free(casts_);
  }
  NcclState(const NcclState&) = delete;
  NcclState& operator=(const NcclState&) = delete;

  const bool demanded;      // DCOLL_GPU_ENGINE=nccl
  const double patience_s;  // of the ranks, until they have met: NCCL has taken minutes for that where there are many
  bool off = false;         // they do without it
  std::string why;          // then
  std::unique_ptr<device::Nccl> comm;
  int device = 0;           // of `comm`
  bool has_kernels = true;  // of ours, every rank's device: as long as they have not met, they try
  // Of `comm` alone: kernels of two communicators in one stream, in another order on another rank, wait for each other.
  device::Stream stream = nullptr;

  // Memory of the device for what the operation whose turn it is casts to 16 bits, in pieces of so many elements. It is
  // made when it is first needed, and never freed before the end: that would wait for all kernels of NCCL's on the
  // device, and they for ranks that do the same. DeviceError: there is none on this device.
  static constexpr size_t kMostCast = size_t{16} << 20;
  void* room_for_casts(device::Device& of) {
    if (casts_ == nullptr) {
      casts_ = of.allocate(kMostCast * sizeof(uint16_t));
      casts_on_ = &of;
    }
    if (casts_on_ != &of) throw device::DeviceError("it is on " + casts_on_->name() + ", where casts began");
    return casts_;
  }

  // Of all-reduces that could stay in memory which ranks have opened as well: which is faster, by their size. Found out
  // by doing both in turns.
  struct Choice {
    std::unique_ptr<Trial> trial = std::make_unique<Trial>();  // null: decided
    bool opened = false;
    bool takes_opened() const { return trial != nullptr ? trial->second_next() : opened; }
  };
  Choice& choice(size_t bytes) { return choices_[std::bit_width(bytes)]; }

 private:
  std::map<int, Choice> choices_;  // by the power of two above
  void* casts_ = nullptr;
  device::Device* casts_on_ = nullptr;
};

}  // namespace dcoll
