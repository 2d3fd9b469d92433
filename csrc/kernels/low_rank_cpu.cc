#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "kernels/dispatch.h"
#include "kernels/float_state.h"
#include "kernels/low_rank.h"

namespace dcoll::kernels {
namespace {

bool all_finite(const float* x, size_t count) {
  int32_t greatest = 0;  // which magnitudes are ordered as
  for (size_t i = 0; i < count; ++i) greatest = std::max(greatest, std::bit_cast<int32_t>(x[i]) & 0x7fffffff);
  return greatest < 0x7f800000;
}

// Directions side by side, each with zeros behind it up to whole steps.
class Directions {
 public:
  Directions(size_t rows, size_t rank)
      : rows_(rows), length_((rows + kLowRankStep - 1) / kLowRankStep * kLowRankStep), values_(length_ * rank) {}

  double* of(size_t k) { return values_.data() + k * length_; }

  // Makes k orthogonal to those before it, and of length 1.
  void add(size_t k) {
    if (take_out(k)) return;
    std::fill_n(of(k), rows_, 0.0);
    if (k >= rows_) return;
    of(k)[least_used(k)] = 1.0;
    take_out(k);
  }

 private:
  // Twice is enough (Giraud, Langou, Rozloznik and van den Eshof, 2005), unless the second time takes most of what the
  // first has left: then that was roundings. False: k has nothing of its own.
  bool take_out(size_t k) {
    const Kernels& kernels = active_kernels();
    double* const own = of(k);
    const auto norm = [&] { return std::sqrt(kernels.low_rank_dot(own, own, length_)); };
    double first = norm(), second = first;
    for (int time = 0; time < 2 && k > 0; ++time) {
      first = second;
      for (size_t i = 0; i < k; ++i) {
        kernels.low_rank_subtract(own, kernels.low_rank_dot(of(i), own, length_), of(i), length_);
      }
      second = norm();
    }
    if (k >= rows_ || !(second > first / 2)) return false;
    for (size_t i = 0; i < rows_; ++i) own[i] /= second;
    return true;
  }

  // Of the unit vectors, the one that those before k have least of: not all of it while k < rows.
  size_t least_used(size_t k) {
    std::vector<double> used(rows_);
    for (size_t i = 0; i < k; ++i) {
      for (size_t j = 0; j < rows_; ++j) used[j] += of(i)[j] * of(i)[j];
    }
    return static_cast<size_t>(std::min_element(used.begin(), used.end()) - used.begin());
  }

  const size_t rows_, length_;
  std::vector<double> values_;
};

}  // namespace

void add_and_project(float* p, float* matrix, const float* source, const float* error, const float* q,
                     const LowRank& shape) {
  const KeepSubnormals keep;
  active_kernels().low_rank_project(p, matrix, source, error, q, shape);
}

void orthonormalise(float* p, size_t rows, size_t rank) {
  const KeepSubnormals keep;
  if (!all_finite(p, rows * rank)) {
    std::fill_n(p, rows * rank, std::numeric_limits<float>::quiet_NaN());
    return;
  }
  Directions found(rows, rank);
  for (size_t k = 0; k < rank; ++k) {
    std::copy_n(p + k * rows, rows, found.of(k));
    found.add(k);
    std::transform(found.of(k), found.of(k) + rows, p + k * rows, [](double x) { return static_cast<float>(x); });
  }
}

void project_back(float* q, const float* matrix, const float* p, const LowRank& shape) {
  const KeepSubnormals keep;
  active_kernels().low_rank_project_back(q, matrix, p, shape);
}

void split(float* matrix, float* error, const float* p, const float* q, const float* sum, const LowRank& shape) {
  const KeepSubnormals keep;
  active_kernels().low_rank_split(matrix, error, p, q, sum, shape);
}

}  // namespace dcoll::kernels
