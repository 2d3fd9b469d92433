#include "kernels/adaptive_sum.h"

#include <algorithm>
#include <array>
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

double sum(const std::array<double, kLanes>& lanes) {
  double total = 0;
  for (const double lane : lanes) total += lane;
  return total;
}

[[noreturn]] void refuse(DType dtype) {
  throw ArgumentError("cannot combine " + std::string(dtype_name(dtype)) +
                      " with adasum: it is defined for float16, bfloat16, float32 and float64");
}

// Calls body(offset_bytes, count) for one block after the other.
template <typename Body>
void for_blocks(size_t count, DType dtype, const Body& body) {
  for (size_t begin = 0; begin < count; begin += kBlock) {
    body(begin * dtype_bytes(dtype), std::min(kBlock, count - begin));
  }
}

const std::byte* at(const void* base, size_t offset) { return static_cast<const std::byte*>(base) + offset; }

}  // namespace

Dots dots(const void* a, const void* b, size_t count, DType dtype) {
  const KeepSubnormals keep;
  Partial sums;
  if (dtype == DType::kFloat32) {
    accumulate(sums, static_cast<const float*>(a), static_cast<const float*>(b), count);
  } else if (dtype == DType::kFloat64) {
    accumulate(sums, static_cast<const double*>(a), static_cast<const double*>(b), count);
  } else if (is_floating(dtype)) {
    for_blocks(count, dtype, [&](size_t offset, size_t block) {
      std::array<float, kBlock> x, y;
      cast(x.data(), DType::kFloat32, at(a, offset), dtype, block);
      cast(y.data(), DType::kFloat32, at(b, offset), dtype, block);
      accumulate(sums, x.data(), y.data(), block);
    });
  } else {
    refuse(dtype);
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
  } else if (is_floating(dtype)) {
    for_blocks(count, dtype, [&](size_t offset, size_t block) {
      std::array<float, kBlock> x, y;
      cast(x.data(), DType::kFloat32, at(a, offset), dtype, block);
      cast(y.data(), DType::kFloat32, at(b, offset), dtype, block);
      combine(x.data(), x.data(), a_factor, y.data(), b_factor, block);
      cast(static_cast<std::byte*>(dst) + offset, dtype, x.data(), DType::kFloat32, block);
    });
  } else {
    refuse(dtype);
  }
}

}  // namespace dcoll::kernels
