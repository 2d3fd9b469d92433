// All-reduces whose messages are encoded (kernels/codec.h), ranks as threads: exact where the values survive encoding,
// the same bits on all ranks, and nothing lost where the errors are kept.
#include <array>
#include <cmath>
#include <cstring>
#include <mutex>
#include <set>
#include <utility>

#include "engine/links/trial.h"
#include "rank_threads.h"
#include "support/check.h"

using namespace dcoll;
using namespace dcoll::test;

namespace {

struct Job {
  int ranks;
  Settings settings;
};

std::vector<Job> jobs() {
  std::vector<Job> all;
  for (const int n : {2, 3, 5}) {
    all.push_back({n, without_shared_memory()});
    all.push_back({n, test_settings()});
  }
  for (const std::vector<int>& nodes : {std::vector<int>{0, 0, 1, 1}, {0, 1, 0, 1}, {0, 0, 0, 1}, {0, 0, 1, 2, 2}}) {
    all.push_back({static_cast<int>(nodes.size()), test_settings()});
    all.back().settings.nodes = nodes;
  }
  for (Job& job : all) job.settings.compress_local = true;
  return all;
}

// The greatest of each block is 127, so int8 keeps all of them, and equal operands leave multiples of one scale.
float whole(size_t i) { return static_cast<float>(i % 16 == 0 ? 127 : static_cast<int>(i * 7 % 255) - 127); }

struct Called {
  std::vector<float> in, out, error;
};

constexpr Encoding kAll[] = {{Codec::kFloat16}, {Codec::kBFloat16}, {Codec::kInt8}, {Codec::kFloat32}};
constexpr auto kOwners = kernels::Exchange::kOwners;
constexpr Encoding kTop[] = {{Codec::kTopK, 0.01f},
                             {Codec::kTopK, 0.2f},
                             {Codec::kTopK, 1.0f},
                             {.codec = Codec::kTopK, .ratio = 0.01f, .exchange = kOwners},
                             {.codec = Codec::kTopK, .ratio = 0.2f, .exchange = kOwners},
                             {.codec = Codec::kTopK, .ratio = 1.0f, .exchange = kOwners}};

Called reduce(Communicator& comm, Encoding encoding, std::vector<float> in, ReduceOp op, bool in_place = false,
              double prescale = 1.0) {
  Called called{in, std::vector<float>(in.size()), std::vector<float>(in.size())};
  float* const out = in_place ? in.data() : called.out.data();
  run(comm, {.kind = Kind::kAllReduce,
             .in = in.data(),
             .out = out,
             .count = in.size(),
             .op = op,
             .prescale = prescale,
             .encoding = encoding,
             .feedback = {.error = called.error.data()}});
  if (in_place) called.out = in;
  return called;
}

void check_exact(Communicator& comm, Encoding encoding, size_t count) {
  const Codec codec = encoding.codec;
  // bfloat16 has 8 bits: 5 ranks' sums must fit them.
  const float unit = codec == Codec::kBFloat16 ? 1.0f / 127 : 1.0f;
  std::vector<float> in(count);
  for (size_t i = 0; i < count; ++i) in[i] = codec == Codec::kInt8 ? whole(i) : std::round(whole(i) * unit) + 2;
  for (const bool in_place : {false, true}) {
    for (const auto op : {ReduceOp::kSum, ReduceOp::kAverage}) {
      const Called got = reduce(comm, encoding, in, op, in_place, op == ReduceOp::kSum ? 2.0 : 1.0);
      const float factor = op == ReduceOp::kSum ? 2.0f * static_cast<float>(comm.size()) : 1.0f;
      for (size_t i = 0; i < count; ++i) {
        CHECK_EQ(got.out[i], in[i] * factor);
        CHECK_EQ(got.error[i], 0.0f);
      }
    }
  }
}

}  // namespace

TEST(what_survives_encoding_is_summed_exactly) {
  for (const Job& job : jobs()) {
    run_ranks(job.ranks, job.settings, [](Communicator& comm) {
      for (const Encoding& encoding : kAll) {
        for (const size_t count : {0, 1, 255, 256, 257, 1000, 70001}) check_exact(comm, encoding, count);
        if (!kSanitized) check_exact(comm, encoding, 1500001);
      }
      // Equal operands: what one selects all do, and a share of all of them goes as a buffer.
      for (const size_t count : {0, 1, 255, 70001}) check_exact(comm, {Codec::kTopK, 1.0f}, count);
    });
  }
}

// The sum of what was given is what came out and what was kept, up to float32's own rounding.
TEST(results_are_the_same_bits_and_errors_make_up_for_them) {
  constexpr size_t kCount = kSanitized ? 20000 : 1200000;
  for (const Job& job : jobs()) {
    std::vector<Encoding> all_of_them(std::begin(kAll), std::end(kAll));
    all_of_them.insert(all_of_them.end(), std::begin(kTop), std::end(kTop));
    for (const Encoding& encoding : all_of_them) {
      // An owner passes on a share of all elements; of those it owns there may be a few more.
      const bool sends_all =
          encoding == Encoding{Codec::kFloat32} || (encoding.ratio == 1 && encoding.exchange != kOwners);
      std::mutex mutex;
      std::vector<Called> all;
      run_ranks(job.ranks, job.settings, [&](Communicator& comm) {
        std::vector<float> in(kCount);
        for (size_t i = 0; i < kCount; ++i) {
          in[i] = std::sin(static_cast<float>(i * 13 + static_cast<size_t>(comm.rank()) * 977));
        }
        Called called = reduce(comm, encoding, in, ReduceOp::kAverage);
        const std::lock_guard lock(mutex);
        all.push_back(std::move(called));
      });
      bool any_error = false;
      for (size_t i = 0; i < kCount; ++i) {
        double given = 0, kept = 0;
        for (const Called& one : all) {
          CHECK_EQ(one.out[i], all[0].out[i]);
          given += one.in[i];
          kept += one.error[i];
        }
        any_error |= kept != 0;
        CHECK(std::fabs(given - (all[0].out[i] * job.ranks + kept)) < 1e-5);
        CHECK(encoding.codec == Codec::kTopK || std::fabs(kept) < 0.02 * job.ranks);
      }
      CHECK(any_error != sends_all);
    }
  }
}

// Constants that cut what is not encoded into shorter pieces: of a network on which messages take long.
TEST(bits_do_not_depend_on_what_was_measured) {
  constexpr size_t kCount = 600000;
  Settings levels = test_settings();
  levels.nodes = {0, 0, 1, 1};
  for (const Settings& settings : {levels, without_shared_memory()}) {
    for (const char* codec : {"int8", "int8 stochastic", "topk 0.05 gather", "topk 0.05 owners"}) {
      std::vector<float> first;
      for (const double beta_us_per_byte : {8e-5, 8e-5, 8e-3}) {
        plan::Constants constants;
        constants.network.beta_us_per_byte = beta_us_per_byte;
        LinkConstants links;
        links.use = LinkConstants::Use::kAlwaysMeasure;
        links.may_measure = false;
        links.of_the_job->set(constants);
        const auto world = connect_threads(4, settings, links);
        on_threads(4, [&](int rank) {
          Communicator& comm = *world[static_cast<size_t>(rank)];
          std::vector<float> in(kCount);
          for (size_t i = 0; i < kCount; ++i) in[i] = std::sin(static_cast<float>(i * 13 + 977 * comm.rank()));
          reduce(comm, {}, in, ReduceOp::kSum);  // which learns them
          const Called called = reduce(comm, kernels::encoding_named(codec), in, ReduceOp::kSum);
          CHECK_EQ(comm.constants().topology.network.beta_us_per_byte, beta_us_per_byte);
          if (rank != 0) return;
          if (first.empty()) first = called.out;
          CHECK(std::memcmp(first.data(), called.out.data(), kCount * sizeof(float)) == 0);
        });
      }
    }
  }
}

TEST(a_trial_takes_turns_and_compares_medians) {
  Trial trial;
  constexpr std::pair<bool, double> kTimes[] = {{false, 1}, {true, 50}, {true, 20}, {true, 40},
                                                {true, 30}, {false, 9}, {false, 3}, {false, 900}};
  for (const auto& [second, us] : kTimes) {
    CHECK(!trial.is_done());
    CHECK_EQ(trial.second_next(), second);
    trial.note(us, 2);
  }
  CHECK(trial.is_done());
  CHECK_EQ(trial.median_us_per_byte(false), 3.0);
  CHECK_EQ(trial.median_us_per_byte(true), 17.5);
}

TEST(a_trial_ends_early_where_one_way_is_much_slower) {
  for (const double slower : {1.4, 1.6}) {
    Trial trial(16);
    size_t weighed = 0, calls = 0;
    for (; !trial.is_done(); ++calls) {
      trial.note(trial.second_next() ? slower : 1.0, 1);
      if (!trial.is_to_weigh()) continue;
      ++weighed;
      trial.weigh(trial.median_us_per_byte(false), trial.median_us_per_byte(true));
    }
    CHECK_EQ(calls, slower > 1.5 ? 8u : 32u);
    CHECK_EQ(weighed, slower > 1.5 ? 1u : 2u);
  }
}

// As the buckets of one step: each size goes both ways, and their times, which grow with them, do not decide.
TEST(a_trial_is_fair_to_sizes_that_come_round) {
  constexpr size_t kSizes[] = {17 << 20, 25 << 20, 30 << 20, 19 << 20};
  for (size_t different = 1; different <= std::size(kSizes); ++different) {
    for (const size_t each : {4, 8, 16}) {
      for (const bool second_is_faster : {false, true}) {
        Trial trial(each);
        std::array<std::set<size_t>, 2> gone;
        size_t calls = 0;
        for (; !trial.is_done(); ++calls) {
          const size_t bytes = kSizes[calls % different];
          gone[trial.second_next()].insert(bytes);
          const bool is_faster = trial.second_next() == second_is_faster;
          trial.note((is_faster ? 0.9 : 1.0) * static_cast<double>(bytes), bytes);
        }
        CHECK_EQ(calls, 2 * each);
        for (const auto& sizes : gone) CHECK_EQ(sizes.size(), different);
        CHECK_EQ(trial.median_us_per_byte(true) < trial.median_us_per_byte(false), second_is_faster);
      }
    }
  }
  CHECK_EQ(Trial::calls_each_way(100), 16u);
  CHECK_EQ(Trial::calls_each_way(2 << 20), 8u);
  CHECK_EQ(Trial::calls_each_way(1 << 30), 4u);
}

TEST(only_float32_that_is_summed_between_nodes_is_encoded) {
  const float third = 1.0f / 3;
  run_ranks(2, test_settings(), [&](Communicator& comm) {
    CHECK_EQ(reduce(comm, {Codec::kBFloat16}, {third}, ReduceOp::kAverage).out[0], third);
  });
  Settings forced = test_settings();
  forced.compress_local = true;
  run_ranks(2, forced, [&](Communicator& comm) {
    CHECK(reduce(comm, {Codec::kBFloat16}, {third}, ReduceOp::kAverage).out[0] != third);
    CHECK_EQ(reduce(comm, {Codec::kBFloat16}, {third}, ReduceOp::kMax).out[0], third);
  });
  run_ranks(2, without_shared_memory(), [&](Communicator& comm) {  // as between nodes
    CHECK_EQ(reduce(comm, {Codec::kBFloat16}, {third}, ReduceOp::kAverage).out[0], third);
    const std::vector<float> many(20000, third);
    CHECK(reduce(comm, {Codec::kBFloat16}, many, ReduceOp::kAverage).out[0] != third);
  });
}

TEST_MAIN
