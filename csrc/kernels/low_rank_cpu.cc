#include "kernels/dispatch.h"
#include "kernels/float_state.h"
#include "kernels/low_rank.h"

namespace dcoll::kernels {

void add_and_project(float* p, float* matrix, const float* error, const float* q, const LowRank& shape) {
  const KeepSubnormals keep;
  active_kernels().low_rank_project(p, matrix, error, q, shape);
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
