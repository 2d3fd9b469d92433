#include "plan/encoded.h"

#include <algorithm>
#include <map>

#include "plan/agreement.h"
#include "plan/hierarchical.h"
#include "plan/select.h"

namespace dcoll::plan {
namespace {

// What a byte of an encoded message costs the CPUs beyond what it does in a schedule that goes over the operands: it is
// written to memory, sent from there, and read again. Measured where the "network" is memory (two nodes pretended on
// one machine): 16 bits there take 1.4 times as long as float32.
constexpr double kCpuUsPerByte = 4e-4;

double part_us(Collective collective, double bytes, const Topology& topology, uint64_t slice_bytes) {
  return select_part(collective, static_cast<uint64_t>(bytes), topology, slice_bytes).candidates[0].predicted_us;
}

// Selections of so many bytes by owners: how many come, the parts, and the sums.
double owners_us(double bytes, const Topology& topology, uint64_t slice_bytes) {
  return part_us(Collective::kAllToAll, 8.0 * topology.num_ranks, topology, slice_bytes) +
         part_us(Collective::kAllToAll, bytes, topology, slice_bytes) +
         part_us(Collective::kAllGather, bytes, topology, slice_bytes);
}

// Who carries slices between the nodes, and over which links.
struct Between {
  Topology links;
  uint32_t carriers;
};
Between between_nodes_of(uint64_t bytes, const Topology& topology) {
  std::map<uint32_t, uint32_t> sizes;
  for (const uint32_t node : topology.node_of_rank) ++sizes[node];
  uint32_t least = topology.num_ranks;
  for (const auto& [node, size] : sizes) least = std::min(least, size);
  const uint32_t carriers = carriers_for(bytes, least, topology.shared_cores);
  return {between_nodes(topology, static_cast<uint32_t>(sizes.size()), carriers), carriers};
}

// Between the ranks of `topology`, each with `bytes` of float32.
double exchange_us(double bytes, const Coding& coding, const Topology& topology, uint64_t slice_bytes) {
  const double n = topology.num_ranks, sent = bytes * coding.share;
  const double encode_us = bytes * coding.encode_us_per_byte, decode_us = bytes * coding.decode_us_per_byte;
  if (coding.gathered && n * coding.share <= 2) {
    const double gathered = part_us(Collective::kAllGather, n * sent, topology, slice_bytes);
    const double owners = owners_us(sent, topology, slice_bytes);
    if (2 * owners <= gathered) return owners + encode_us + 2 * decode_us + 2 * sent * kCpuUsPerByte;
    return gathered + encode_us + n * decode_us + (n - 1) * sent * kCpuUsPerByte;
  }
  const double dense = coding.gathered ? bytes : sent;  // selections that would be longer travel as float32
  return part_us(Collective::kAllToAll, dense, topology, slice_bytes) +
         part_us(Collective::kAllGather, dense, topology, slice_bytes) + encode_us +
         2 * (n - 1) / n * (decode_us + dense * kCpuUsPerByte);
}

}  // namespace

EncodedTimes predict_encoded(uint64_t bytes, const Coding& coding, const Topology& topology, uint64_t slice_bytes,
                             bool two_levels) {
  if (!two_levels) {
    return {select(Collective::kAllReduce, bytes, topology, slice_bytes).candidates[0].predicted_us,
            agreement_us(topology, 0) + exchange_us(static_cast<double>(bytes), coding, topology, slice_bytes)};
  }
  const HierarchicalCost plain = predict_hierarchical(bytes, topology, slice_bytes);
  const Between between = between_nodes_of(bytes, topology);
  return {plain.total_us(),
          plain.agreement_us + plain.in_node_us +
              exchange_us(static_cast<double>(bytes) / between.carriers, coding, between.links, slice_bytes)};
}

bool owners_pay(uint64_t bytes, const Topology& topology, uint64_t slice_bytes, bool two_levels) {
  const Between between = two_levels ? between_nodes_of(bytes, topology) : Between{topology, 1};
  const double n = between.links.num_ranks, each = static_cast<double>(bytes) / between.carriers;
  const double gathered = part_us(Collective::kAllGather, n * each, between.links, slice_bytes);
  return n > 2 && 2 * owners_us(each, between.links, slice_bytes) <= gathered;
}

}  // namespace dcoll::plan
