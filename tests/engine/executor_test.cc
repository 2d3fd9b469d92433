// Every registered algorithm of every collective, executed: ranks take turns in one thread, over real FIFOs, with
// slices so short that there are many rounds, one slot and two, chunks of unequal length and empty ones, in place and
// not. Integers, compared exactly.
#include "engine/schedule/executor.h"

#include <cstring>
#include <functional>

#include "plan/algorithms.h"
#include "support/check.h"
#include "transport/mapped/local.h"

using namespace dcoll;
using plan::Collective;

namespace {

using Buffer = std::vector<int32_t>;

// How `count` elements of rank s for rank d (all-to-all), or of block `d`, are shared out: unevenly, some none.
size_t share(uint32_t s, uint32_t d, size_t count) { return (s + 2 * d) % 3 == 1 ? 0 : count + (s * 5 + d) % 4; }

Layout layout_of(uint32_t chunks, const std::function<size_t(uint32_t)>& length) {
  std::vector<size_t> lengths;
  for (uint32_t c = 0; c < chunks; ++c) lengths.push_back(length(c));
  return Layout::of(lengths);
}

struct Layouts {
  Layout input, output;
};
Layouts layouts(const plan::Schedule& s, Collective collective, size_t count) {
  const uint32_t n = s.num_ranks, r = s.rank;
  switch (collective) {
    case Collective::kAllReduce:
    case Collective::kBroadcast:
      return {Layout::even(count, s.input_chunks), Layout::even(count, s.output_chunks)};
    case Collective::kReduceScatter:
      return {layout_of(n, [&](uint32_t c) { return share(0, c, count); }), Layout::of({share(0, r, count)})};
    case Collective::kAllGather:
      return {Layout::of({share(0, r, count)}), layout_of(n, [&](uint32_t c) { return share(0, c, count); })};
    case Collective::kAllToAll:
      return {layout_of(n, [&](uint32_t c) { return share(r, c, count); }),
              layout_of(n, [&](uint32_t c) { return share(c, r, count); })};
  }
  return {};
}

int32_t value(uint32_t rank, size_t i) { return static_cast<int32_t>(rank * 1000 + i % 997); }
int32_t value_sum(uint32_t n, size_t i) { return static_cast<int32_t>(n * (n - 1) / 2 * 1000 + n * (i % 997)); }

// What the collective promises, computed without a schedule.
Buffer expected(Collective collective, uint32_t n, uint32_t rank, uint32_t root, const std::vector<Layouts>& all) {
  const Layout& mine = all[rank].output;
  Buffer want;
  for (size_t c = 0; c < mine.num_chunks(); ++c) {
    for (size_t i = 0; i < mine.chunk(c).len; ++i) {
      const size_t at = mine.chunk(c).begin + i;
      switch (collective) {
        case Collective::kAllReduce:
          want.push_back(value_sum(n, at));
          break;
        case Collective::kBroadcast:
          want.push_back(value(root, at));
          break;
        case Collective::kReduceScatter:
          want.push_back(value_sum(n, all[rank].input.chunk(rank).begin + i));
          break;
        case Collective::kAllGather:
          want.push_back(value(static_cast<uint32_t>(c), i));
          break;
        case Collective::kAllToAll:
          want.push_back(value(static_cast<uint32_t>(c), all[c].input.chunk(rank).begin + i));
          break;
      }
    }
  }
  return want;
}

struct Case {
  const plan::Algorithm& algorithm;
  uint32_t n;
  size_t count;
  int slots;
  bool in_place;
};

void run_case(const Case& c) {
  const Collective collective = c.algorithm.collective;
  const uint32_t root = c.n - 1;
  constexpr size_t kSliceBytes = 64 * sizeof(int32_t);
  std::vector<Endpoint> endpoints =
      connect_local(static_cast<int>(c.n), {.arena_bytes = 1 << 20, .slot_bytes = kSliceBytes, .slots = c.slots});
  std::vector<Layouts> all;
  std::vector<Buffer> in(c.n), out(c.n);
  std::vector<std::unique_ptr<Executor>> executors;
  std::vector<const int32_t*> results;
  for (uint32_t r = 0; r < c.n; ++r) {
    auto schedule = std::make_shared<const plan::Schedule>(c.algorithm.build(c.n, r, root));
    all.push_back(layouts(*schedule, collective, c.count));
    const auto& [input, output] = all.back();
    in[r].resize(input.total());
    for (size_t i = 0; i < in[r].size(); ++i) in[r][i] = value(r, i);
    out[r].assign(output.total(), -1);
    const int32_t* source = in[r].data();
    int32_t* result = out[r].data();
    // In place, the smaller buffer is the rank's own block of the larger one.
    if (c.in_place && collective == Collective::kAllGather) {
      result = out[r].data();
      std::copy(in[r].begin(), in[r].end(), out[r].begin() + static_cast<ptrdiff_t>(output.chunk(r).begin));
      source = result + output.chunk(r).begin;
    } else if (c.in_place) {
      result = in[r].data() + (collective == Collective::kReduceScatter ? input.chunk(r).begin : 0);
    }
    results.push_back(result);
    executors.push_back(std::make_unique<Executor>(*endpoints[r].transport, schedule,
                                                   Binding{.input = reinterpret_cast<const std::byte*>(source),
                                                           .output = reinterpret_cast<std::byte*>(result),
                                                           .input_layout = input,
                                                           .output_layout = output,
                                                           .dtype = DType::kInt32,
                                                           .op = ReduceOp::kSum},
                                                   kSliceBytes));
  }
  std::vector<bool> done(c.n, false);
  for (uint32_t left = c.n; left > 0;) {
    bool moved = false;
    for (uint32_t r = 0; r < c.n; ++r) {
      if (done[r] || !executors[r]->poll(moved)) continue;
      done[r] = true;
      --left;
    }
    if (!moved && left > 0) throw std::runtime_error("nobody moves");
  }
  for (uint32_t r = 0; r < c.n; ++r) {
    const Buffer want = expected(collective, c.n, r, root, all);
    CHECK(want.empty() || std::memcmp(results[r], want.data(), want.size() * sizeof(int32_t)) == 0);
  }
}

}  // namespace

TEST(every_algorithm_moves_every_count) {
  for (const plan::Algorithm& algorithm : plan::algorithms()) {
    for (uint32_t n = 1; n <= 8; ++n) {
      for (const size_t count :
           {size_t{0}, size_t{1}, size_t{n} - 1, size_t{n}, size_t{n} + 1, size_t{301}, size_t{5003}}) {
        for (const int slots : {1, 2}) {
          for (const bool in_place : {false, true}) {
            if (in_place && algorithm.collective == Collective::kAllToAll) continue;
            try {
              run_case({algorithm, n, count, slots, in_place});
            } catch (const std::exception& e) {
              throw std::runtime_error(std::string(collective_name(algorithm.collective)) + " " +
                                       std::string(algorithm.name) + ", " + std::to_string(n) + " ranks, count " +
                                       std::to_string(count) + ", " + std::to_string(slots) + " slots" +
                                       (in_place ? ", in place: " : ": ") + e.what());
            }
          }
        }
      }
    }
  }
}

TEST_MAIN
