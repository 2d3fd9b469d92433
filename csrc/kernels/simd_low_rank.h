// The loops of low_rank.h over the vectors of simd.h. Included by simd_kernels.h only.
#pragma once

#include "kernels/dispatch.h"
#include "kernels/low_rank.h"
#include "kernels/simd.h"

namespace dcoll::kernels {
namespace {

// An instruction set with shorter vectors takes several for a step, so that sums are formed in the same order.
constexpr size_t kStep = kLowRankStep;
constexpr size_t kParts = kStep * sizeof(float) / kVectorBytes;
constexpr size_t kPartLanes = kVectorBytes / sizeof(float);

#define DCOLL_EACH_PART _Pragma("GCC unroll 4") for (size_t i = 0; i < kParts; ++i)
#define DCOLL_EACH_RANK _Pragma("GCC unroll 4") for (size_t k = 0; k < kRanks; ++k)

struct Step {
  VecF v[kParts];
};

// Whole steps, or the last elements of a row, fewer than a step, with zeros behind them.
struct Whole {
  DCOLL_INLINE Step load(const float* from) const {
    Step s;
    DCOLL_EACH_PART s.v[i] = load_vec<VecF>((const char*)(from + i * kPartLanes));
    return s;
  }
  DCOLL_INLINE void store(float* to, const Step& s) const {
    DCOLL_EACH_PART store_vec((char*)(to + i * kPartLanes), s.v[i]);
  }
  DCOLL_INLINE void stream(float* to, const Step& s) const {
    DCOLL_EACH_PART stream_vec((char*)(to + i * kPartLanes), s.v[i]);
  }
};
struct Part {
  size_t count;
  DCOLL_INLINE Step load(const float* from) const {
    float x[kStep] = {};
    __builtin_memcpy(x, from, count * sizeof(float));
    return Whole{}.load(x);
  }
  DCOLL_INLINE void store(float* to, const Step& s) const {
    float x[kStep];
    Whole{}.store(x, s);
    __builtin_memcpy(to, x, count * sizeof(float));
  }
  DCOLL_INLINE void stream(float* to, const Step& s) const { store(to, s); }
};

// work(at, whole or part) over a row.
template <class Work>
DCOLL_INLINE void in_steps(size_t columns, const Work& work) {
  size_t at = 0;
  for (; at + kStep <= columns; at += kStep) work(at, Whole{});
  if (at < columns) work(at, Part{columns - at});
}

DCOLL_INLINE void add(Step& sum, const Step& x) { DCOLL_EACH_PART sum.v[i] += x.v[i]; }
DCOLL_INLINE void add_product(Step& sum, const Step& a, const Step& b) { DCOLL_EACH_PART sum.v[i] += a.v[i] * b.v[i]; }
DCOLL_INLINE void add_product(Step& sum, float a, const Step& b) { DCOLL_EACH_PART sum.v[i] += a * b.v[i]; }

template <class T>
DCOLL_INLINE T sum_of(T (&x)[kStep]) {
  for (size_t half = kStep / 2; half > 0; half /= 2) {
    for (size_t i = 0; i < half; ++i) x[i] += x[i + half];
  }
  return x[0];
}
DCOLL_INLINE float sum_of(const Step& s) {
  float x[kStep];
  Whole{}.store(x, s);
  return sum_of(x);
}

// ---- 1: a row of the matrix gets its error, and is multiplied by kRanks rows of q ----

enum class Row { kIsThere, kIsCopied, kIsAdded, kIsStreamed };  // the last: as the one before, past the caches

template <size_t kRanks, Row kRow>
DCOLL_INLINE void project_row(float* p, float* row, const float* source, const float* error, const float* q,
                              const LowRank& s) {
  Step sums[kRanks] = {};
  in_steps(s.columns, [&](size_t at, auto some) {
    Step x = some.load(source + at);
    if constexpr (kRow >= Row::kIsAdded) add(x, some.load(error + at));
    if constexpr (kRow == Row::kIsStreamed) {
      some.stream(row + at, x);
    } else if constexpr (kRow != Row::kIsThere) {
      some.store(row + at, x);
    }
    DCOLL_EACH_RANK add_product(sums[k], some.load(q + k * s.columns + at), x);
  });
  for (size_t k = 0; k < kRanks; ++k) p[k * s.rows] = sum_of(sums[k]);
}

// ---- between: what Gram-Schmidt does, in double ----

using VecD = Vec<double>;
constexpr size_t kPartDoubles = kVectorBytes / sizeof(double);
constexpr size_t kDoubleParts = kStep / kPartDoubles;

double low_rank_dot(const double* a, const double* b, size_t count) {
  VecD sums[kDoubleParts] = {};
  for (size_t at = 0; at < count; at += kStep) {
#pragma GCC unroll 8
    for (size_t i = 0; i < kDoubleParts; ++i) {
      const size_t part = at + i * kPartDoubles;
      sums[i] += load_vec<VecD>((const char*)(a + part)) * load_vec<VecD>((const char*)(b + part));
    }
  }
  double x[kStep];
  __builtin_memcpy(x, sums, sizeof(x));
  return sum_of(x);
}

void low_rank_subtract(double* from, double factor, const double* x, size_t count) {
  for (size_t at = 0; at < count; at += kPartDoubles) {
    const VecD left = load_vec<VecD>((const char*)(from + at)) - factor * load_vec<VecD>((const char*)(x + at));
    store_vec((char*)(from + at), left);
  }
}

// ---- 2: kRanks rows of q get what some rows of the matrix add to them ----

constexpr size_t kRowsAtOnce = 4;  // q, which stays in the first cache, is then loaded and stored once for so many

template <size_t kRanks, size_t kRows>
DCOLL_INLINE void project_rows_back(float* q, const float* matrix, const float* p, const LowRank& s) {
  float factors[kRows][kRanks];
  for (size_t r = 0; r < kRows; ++r) DCOLL_EACH_RANK factors[r][k] = p[k * s.rows + r];
  in_steps(s.columns, [&](size_t at, auto some) {
    Step sums[kRanks];
    DCOLL_EACH_RANK sums[k] = some.load(q + k * s.columns + at);
#pragma GCC unroll 4
    for (size_t r = 0; r < kRows; ++r) {
      const Step x = some.load(matrix + r * s.columns + at);
      DCOLL_EACH_RANK add_product(sums[k], factors[r][k], x);
    }
    DCOLL_EACH_RANK some.store(q + k * s.columns + at, sums[k]);
  });
}

// ---- 3: kRanks directions take their share from a row, which becomes what is sent of it ----

template <size_t kRanks, bool kStreams>
DCOLL_INLINE void split_row(float* row, float* error, const float* p, const float* q, const float* sum,
                            const LowRank& s, bool first) {
  float factors[kRanks];
  DCOLL_EACH_RANK factors[k] = p[k * s.rows];
  in_steps(s.columns, [&](size_t at, auto some) {
    Step lost = some.load((first ? row : error) + at), sent = first ? Step{} : some.load(row + at);
    DCOLL_EACH_RANK {
      add_product(lost, -factors[k], some.load(q + k * s.columns + at));
      add_product(sent, factors[k], some.load(sum + k * s.columns + at));
    }
    if constexpr (kStreams) {
      some.stream(error + at, lost);
    } else {
      some.store(error + at, lost);
    }
    some.store(row + at, sent);
  });
}

// ---- all rows, and any rank: so many at a time that sums stay in registers ----

constexpr size_t kRanksAtOnce = 4;

template <size_t kNumber>
struct Number {
  static constexpr size_t value = kNumber;
};

// work(Number) with how many of the ranks from `first` on are worked on at once.
template <class Work>
DCOLL_INLINE void of_ranks(size_t first, size_t rank, const Work& work) {
  const size_t left = rank - first;
  if (left == 1) return work(Number<1>{});
  if (left == 2) return work(Number<2>{});
  if (left == 3) return work(Number<3>{});
  work(Number<kRanksAtOnce>{});
}

// Whether stores go past the caches, which would read a line before it is written to: where rows are whole steps, are
// written once, and are so many that they would not be cached any more in the next pass.
bool low_rank_streams(const float* to, const LowRank& s) {
  constexpr size_t kStreamBytes = (size_t)1 << 20;
  const size_t row_bytes = s.columns * sizeof(float);
  return s.rank <= kRanksAtOnce && s.columns % kStep == 0 && (uintptr_t)to % kVectorBytes == 0 &&
         s.rows * row_bytes >= kStreamBytes;
}

void low_rank_project(float* p, float* matrix, const float* source, const float* error, const float* q,
                      const LowRank& s) {
  const bool is_there = source == matrix && error == nullptr, streams = source != matrix && low_rank_streams(matrix, s);
  for (size_t i = 0; i < s.rows; ++i) {
    for (size_t k = 0; k < s.rank; k += kRanksAtOnce) {
      of_ranks(k, s.rank, [&](auto ranks) {
        constexpr size_t n = ranks.value;
        float *const to = p + k * s.rows + i, *const row = matrix + i * s.columns;
        const float *const from = source + i * s.columns, *const of = q + k * s.columns;
        if (is_there || k != 0) return project_row<n, Row::kIsThere>(to, row, row, nullptr, of, s);
        if (error == nullptr) return project_row<n, Row::kIsCopied>(to, row, from, nullptr, of, s);
        const float* const lost = error + i * s.columns;
        if (streams) return project_row<n, Row::kIsStreamed>(to, row, from, lost, of, s);
        project_row<n, Row::kIsAdded>(to, row, from, lost, of, s);
      });
    }
  }
  if (streams) end_of_streams();
}

void low_rank_project_back(float* q, const float* matrix, const float* p, const LowRank& s) {
  if (s.columns == 0) return;  // q may be null, which memset does not take
  __builtin_memset(q, 0, s.rank * s.columns * sizeof(float));
  for (size_t i = 0; i < s.rows;) {
    const size_t rows = s.rows - i < kRowsAtOnce ? 1 : kRowsAtOnce;
    for (size_t k = 0; k < s.rank; k += kRanksAtOnce) {
      of_ranks(k, s.rank, [&](auto ranks) {
        float* const to = q + k * s.columns;
        const float *const from = matrix + i * s.columns, *const of = p + k * s.rows + i;
        if (rows == 1) return project_rows_back<ranks.value, 1>(to, from, of, s);
        project_rows_back<ranks.value, kRowsAtOnce>(to, from, of, s);
      });
    }
    i += rows;
  }
}

void low_rank_split(float* matrix, float* error, const float* p, const float* q, const float* sum, const LowRank& s) {
  const bool streams = low_rank_streams(error, s);
  for (size_t i = 0; i < s.rows; ++i) {
    for (size_t k = 0; k < s.rank; k += kRanksAtOnce) {
      of_ranks(k, s.rank, [&](auto ranks) {
        float *const row = matrix + i * s.columns, *const lost = error + i * s.columns;
        const float *const of = p + k * s.rows + i, *const mine = q + k * s.columns, *const all = sum + k * s.columns;
        if (streams) return split_row<ranks.value, true>(row, lost, of, mine, all, s, true);
        split_row<ranks.value, false>(row, lost, of, mine, all, s, k == 0);
      });
    }
  }
  if (streams) end_of_streams();
}

#undef DCOLL_EACH_PART
#undef DCOLL_EACH_RANK

}  // namespace
}  // namespace dcoll::kernels
