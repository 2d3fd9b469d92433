#include "kernels/adaptive_sum.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <string>

#include "base/error.h"
#include "kernels/cast.h"
#include "kernels/float_state.h"

namespace dcoll::kernels {
namespace {

constexpr size_t kLanes = 8;  // partial sums side by side, for the compiler to put into vectors
constexpr size_t kBlock = 512;

struct Partial {
  std::array<double, kLanes> ab{}, aa{}, bb{};
};

template <typename T>
void accumulate(Partial& sums, const T* a, const T* b, size_t count) {
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      const double x = a[i + lane], y = b[i + lane];
      sums.ab[lane] += x * y;
      sums.aa[lane] += x * x;
      sums.bb[lane] += y * y;
    }
  }
  for (size_t lane = 0; i < count; ++i, ++lane) {
    const double x = a[i], y = b[i];
    sums.ab[lane] += x * y;
    sums.aa[lane] += x * x;
    sums.bb[lane] += y * y;
  }
}

template <typename T>
void combine(T* dst, const T* a, double a_factor, const T* b, double b_factor, size_t count) {
  for (size_t i = 0; i < count; ++i) dst[i] = static_cast<T>(a_factor * a[i] + b_factor * b[i]);
}

double sum(const std::array<double, kLanes>& lanes) { return std::accumulate(lanes.begin(), lanes.end(), 0.0); }

// Calls body(x, y, offset_bytes, count) with one block of both operands after the other, as float32.
template <typename Body>
void for_blocks(const void* a, const void* b, size_t count, DType dtype, const Body& body) {
  if (!is_floating(dtype)) {
    throw ArgumentError("cannot combine " + std::string(dtype_name(dtype)) +
                        " with adasum: it is defined for float16, bfloat16, float32 and float64");
  }
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t offset = begin * dtype_bytes(dtype), block = std::min(kBlock, count - begin);
    std::array<float, kBlock> x, y;
    cast(x.data(), DType::kFloat32, static_cast<const std::byte*>(a) + offset, dtype, block);
    cast(y.data(), DType::kFloat32, static_cast<const std::byte*>(b) + offset, dtype, block);
    body(x.data(), y.data(), offset, block);
  }
}

}  // namespace

Dots dots(const void* a, const void* b, size_t count, DType dtype) {
  const KeepSubnormals keep;
  Partial sums;
  if (dtype == DType::kFloat32) {
    accumulate(sums, static_cast<const float*>(a), static_cast<const float*>(b), count);
  } else if (dtype == DType::kFloat64) {
    accumulate(sums, static_cast<const double*>(a), static_cast<const double*>(b), count);
  } else {
    for_blocks(a, b, count, dtype,
               [&](const float* x, const float* y, size_t, size_t block) { accumulate(sums, x, y, block); });
  }
  return {sum(sums.ab), sum(sums.aa), sum(sums.bb)};
}

void weighted_sum(void* dst, const void* a, double a_factor, const void* b, double b_factor, size_t count,
                  DType dtype) {
  const KeepSubnormals keep;
  if (dtype == DType::kFloat32) {
    combine(static_cast<float*>(dst), static_cast<const float*>(a), a_factor, static_cast<const float*>(b), b_factor,
            count);
  } else if (dtype == DType::kFloat64) {
    combine(static_cast<double*>(dst), static_cast<const double*>(a), a_factor, static_cast<const double*>(b), b_factor,
            count);
  } else {
    for_blocks(a, b, count, dtype, [&](float* x, const float* y, size_t offset, size_t block) {
      combine(x, x, a_factor, y, b_factor, block);
      cast(static_cast<std::byte*>(dst) + offset, dtype, x, DType::kFloat32, block);
    });
  }
}

}  // namespace dcoll::kernels
