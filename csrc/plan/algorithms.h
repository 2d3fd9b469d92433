// Every algorithm of the library: pure functions (number of ranks, rank) -> Schedule. One file per algorithm family.
// Peers are ranks of the communicator. All builders work for every n >= 1 up to 65,535.
// They throw ArgumentError for a rank, root or channel number out of range.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "plan/schedule.h"

namespace dcoll::plan {

// What the collective promises, so that verify() knows what to check.
//   kAllReduce      in: C chunks, out: C chunks; out[c] = reduction over ranks of in[c], on every rank
//   kReduceScatter  in: k*n chunks, out: k chunks on each rank; out[j] on rank r = reduction of in[r*k + j]
//   kAllGather      in: k chunks, out: n*k chunks; out[r*k + j] = rank r's in[j]
//   kBroadcast      in, out: C chunks (in is read on the root only); out = root's in
//   kAllToAll       in: n chunks, out: n chunks; out[s] on rank r = rank s's in[r]
enum class Collective : uint8_t { kAllReduce, kReduceScatter, kAllGather, kBroadcast, kAllToAll };

// "all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"
std::string_view collective_name(Collective collective);
// Throws ArgumentError listing the names when there is no such collective.
Collective parse_collective(std::string_view name);

// all-reduce
Schedule ring_all_reduce(uint32_t n, uint32_t rank, uint32_t num_channels = 1);              // ring.cc
Schedule tree_all_reduce(uint32_t n, uint32_t rank);                                         // tree.cc: double binary
Schedule halving_doubling_all_reduce(uint32_t n, uint32_t rank, uint32_t num_channels = 1);  // halving_doubling.cc
Schedule recursive_doubling_all_reduce(uint32_t n, uint32_t rank);                           // recursive_doubling.cc
Schedule direct_all_reduce(uint32_t n, uint32_t rank);                                       // direct.cc: rank order
// reduce-scatter
Schedule ring_reduce_scatter(uint32_t n, uint32_t rank);               // ring.cc
Schedule recursive_halving_reduce_scatter(uint32_t n, uint32_t rank);  // halving_doubling.cc
Schedule direct_reduce_scatter(uint32_t n, uint32_t rank);             // direct.cc: rank order
// all-gather
Schedule ring_all_gather(uint32_t n, uint32_t rank);    // ring.cc
Schedule bruck_all_gather(uint32_t n, uint32_t rank);   // halving_doubling.cc
Schedule direct_all_gather(uint32_t n, uint32_t rank);  // direct.cc
// broadcast
Schedule tree_broadcast(uint32_t n, uint32_t rank, uint32_t root);      // tree.cc: binary
Schedule binomial_broadcast(uint32_t n, uint32_t rank, uint32_t root);  // broadcast.cc
Schedule chain_broadcast(uint32_t n, uint32_t rank, uint32_t root);     // broadcast.cc
// all-to-all
Schedule pairwise_all_to_all(uint32_t n, uint32_t rank);  // pairwise.cc
Schedule direct_all_to_all(uint32_t n, uint32_t rank);    // direct.cc

// How an algorithm goes about it. Code asks for this; names are for texts.
enum class Family : uint8_t {
  kRing,
  kTree,
  kHalvingDoubling,
  kRecursiveDoubling,
  kRecursiveHalving,
  kBruck,
  kBinomial,
  kChain,
  kPairwise,
  kDirect,
};

// The registry: what DCOLL_ALGO and algo= accept, with the reason each exists.
struct Algorithm {
  Collective collective;
  Family family;
  std::string_view name;                                        // "ring", "tree", "halving_doubling"
  std::string_view reason;                                      // one line
  Schedule (*build)(uint32_t n, uint32_t rank, uint32_t root);  // root is ignored where there is none
  // Where all ranks act alike: one whose schedule says how (simulate.h).
  std::optional<uint32_t> stand_in{};
};
std::span<const Algorithm> algorithms();
const Algorithm* find_algorithm(Collective collective, std::string_view name);  // nullptr when unknown
const Algorithm& algorithm_of(Collective collective, Family family);            // there must be one
// The programs of all n ranks, in rank order: what verify() and predict_us() take.
std::vector<Schedule> build_all(const Algorithm& algorithm, uint32_t n, uint32_t root = 0);
// The names for a collective, "ring, tree, direct", for error messages.
std::string algorithm_names(Collective collective);
// Throws ArgumentError listing them when there is none of that name.
const Algorithm& algorithm_named(Collective collective, std::string_view name);

}  // namespace dcoll::plan
