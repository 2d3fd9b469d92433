// What the ranks of a fabric have agreed on about NCCL (by_nccl.h): the same on all of them, but for `device`.
#pragma once

#include <bit>
#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "device/device.h"
#include "device/nccl.h"
#include "engine/links/trial.h"

namespace dcoll {

struct NcclState {
  NcclState(bool is_demanded, double seconds) : demanded(is_demanded), patience_s(seconds) {}
  ~NcclState() {
    comm.reset();  // ends what waits for other ranks
    let_go_of_casts();
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

  // Memory of the device for what is cast to 16 bits, made when it is first needed: of the operation whose turn it is.
  // DeviceError: there is none.
  void* room_for_casts(device::Device& of, size_t bytes) {
    if (bytes <= cast_bytes_ && &of == cast_device_) return casts_;
    let_go_of_casts();
    casts_ = of.allocate(bytes);
    cast_bytes_ = bytes;
    cast_device_ = &of;
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
  void let_go_of_casts() {
    if (casts_ == nullptr) return;
    if (stream != nullptr) cast_device_->drain(stream);
    cast_device_->free(std::exchange(casts_, nullptr));
    cast_bytes_ = 0;
  }

  std::map<int, Choice> choices_;  // by the power of two above
  void* casts_ = nullptr;
  size_t cast_bytes_ = 0;
  device::Device* cast_device_ = nullptr;
};

}  // namespace dcoll
