// Communicators of some of the ranks: overlapping ones, beside the whole, made and dropped many times.
#include "engine/communicator/subset.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "base/error.h"
#include "engine/communicator/world.h"
#include "rank_threads.h"
#include "support/check.h"

using namespace dcoll;
using namespace dcoll::test;

namespace {

using CommPtr = std::shared_ptr<Communicator>;

void on_ranks(int n, const std::function<void(const CommPtr&)>& body) {
  const std::vector<CommPtr> comms = connect_threads(n, test_settings());
  on_threads(n, [&](int rank) {
    const CommPtr& comm = comms[rank];
    try {
      body(comm);
    } catch (const std::exception& error) {
      comm->fail(error.what());  // the others must not wait
      throw;
    }
    comm->close();
  });
}

// A collective of the whole that tells every rank what each has to say.
std::vector<uint64_t> exchange(Communicator& whole, uint64_t mine) {
  auto operation = whole.submit({.kind = Kind::kAllGather, .in = &mine, .count = 1, .row_elems = sizeof mine});
  whole.wait(*operation);
  std::vector<uint64_t> all(static_cast<size_t>(whole.size()));
  std::memcpy(all.data(), operation->output->data(), all.size() * sizeof mine);
  return all;
}

// Null where this rank is not in it.
CommPtr make_subset(const CommPtr& whole, const std::vector<int>& ranks, std::vector<uint64_t>* places = nullptr) {
  std::unique_ptr<Subset> subset;
  if (std::find(ranks.begin(), ranks.end(), whole->rank()) != ranks.end()) {
    subset = std::make_unique<Subset>(whole, ranks);
  }
  const std::vector<uint64_t> all = exchange(*whole, subset != nullptr ? subset->offset() : 0);
  std::vector<uint64_t> offsets;
  for (const int rank : ranks) offsets.push_back(all[rank]);
  if (places != nullptr && subset != nullptr) places->push_back(subset->offset());
  return subset != nullptr ? subset->connect(offsets, nullptr) : nullptr;
}

// The sum over `comm` of count numbers; rank r of the whole brings r + 1 everywhere.
void check_sum(Communicator& comm, std::byte* memory, size_t count, int rank, const std::vector<int>& ranks) {
  auto* numbers = reinterpret_cast<float*>(memory);
  std::fill_n(numbers, count, static_cast<float>(rank + 1));
  auto operation = comm.submit({.kind = Kind::kAllReduce, .in = numbers, .out = numbers, .count = count});
  comm.wait(*operation);
  const float want = static_cast<float>(std::accumulate(ranks.begin(), ranks.end(), static_cast<int>(ranks.size())));
  for (size_t i = 0; i < count; ++i) CHECK_EQ(numbers[i], want);
}

void close(Communicator& whole, CommPtr& comm) {
  if (comm != nullptr) comm->close();
  exchange(whole, 0);
  comm = nullptr;
}

}  // namespace

TEST(overlapping_sets_beside_the_whole) {
  const std::vector<std::vector<int>> sets = {{0, 1}, {1, 2, 3}, {0, 1, 2, 3}, {2}};
  on_ranks(4, [&](const CommPtr& whole) {
    const int rank = whole->rank();
    std::vector<CommPtr> made;
    for (const auto& ranks : sets) made.push_back(make_subset(whole, ranks));
    // Memory of the whole, and memory of its own, small and large.
    const auto mapped = whole->alloc(400'000);
    std::vector<std::byte> plain(400'000);
    for (const size_t count : {size_t{1}, size_t{3000}, size_t{100'000}}) {
      for (size_t s = 0; s < sets.size(); ++s) {
        if (made[s] == nullptr) continue;
        CHECK_EQ(made[s]->size(), static_cast<int>(sets[s].size()));
        CHECK_EQ(sets[s][made[s]->rank()], rank);
        check_sum(*made[s], mapped->data(), count, rank, sets[s]);
        check_sum(*made[s], plain.data(), count, rank, sets[s]);
        const auto own = made[s]->alloc(4 * count);
        check_sum(*made[s], own->data(), count, rank, sets[s]);
        if (sets[s].size() == 4) check_sum(*whole, own->data(), count, rank, sets[s]);
      }
    }
    for (CommPtr& comm : made) close(*whole, comm);
    check_sum(*whole, plain.data(), 10, rank, {0, 1, 2, 3});
  });
}

TEST(regions_are_used_again) {
  on_ranks(3, [](const CommPtr& whole) {
    std::vector<uint64_t> places;
    for (int round = 0; round < 20; ++round) {
      const std::vector<int> ranks = round % 2 ? std::vector<int>{0, 2} : std::vector<int>{0, 1, 2};
      CommPtr comm = make_subset(whole, ranks, &places);
      std::vector<std::byte> plain(400);
      if (comm != nullptr) check_sum(*comm, plain.data(), 100, whole->rank(), ranks);
      close(*whole, comm);
    }
    // One place for each size: sets of two and of three ranks.
    std::sort(places.begin(), places.end());
    CHECK(std::unique(places.begin(), places.end()) - places.begin() <= 2);
  });
}

TEST(a_failure_stays_in_its_set) {
  on_ranks(3, [](const CommPtr& whole) {
    const std::vector<int> ranks = {0, 2};
    CommPtr comm = make_subset(whole, ranks);
    if (whole->rank() == 0) comm->fail("rank 0 gave up");
    if (whole->rank() == 2) {
      std::vector<std::byte> plain(40);
      CHECK_THROWS(check_sum(*comm, plain.data(), 10, 2, ranks), PeerError, "rank 0 gave up");
    }
    std::vector<std::byte> plain(40);
    check_sum(*whole, plain.data(), 10, whole->rank(), {0, 1, 2});
    close(*whole, comm);
  });
}

TEST(wrong_ranks_are_refused) {
  on_ranks(2, [](const CommPtr& whole) {
    const int rank = whole->rank();
    for (const std::vector<int>& ranks : {std::vector<int>{}, {1 - rank}, {1, 0}, {0, 0, 1}, {0, 1, 2}}) {
      CHECK_THROWS(Subset(whole, ranks), ArgumentError, "ascending");
    }
    Subset both(whole, {0, 1});
    const std::vector<uint64_t> one = {0}, outside = {kUnmappedOffset, kUnmappedOffset};
    CHECK_THROWS(both.connect(one, nullptr), ArgumentError, "got 1 offsets");
    CHECK_THROWS(both.connect(outside, nullptr), TransportError, "outside the arena");
  });
}

TEST_MAIN
