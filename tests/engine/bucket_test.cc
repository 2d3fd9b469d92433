// Gradient buckets: layout, readiness, order, unused parameters, rebuilding.
#include "engine/buckets/bucket.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/error.h"
#include "rank_threads.h"
#include "support/check.h"

using namespace dcoll;
using namespace dcoll::test;

namespace {

std::vector<ParamInfo> params_of(const std::vector<size_t>& counts) {
  std::vector<ParamInfo> params;
  for (size_t i = 0; i < counts.size(); ++i)
    params.push_back({counts[i], DType::kFloat32, std::string("p").append(std::to_string(i))});
  return params;
}

float* gradient(Reducer& reducer, size_t param) {
  const auto [block, offset] = reducer.gradient(param);
  return reinterpret_cast<float*>(block->data() + offset);
}

size_t bucket_of(const Reducer& reducer, size_t param) {
  for (size_t index = 0; index < reducer.num_buckets(); ++index) {
    if (std::ranges::count(reducer.bucket(index).slots, param, &Bucket::Slot::param) > 0) return index;
  }
  return reducer.num_buckets();
}

void fill(Reducer& reducer, size_t param, size_t count, float value) {
  std::fill_n(gradient(reducer, param), count, value);
}

std::vector<size_t> finish(Reducer& reducer) {
  return reducer.finish([&](Operation& operation) { reducer.communicator().wait(operation); });
}

// A communicator that the Reducer shares without owning: the test's world does.
std::shared_ptr<Communicator> borrowed(Communicator& comm) {
  return {&comm, [](Communicator*) {}};
}

}  // namespace

TEST(layout_is_reverse_order_with_a_small_first_bucket) {
  run_ranks(1, [](Communicator& comm) {
    Reducer reducer(borrowed(comm), params_of({100, 100, 100, 100}), {.bucket_bytes = 1000, .first_bucket_bytes = 400});
    CHECK_EQ(reducer.num_buckets(), size_t{3});
    CHECK_EQ(bucket_of(reducer, 3), size_t{0});
    CHECK_EQ(bucket_of(reducer, 2), size_t{1});
    CHECK_EQ(bucket_of(reducer, 1), size_t{1});
    CHECK_EQ(bucket_of(reducer, 0), size_t{2});
    CHECK_EQ(reducer.gradient(1).second % Memory::kAlignment, size_t{0});
  });
}

TEST(averages_over_ranks_whatever_the_order_of_readiness) {
  for (int n = 1; n <= 4; ++n) {
    run_ranks(n, [n](Communicator& comm) {
      const std::vector<size_t> counts = {3, 0, 5000, 1, 64};
      Reducer reducer(borrowed(comm), params_of(counts), {.bucket_bytes = 4096, .first_bucket_bytes = 64});
      for (int step = 0; step < 5; ++step) {
        for (size_t i = 0; i < counts.size(); ++i) {
          const size_t p = (i + step * comm.rank()) % counts.size();  // a different order on every rank
          fill(reducer, p, counts[p], static_cast<float>(n * (static_cast<int>(p) + step)) + 2.0f * comm.rank());
          CHECK(reducer.mark_ready(p));
          CHECK(!reducer.mark_ready(p));
        }
        CHECK(finish(reducer).empty());
        for (size_t p = 0; p < counts.size(); ++p) {
          for (size_t i = 0; i < counts[p]; ++i) {
            CHECK_EQ(gradient(reducer, p)[i], static_cast<float>(n * (static_cast<int>(p) + step)) + (n - 1.0f));
          }
        }
      }
    });
  }
}

// Gradients handed over by address, small ones and one large enough to bypass the caches on its way.
TEST(gradients_from_elsewhere_are_brought_into_the_bucket) {
  for (int n = 1; n <= 3; ++n) {
    run_ranks(n, [n](Communicator& comm) {
      const std::vector<size_t> counts = {3, 0, 50001, 64};
      Reducer reducer(borrowed(comm), params_of(counts), {.op = ReduceOp::kSum, .bucket_bytes = 4096});
      for (int step = 0; step < 3; ++step) {
        for (size_t p = 0; p < counts.size(); ++p) {
          std::vector<float> mine(counts[p] + 1);  // begins anywhere, and is gone when mark_ready returns
          for (size_t i = 0; i < counts[p]; ++i) mine[i + 1] = static_cast<float>((i + p + step) % 97 + comm.rank());
          CHECK(reducer.mark_ready(p, mine.data() + 1));
          std::fill(mine.begin(), mine.end(), -1.0f);
          CHECK(!reducer.mark_ready(p, mine.data() + 1));  // and leaves the bucket alone
        }
        CHECK(finish(reducer).empty());
        for (size_t p = 0; p < counts.size(); ++p) {
          for (size_t i = 0; i < counts[p]; ++i) {
            CHECK_EQ(gradient(reducer, p)[i], static_cast<float>(n * ((i + p + step) % 97) + n * (n - 1) / 2));
          }
        }
      }
    });
  }
}

// As a GradScaler finds its scale: the steps after an overflow are fine again, whatever shares a block with what.
TEST(an_infinity_is_gone_after_its_step) {
  Settings settings = test_settings();
  settings.compress_local = true;
  for (const bool stochastic : {false, true}) {
    run_ranks(2, settings, [&](Communicator& comm) {
      const std::vector<size_t> counts = {1001, 999, 65};
      Reducer reducer(borrowed(comm), params_of(counts),
                      {.encoding = {.codec = Codec::kInt8, .stochastic = stochastic}});
      for (int step = 0; step < 4; ++step) {
        for (size_t p = 0; p < counts.size(); ++p) {
          fill(reducer, p, counts[p], 1.0f);
          if (step == 0 && comm.rank() == 0) {
            gradient(reducer, p)[counts[p] - 1] = std::numeric_limits<float>::infinity();
          }
          CHECK(reducer.mark_ready(p));
        }
        finish(reducer);
        for (size_t p = 0; p < counts.size(); ++p) {
          const float* got = gradient(reducer, p);
          for (size_t i = 0; i < counts[p]; ++i) CHECK(step == 0 || std::abs(got[i] - 1.0f) < 0.1f);
          CHECK(step > 0 || !std::isfinite(got[counts[p] - 1]));
        }
      }
    });
  }
}

// Without room for other buckets the old ones are used on.
TEST(no_room_changes_nothing) {
  Settings settings = test_settings();
  settings.arena_mb = 16;
  run_ranks(2, settings, [](Communicator& comm) {
    constexpr size_t kCount = 1 << 20;  // 4 MiB each, in a bucket of its own: beside two there is room for one more
    const std::vector<size_t> counts = {kCount, kCount, 7};
    Reducer reducer(borrowed(comm), params_of(counts), {.bucket_bytes = 4 << 20, .first_bucket_bytes = 64});
    const auto step = [&](float value) {
      for (size_t p = 0; p < counts.size(); ++p) {
        fill(reducer, p, counts[p], value);
        CHECK(reducer.mark_ready(p));
      }
      CHECK(finish(reducer).empty());
      for (size_t p = 0; p < counts.size(); ++p) CHECK_EQ(gradient(reducer, p)[counts[p] - 1], value);
    };
    step(1);
    CHECK_THROWS(reducer.rebuild({0, 1, 2}), TransportError, "DCOLL_ARENA_MB");
    step(2);
    const auto before = reducer.gradient(1).first;
    CHECK_THROWS(reducer.move({0, 1}), TransportError, "DCOLL_ARENA_MB");
    CHECK(reducer.gradient(1).first == before);
    step(3);
  });
}

TEST(unused_parameters) {
  run_ranks(3, [](Communicator& comm) {
    Reducer reducer(borrowed(comm), params_of({4, 4, 4}), {.op = ReduceOp::kSum});
    for (size_t p = 0; p < 3; ++p) fill(reducer, p, 4, 99);  // stale values must not count
    // p0: everybody. p1: rank 2 only. p2: nobody.
    fill(reducer, 0, 4, 1);
    reducer.mark_ready(0);
    if (comm.rank() == 2) {
      fill(reducer, 1, 4, 5);
      reducer.mark_ready(1);
    }
    CHECK_EQ(reducer.missing().size(), comm.rank() == 2 ? size_t{1} : size_t{2});
    CHECK(finish(reducer) == std::vector<size_t>{2});
    for (int i = 0; i < 4; ++i) {
      CHECK_EQ(gradient(reducer, 0)[i], 3.0f);
      CHECK_EQ(gradient(reducer, 1)[i], 5.0f);
      CHECK_EQ(gradient(reducer, 2)[i], 0.0f);
    }
  });
}

TEST(rebuild_follows_the_observed_order) {
  run_ranks(2, [](Communicator& comm) {
    const std::vector<size_t> counts = {10, 20, 30, 40};
    Reducer reducer(borrowed(comm), params_of(counts), {.bucket_bytes = 128, .first_bucket_bytes = 64});
    auto step = [&] {
      for (size_t p : {size_t{2}, size_t{0}, size_t{3}}) {  // 1 never
        fill(reducer, p, counts[p], static_cast<float>(p));
        reducer.mark_ready(p);
      }
      CHECK(finish(reducer) == std::vector<size_t>{1});
      for (size_t p : {size_t{2}, size_t{0}, size_t{3}}) CHECK_EQ(gradient(reducer, p)[0], static_cast<float>(p));
    };
    step();
    const std::vector<size_t> order = {2, 0, 3, 1};
    CHECK(reducer.order() == order);
    reducer.rebuild(order);
    CHECK_EQ(bucket_of(reducer, 2), size_t{0});
    step();
    step();
    CHECK_THROWS(reducer.rebuild({0, 1, 2}), ArgumentError, "3 of 4");
    CHECK_THROWS(reducer.rebuild({0, 1, 2, 2}), ArgumentError, "twice or out of range");
    reducer.mark_ready(0);
    CHECK_THROWS(reducer.rebuild(order), ArgumentError, "in progress");
    finish(reducer);
  });
}

// One rank's second bucket is another: all ranks hear of it, no bucket stays in flight, and the next round works.
TEST(mismatch_leaves_a_usable_reducer) {
  run_ranks(2, [](Communicator& comm) {
    const std::vector<size_t> counts = {3, comm.rank() == 0 ? size_t{5} : size_t{60}, 7};
    const ReducerOptions options{.bucket_bytes = 1, .first_bucket_bytes = 1};
    Reducer odd(borrowed(comm), params_of(counts), options);
    for (size_t p = 0; p < 3; ++p) odd.mark_ready(p);
    CHECK_THROWS(finish(odd), MismatchError, "rank 0 called allreduce 'bucket 1: p1'");
    CHECK_EQ(odd.missing().size(), size_t{3});
    for (size_t b = 0; b < 3; ++b) CHECK(odd.bucket(b).operation->done.load());

    Reducer even(borrowed(comm), params_of({3, 5, 7}), options);
    for (size_t p = 0; p < 3; ++p) {
      fill(even, p, 1, 2.0f);
      even.mark_ready(p);
    }
    CHECK(finish(even).empty());
    CHECK_EQ(gradient(even, 1)[0], 2.0f);
  });
}

TEST(dtypes_have_buckets_of_their_own) {
  run_ranks(2, [](Communicator& comm) {
    std::vector<ParamInfo> params = params_of({8, 8, 8});
    params[1].dtype = DType::kBFloat16;
    Reducer reducer(borrowed(comm), params, {});
    CHECK(bucket_of(reducer, 0) == bucket_of(reducer, 2));
    CHECK(bucket_of(reducer, 0) != bucket_of(reducer, 1));
    params[1].dtype = DType::kInt32;
    CHECK_THROWS(Reducer(borrowed(comm), params, {}), ArgumentError, "Parameter 'p1' is int32");
    CHECK_THROWS(Reducer(borrowed(comm), params_of({1}), {.op = ReduceOp::kMax}), ArgumentError, "got max");
    for (size_t p : {size_t{0}, size_t{1}, size_t{2}}) reducer.mark_ready(p);
    finish(reducer);
  });
}

TEST_MAIN
