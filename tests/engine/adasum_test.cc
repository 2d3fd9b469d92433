// Adasum on 1 to 8 ranks, by shared memory and by messages, against the formula applied along the tree.
#include "engine/collective/adasum.h"

#include <array>
#include <cmath>
#include <string>

#include "base/error.h"
#include "kernels/cast.h"
#include "rank_threads.h"
#include "support/check.h"

using namespace dcoll;
using namespace dcoll::test;

namespace {

using Vector = std::vector<double>;

// Small integers, another direction on each rank; rank 1 has no gradient for every third tensor.
double value(int rank, size_t tensor, size_t i) {
  if (rank == 1 && tensor % 3 == 2) return 0;
  return static_cast<double>((i * 7 + tensor + rank * 5) % 11) - 5;
}

Vector adasum(const Vector& a, const Vector& b) {
  double ab = 0, aa = 0, bb = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    ab += a[i] * b[i];
    aa += a[i] * a[i];
    bb += b[i] * b[i];
  }
  Vector sum(a.size());
  for (size_t i = 0; i < a.size(); ++i) {
    sum[i] = (aa > 0 ? 1 - ab / aa / 2 : 1) * a[i] + (bb > 0 ? 1 - ab / bb / 2 : 1) * b[i];
  }
  return sum;
}

// Of the ranks [begin, begin + n).
Vector tree(int begin, int n, size_t tensor, size_t elements) {
  if (n > 1) return adasum(tree(begin, n / 2, tensor, elements), tree(begin + n / 2, n / 2, tensor, elements));
  Vector mine(elements);
  for (size_t i = 0; i < elements; ++i) mine[i] = value(begin, tensor, i);
  return mine;
}

struct Numbers {
  DType dtype;
  std::vector<std::byte> bytes;
  Numbers(DType type, size_t count) : dtype(type), bytes(count * dtype_bytes(type) + 1) {}
  void set(size_t i, double number) {
    kernels::cast(bytes.data() + i * dtype_bytes(dtype), dtype, &number, DType::kFloat64, 1);
  }
  double get(size_t i) const {
    double number = 0;
    kernels::cast(&number, DType::kFloat64, bytes.data() + i * dtype_bytes(dtype), dtype, 1);
    return number;
  }
};

// Each level rounds to the dtype once, and the factors' quotients to float64.
double tolerance(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return 1e-14;
    case DType::kFloat32:
      return 1e-6;
    case DType::kFloat16:
      return 4e-3;
    default:
      return 3e-2;
  }
}

// Returns the result's bytes.
std::string check_adasum(Communicator& comm, const std::vector<size_t>& elements, DType dtype, bool in_place,
                         bool one_tensor) {
  size_t count = 0;
  for (const size_t one : elements) count += one;
  Numbers in(dtype, count), out(dtype, count);
  for (size_t t = 0, at = 0; t < elements.size(); ++t) {
    for (size_t i = 0; i < elements[t]; ++i) in.set(at++, value(comm.rank(), t, i));
  }
  Numbers& result = in_place ? in : out;
  Request request{.kind = Kind::kAllReduce,
                  .in = in.bytes.data(),
                  .out = result.bytes.data(),
                  .count = count,
                  .dtype = dtype,
                  .op = ReduceOp::kAdasum};
  if (!one_tensor) request.splits = elements;
  run(comm, request);
  for (size_t t = 0, at = 0; t < elements.size(); ++t) {
    const Vector want = tree(0, comm.size(), t, elements[t]);
    for (size_t i = 0; i < elements[t]; ++i, ++at) {
      CHECK(std::abs(result.get(at) - want[i]) <= tolerance(dtype) * 8 * comm.size());
    }
  }
  return {reinterpret_cast<const char*>(result.bytes.data()), result.bytes.size()};
}

constexpr DType kTypes[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64};

}  // namespace

TEST(equals_the_formula_along_the_tree_and_is_the_same_on_all_ranks) {
  for (const int n : {1, 2, 4, 8}) {
    for (const Settings& settings : {test_settings(), without_shared_memory()}) {
      std::vector<std::string> results(n);
      run_ranks(n, settings, [&](Communicator& comm) {
        for (const DType dtype : kTypes) {
          for (const std::vector<size_t>& elements :
               {std::vector<size_t>{5, 0, 1, 3, 700, 2}, {1}, {0}, {0, 0}, {3, 3}}) {
            for (const bool in_place : {false, true}) {
              results[comm.rank()] += check_adasum(comm, elements, dtype, in_place, elements.size() == 1);
            }
          }
        }
      });
      for (const std::string& result : results) CHECK(result == results[0]);
    }
  }
}

TEST(vectors_of_many_slices) {
  for (const Settings& settings : {test_settings(), without_shared_memory()}) {
    run_ranks(4, settings, [](Communicator& comm) {
      check_adasum(comm, {200001, 7, 130000}, DType::kFloat32, true, false);
      check_adasum(comm, {300001}, DType::kFloat32, false, true);
    });
  }
}

TEST(equal_vectors_are_averaged_and_orthogonal_ones_added_exactly) {
  for (const int n : {2, 4, 8}) {
    run_ranks(n, [n](Communicator& comm) {
      std::vector<float> equal(37, 3.0f), apart(8, 0.0f);
      apart[comm.rank()] = 2.0f;
      run(comm,
          {.kind = Kind::kAllReduce, .in = equal.data(), .out = equal.data(), .count = 37, .op = ReduceOp::kAdasum});
      run(comm, {.kind = Kind::kAllReduce,
                 .in = apart.data(),
                 .out = apart.data(),
                 .count = 8,
                 .op = ReduceOp::kAdasum,
                 .prescale = 0.5,
                 .postscale = 4.0});
      for (const float x : equal) CHECK_EQ(x, 3.0f);
      for (int i = 0; i < 8; ++i) CHECK_EQ(apart[i], i < n ? 4.0f : 0.0f);
    });
  }
}

TEST(refused_before_anything_is_sent) {
  run_ranks(3, [](Communicator& comm) {
    float x = 1;
    int32_t i = 1;
    const Request three{.kind = Kind::kAllReduce, .in = &x, .out = &x, .count = 1, .op = ReduceOp::kAdasum};
    CHECK_THROWS(run(comm, three), ArgumentError, "there are 3");
    Request integers = three;
    integers.in = integers.out = &i;
    integers.dtype = DType::kInt32;
    CHECK_THROWS(run(comm, integers), ArgumentError, "float16, bfloat16, float32 and float64");
    Request scattered = three;
    scattered.kind = Kind::kReduceScatter;
    CHECK_THROWS(run(comm, scattered), ArgumentError, "defined for allreduce");
  });
  run_ranks(2, [](Communicator& comm) {
    float x[2] = {1, 1};
    Request request{.kind = Kind::kAllReduce, .in = x, .out = x, .count = 2, .op = ReduceOp::kAdasum, .splits = {1}};
    CHECK_THROWS(run(comm, request), ArgumentError, "have 1 elements in all, but 2");
    // Cut differently: a mismatch, and the job goes on.
    request.splits = {comm.rank() == 0 ? size_t{1} : size_t{2}, comm.rank() == 0 ? size_t{1} : size_t{0}};
    CHECK_THROWS(run(comm, request), MismatchError, "adasum");
    request.splits = {1, 1};
    run(comm, request);
    CHECK_EQ(x[0], 1.0f);
  });
}

TEST_MAIN
