// PowerSGD's passes against loops written out, exactly: numbers of any size in the order that low_rank.h promises, so
// every instruction set has the same bits, and whole numbers, of which any order gives the same sum.
#include "kernels/low_rank.h"

#include "kernels/reference.h"

namespace dcoll {
namespace {

using Values = std::vector<float>;

struct Operands {
  Values matrix, source, error, p, q, sum;
};

Operands operands_of(const kernels::LowRank& s, bool whole, unsigned seed) {
  std::mt19937 dice(seed);
  std::normal_distribution<float> normal;
  const auto draw = [&](size_t count) {
    Values values(count);
    for (float& x : values) x = whole ? std::round(3 * normal(dice)) : normal(dice) * std::ldexp(1.0f, dice() % 20);
    return values;
  };
  const size_t elements = s.rows * s.columns;
  return {draw(elements),        draw(elements),           draw(elements),
          draw(s.rank * s.rows), draw(s.rank * s.columns), draw(s.rank * s.columns)};
}

bool same(const Values& a, const Values& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

// Sixteen sums, of every sixteenth product, and then halves onto halves.
float dot_in_order(const float* a, const float* b, size_t count) {
  float sums[16] = {};
  for (size_t i = 0; i < count; ++i) {
    const float product = a[i] * b[i];
    sums[i % 16] += product;
  }
  for (size_t half = 8; half > 0; half /= 2) {
    for (size_t i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  return sums[0];
}

void naive_project(Operands& x, const kernels::LowRank& s, bool has_source, bool has_error) {
  if (has_source) x.matrix = x.source;
  for (size_t i = 0; has_error && i < x.matrix.size(); ++i) x.matrix[i] += x.error[i];
  for (size_t k = 0; k < s.rank; ++k) {
    for (size_t i = 0; i < s.rows; ++i) {
      x.p[k * s.rows + i] = dot_in_order(x.matrix.data() + i * s.columns, x.q.data() + k * s.columns, s.columns);
    }
  }
}

void naive_project_back(Operands& x, const kernels::LowRank& s) {
  for (size_t k = 0; k < s.rank; ++k) {
    for (size_t j = 0; j < s.columns; ++j) {
      float sum = 0;
      for (size_t i = 0; i < s.rows; ++i) {
        const float product = x.p[k * s.rows + i] * x.matrix[i * s.columns + j];
        sum += product;
      }
      x.q[k * s.columns + j] = sum;
    }
  }
}

void naive_split(Operands& x, const kernels::LowRank& s) {
  for (size_t i = 0; i < s.rows; ++i) {
    for (size_t j = 0; j < s.columns; ++j) {
      float lost = x.matrix[i * s.columns + j], sent = 0;
      for (size_t k = 0; k < s.rank; ++k) {
        const float kept = x.p[k * s.rows + i] * x.q[k * s.columns + j];
        const float given = x.p[k * s.rows + i] * x.sum[k * s.columns + j];
        lost -= kept;
        sent += given;
      }
      x.error[i * s.columns + j] = lost;
      x.matrix[i * s.columns + j] = sent;
    }
  }
}

void expect_same(const Operands& found, const Operands& wanted) {
  CHECK(same(found.matrix, wanted.matrix));
  CHECK(same(found.error, wanted.error));
  CHECK(same(found.p, wanted.p));
  CHECK(same(found.q, wanted.q));
  CHECK(same(found.sum, wanted.sum));
}

void check_passes(const kernels::LowRank& s, bool whole) {
  for (const auto& [has_source, has_error] : {std::pair{false, false}, {false, true}, {true, false}, {true, true}}) {
    Operands found = operands_of(s, whole, test::seed()), wanted = found;
    const auto step = [&](const auto& pass, const auto& naive) {
      pass();
      naive();
      expect_same(found, wanted);
    };
    const float* const error = has_error ? found.error.data() : nullptr;
    const float* const source = has_source ? found.source.data() : found.matrix.data();
    step([&] { kernels::add_and_project(found.p.data(), found.matrix.data(), source, error, found.q.data(), s); },
         [&] { naive_project(wanted, s, has_source, has_error); });
    step([&] { kernels::project_back(found.q.data(), found.matrix.data(), found.p.data(), s); },
         [&] { naive_project_back(wanted, s); });
    step(
        [&] {
          kernels::split(found.matrix.data(), found.error.data(), found.p.data(), found.q.data(), found.sum.data(), s);
        },
        [&] { naive_split(wanted, s); });
  }
}

void check_all_shapes(bool whole) {
  for (const std::string& isa : test::available_isas()) {
    CHECK(kernels::set_isa(isa));
    for (const size_t rows : {0, 1, 2, 3, 4, 5, 9, 40}) {
      for (const size_t columns : {0, 1, 15, 16, 17, 31, 33, 200}) {
        for (const size_t rank : {1, 2, 3, 4, 5, 8, 11}) check_passes({rows, columns, rank}, whole);
      }
    }
  }
}

// On a cache line, and `shift` elements behind.
float* place(Values& memory, const Values& x, size_t shift) {
  memory.resize(x.size() + 32);
  float* const at = memory.data() + -reinterpret_cast<uintptr_t>(memory.data()) % 64 / sizeof(float) + shift;
  std::copy(x.begin(), x.end(), at);
  return at;
}

void check_large(const kernels::LowRank& s, size_t shift) {
  Operands x = operands_of(s, false, test::seed());
  Values matrix_memory, error_memory;
  float* const matrix = place(matrix_memory, x.matrix, shift);
  float* const error = place(error_memory, x.error, shift);
  Values p(x.p.size());
  kernels::add_and_project(p.data(), matrix, x.source.data(), error, x.q.data(), s);
  naive_project(x, s, true, true);
  CHECK(same(p, x.p));
  CHECK(same(Values(matrix, matrix + x.matrix.size()), x.matrix));
  kernels::split(matrix, error, x.p.data(), x.q.data(), x.sum.data(), s);
  naive_split(x, s);
  CHECK(same(Values(matrix, matrix + x.matrix.size()), x.matrix));
  CHECK(same(Values(error, error + x.error.size()), x.error));
}

TEST(large_matrices_may_be_stored_past_the_caches) {
  for (const std::string& isa : test::available_isas()) {
    CHECK(kernels::set_isa(isa));
    for (const size_t shift : {0, 1, 4}) {
      for (const size_t rank : {2, 4, 5}) {
        check_large({300, 1024, rank}, shift);
        check_large({300, 1023, rank}, shift);
      }
    }
  }
}

// What the rows of p are then, and what they have of each other, against the first instruction set's bits.
void check_orthonormal(const Values& p, size_t rows, size_t rank) {
  Values first;
  for (const std::string& isa : test::available_isas()) {
    CHECK(kernels::set_isa(isa));
    Values found = p;
    kernels::orthonormalise(found.data(), rows, rank);
    if (first.empty()) first = found;
    CHECK(same(found, first));
  }
  for (size_t a = 0; a < rank; ++a) {
    for (size_t b = 0; b < rank; ++b) {
      double sum = 0;
      for (size_t i = 0; i < rows; ++i) sum += static_cast<double>(first[a * rows + i]) * first[b * rows + i];
      CHECK(std::abs(sum - (a == b && a < rows)) < 1e-6);
    }
  }
}

TEST(rows_become_orthonormal_with_the_same_bits_everywhere) {
  for (const size_t rows : {0, 1, 2, 15, 16, 17, 200}) {
    for (const size_t rank : {1, 2, 4, 11}) {
      const Values any = operands_of({rows, 0, rank}, false, test::seed()).p;
      for (const float scale : {1.0f, 1e30f, 1e-30f, 0.0f}) {
        Values p = any;
        for (float& x : p) x *= scale;
        check_orthonormal(p, rows, rank);
        for (size_t i = rows; i < p.size(); ++i) p[i] = p[i - rows];  // of one direction
        check_orthonormal(p, rows, rank);
      }
    }
  }
}

TEST(sums_are_in_the_order_that_is_promised) { check_all_shapes(false); }
TEST(whole_numbers_are_exact) { check_all_shapes(true); }

}  // namespace
}  // namespace dcoll

TEST_MAIN
