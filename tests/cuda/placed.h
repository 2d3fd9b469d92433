// What the tests of the CUDA kernels share. Each includes its .cu file and tests/cuda_shim in place of CUDA (see
// cmake/tests.cmake), and compares with the CPU's kernels.
#pragma once

#include <initializer_list>
#include <memory>
#include <vector>

#include "kernels/reference.h"

namespace dcoll::test {

// Bytes that begin `misalign` bytes after a multiple of 16 and end where their allocation does, so that ASan sees the
// first byte beyond.
class Placed {
 public:
  explicit Placed(size_t bytes, size_t misalign = 0)
      : bytes_(bytes), misalign_(misalign), memory_(new char[bytes + misalign]()) {}
  Placed(const void* from, size_t bytes, size_t misalign) : Placed(bytes, misalign) {
    if (bytes > 0) std::memcpy(data(), from, bytes);
  }
  template <class T>
  Placed(const std::vector<T>& from, size_t misalign) : Placed(from.data(), from.size() * sizeof(T), misalign) {}

  char* data() const { return memory_.get() + misalign_; }
  float* floats() const { return reinterpret_cast<float*>(data()); }
  size_t bytes() const { return bytes_; }
  bool operator==(const Placed& other) const {
    return bytes_ == other.bytes_ && (bytes_ == 0 || std::memcmp(data(), other.data(), bytes_) == 0);
  }

 private:
  size_t bytes_, misalign_;
  std::unique_ptr<char[]> memory_;
};

// Where bytes are equal, or both are NaN: which NaN comes out of an operation is left to the hardware.
inline void check_same(DType dtype, const Placed& got, const Placed& want) {
  CHECK_EQ(got.bytes(), want.bytes());
  if (got == want) return;
  for (size_t at = 0; at < got.bytes(); at += dtype_bytes(dtype)) {
    CHECK(same(dtype, got.data() + at, want.data() + at));
  }
}

// Around a warp, a block's threads, and the grid of the shim (three blocks of 256 threads) times an element and a
// vector of them.
inline constexpr size_t kCudaSizes[] = {0, 1, 3, 8, 31, 32, 33, 255, 256, 257, 767, 769, 1023, 3073, 6151, 12289};

}  // namespace dcoll::test
