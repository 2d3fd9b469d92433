// When encoded messages are predicted to pay.
#include "plan/encoded.h"

#include "support/check.h"

using namespace dcoll::plan;

namespace {

constexpr uint64_t kMiB = 1024 * 1024, kSlice = 60 * 1024;
constexpr Coding kHalf{.share = 0.5, .encode_us_per_byte = 3e-5, .decode_us_per_byte = 2e-5};
constexpr Coding kTop{.share = 0.015, .gathered = true, .encode_us_per_byte = 7e-5, .decode_us_per_byte = 1e-5};

Topology hosts(uint32_t nodes, uint32_t ranks_per_node, double gigabits) {
  Topology topology = Topology::blocks(nodes * ranks_per_node, ranks_per_node);
  topology.network = {.alpha_us = 20, .overhead_us = 2, .beta_us_per_byte = 8e-3 / gigabits};
  return topology;
}

double times_faster(const Coding& coding, const Topology& topology, bool two_levels = false) {
  const EncodedTimes times = predict_encoded(64 * kMiB, coding, topology, kSlice, two_levels);
  return times.plain_us / times.encoded_us;
}

}  // namespace

TEST(on_a_slow_network_half_the_bytes_take_half_the_time) {
  for (const double gigabits : {0.1, 1.0}) {
    CHECK(times_faster(kHalf, hosts(4, 1, gigabits)) > 1.8 && times_faster(kHalf, hosts(4, 1, gigabits)) < 2);
    CHECK(times_faster(kHalf, hosts(4, 2, gigabits), true) > 1.8 &&
          times_faster(kHalf, hosts(4, 2, gigabits), true) < 2);
  }
  CHECK(times_faster(kTop, hosts(4, 1, 1)) > 20);
}

TEST(the_faster_the_network_the_less_it_pays) {
  double before = 2;
  for (const double gigabits : {0.1, 1.0, 10.0, 100.0}) {
    const double now = times_faster(kHalf, hosts(4, 1, gigabits));
    CHECK(now < before);
    before = now;
  }
  CHECK(!predict_encoded(64 * kMiB, kHalf, hosts(4, 1, 100), kSlice, false).pays());
  CHECK(predict_encoded(64 * kMiB, kHalf, hosts(4, 1, 1), kSlice, false).pays());
}

TEST(a_slow_encoder_does_not_pay) {
  Coding slow = kHalf;
  slow.encode_us_per_byte = 1e-2;
  CHECK(!predict_encoded(64 * kMiB, slow, hosts(4, 1, 1), kSlice, false).pays());
}

TEST(selections_longer_than_the_operand_travel_as_float32_and_do_not_pay) {
  Coding much = kTop;
  much.share = 0.75;
  CHECK(predict_encoded(64 * kMiB, much, hosts(2, 1, 1), kSlice, false).encoded_us > 0);
  CHECK(!predict_encoded(64 * kMiB, much, hosts(4, 1, 1), kSlice, false).pays());
  CHECK(!predict_encoded(64 * kMiB, much, hosts(8, 1, 1), kSlice, false).pays());
}

// Of 2 ranks each gets one selection either way. Everybody's to everybody is n - 1 selections a rank, by owners it
// is 2.
TEST(owners_pay_where_there_are_many_nodes_and_much_to_send) {
  for (const int ranks : {1, 2, 3}) CHECK(!owners_pay(kMiB, hosts(ranks, 1, 1), kSlice, false));
  for (const int ranks : {8, 16}) {
    CHECK(owners_pay(kMiB, hosts(ranks, 1, 1), kSlice, false));
    CHECK(owners_pay(kMiB, hosts(ranks, 2, 1), kSlice, true));
    CHECK(!owners_pay(64, hosts(ranks, 1, 1), kSlice, false));  // both are rounds of small messages
  }
  CHECK(!owners_pay(kMiB, hosts(2, 4, 1), kSlice, true));  // nodes count, not ranks
}

TEST_MAIN
