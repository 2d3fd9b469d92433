// What the all-reduce on two levels is made of: carriers, pieces, the handshake.
#include "plan/agreement.h"
#include "plan/hierarchical.h"
#include "support/check.h"

using namespace dcoll::plan;

namespace {

constexpr uint64_t kKiB = 1024, kMiB = 1024 * kKiB, kSlice = 60 * kKiB;

Topology lab(double beta_us_per_byte) {
  Topology topology = Topology::blocks(8, 2);
  topology.network = {.alpha_us = 20, .overhead_us = 5, .beta_us_per_byte = beta_us_per_byte};
  return topology;
}

constexpr double kOneGigabit = 8e-3, kTenGigabit = 8e-4;

}  // namespace

TEST(on_shared_cores_every_carrier_has_enough_to_carry) {
  for (const uint64_t bytes : {uint64_t{1}, 64 * kKiB, kMiB, 64 * kMiB}) CHECK_EQ(carriers_for(bytes, 8, false), 8u);
  CHECK_EQ(carriers_for(0, 8, true), 1u);
  CHECK_EQ(carriers_for(192 * kKiB, 8, true), 1u);
  CHECK_EQ(carriers_for(384 * kKiB - 1, 8, true), 1u);
  CHECK_EQ(carriers_for(384 * kKiB, 8, true), 2u);
  CHECK_EQ(carriers_for(kMiB, 8, true), 5u);
  CHECK_EQ(carriers_for(64 * kMiB, 8, true), 8u);
  CHECK_EQ(carriers_for(64 * kMiB, 1, true), 1u);
}

TEST(few_pieces_are_halved_where_the_wire_is_what_takes_time) {
  const uint64_t most = most_piece_bytes(4, 2, kSlice);
  CHECK_EQ(most, 16 * kSlice);
  CHECK_EQ(piece_bytes(4 * kMiB, most, lab(kOneGigabit).network, kSlice), most / 2);
  CHECK_EQ(piece_bytes(32 * most, most, lab(kOneGigabit).network, kSlice), most / 2);
  CHECK_EQ(piece_bytes(32 * most + 1, most, lab(kOneGigabit).network, kSlice), most);
  CHECK_EQ(piece_bytes(4 * kMiB, most, lab(kTenGigabit).network, kSlice), most);
  CHECK_EQ(most_piece_bytes(64, 64, kSlice), 8 * kMiB);
  CHECK_EQ(most_piece_bytes(64, 64, kSlice, /*little_memory=*/true), kMiB / 2);
}

TEST(the_measured_handshake_counts) {
  Topology topology = lab(kOneGigabit);
  const double small = predict_hierarchical(64, topology, kSlice).total_us();
  const double large = predict_hierarchical(kMiB, topology, kSlice).total_us();
  const double followed = predict_hierarchical(kMiB, topology, kSlice).agreement_us;
  topology.handshake_us = 1000;
  CHECK_EQ(predict_hierarchical(0, topology, kSlice).total_us(), 1000.0);
  CHECK(predict_hierarchical(64, topology, kSlice).total_us() > small);
  CHECK(std::abs(predict_hierarchical(kMiB, topology, kSlice).total_us() - (large - followed + 1000)) < 1e-6);

  Topology flat = Topology::blocks(4, 1);
  flat.handshake_us = 500;
  CHECK_EQ(agreement_us(flat, 0), 500.0);
  CHECK(agreement_us(flat, 4096) > 500.0);
  CHECK_EQ(agreement_us(Topology::blocks(1, 1), 0), 0.0);
  // It is over before the link has carried what the call before left to it, or it is not.
  const auto ring_us = [&](uint64_t bytes) {
    const Choice choice = select(Collective::kAllReduce, bytes, flat, kSlice);
    for (const Candidate& one : choice.candidates) {
      if (one.algorithm->name == "ring") return one.predicted_us;
    }
    return 0.0;
  };
  flat.network = {.alpha_us = 20, .overhead_us = 5, .beta_us_per_byte = kOneGigabit, .burst_bytes = 1e6};
  CHECK_EQ(ring_us(kMiB), 2 * 3 / 4.0 * kMiB * kOneGigabit);
  CHECK(ring_us(1024) > 500.0);
}

TEST_MAIN
