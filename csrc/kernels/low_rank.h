// What PowerSGD (Vogels, Karimireddy, Jaggi, 2019) does to a matrix of gradients, in three passes over memory: float32,
// row-major, rows x columns. Its factors are thin: p has `rank` rows of `rows` elements, q `rank` rows of `columns`.
//
// Sums are formed in an order that depends on the shape alone, and products are rounded before they are added up, so
// all instruction sets give the same bits. Ranks on different CPUs must: what each makes of the factors that all have
// becomes its parameters.
#pragma once

#include <cstddef>

namespace dcoll::kernels {

struct LowRank {
  size_t rows, columns, rank;
};

// 1. Adds what was lost before, and projects: matrix = source + error; p = q matrix^T. source may be the matrix, else
// they do not overlap. error may be null: nothing was lost.
void add_and_project(float* p, float* matrix, const float* source, const float* error, const float* q,
                     const LowRank& shape);

// Between 1 and 2: the rows of p become orthonormal, each what it has that those before it have not. One that has
// nothing becomes a direction that is left, or zeros where none is. With infinity or NaN in it, all of p becomes NaN.
void orthonormalise(float* p, size_t rows, size_t rank);

// 2. With p orthonormal: q = p matrix.
void project_back(float* q, const float* matrix, const float* p, const LowRank& shape);

// 3. The matrix becomes what is sent, and what is lost is put aside: error = matrix - p^T q, matrix = p^T sum. q is
// this rank's, sum what became of it on all ranks.
void split(float* matrix, float* error, const float* p, const float* q, const float* sum, const LowRank& shape);

}  // namespace dcoll::kernels
