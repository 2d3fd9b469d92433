#include "engine/links/link_constants.h"

#include <vector>

#include "base/hash.h"

namespace dcoll {
namespace {

// Hosts and CPUs of all ranks, in their order, as one number.
uint64_t machines(Bootstrap& ranks) {
  const uint64_t mine = Fingerprint().add(ranks.processor_name()).add(cpu_model()).value();
  const std::vector<std::byte> all = ranks.all_gather(&mine, sizeof mine);
  return Fingerprint().add(std::string_view(reinterpret_cast<const char*>(all.data()), all.size())).value();
}

}  // namespace

LinkConstants link_constants(Bootstrap& ranks, const std::vector<int>& node_of_rank, const Settings& settings,
                             Log log) {
  LinkConstants constants;
  constants.log = log;
  if (settings.calibrate == "off") return constants;
  constants.use =
      settings.calibrate == "force" ? LinkConstants::Use::kAlwaysMeasure : LinkConstants::Use::kCacheOrMeasure;
  std::string placement;
  for (const int node : node_of_rank) {
    placement += std::to_string(node);
    placement += ',';
  }
  constants.cache.folder = cache_folder(settings.cache_dir);
  constants.cache.key = "dcoll " DCOLL_VERSION ", ";
  constants.cache.key += ranks.library_version() + ", " + cpu_model() + ", machines " +
                         std::to_string(machines(ranks)) + ", nodes of ranks " + placement + " slices of " +
                         std::to_string(settings.slice_kb) + " KiB, tcp " + settings.tcp_congestion;
  return constants;
}

LinkConstants LinkConstants::of_a_sequence() const {
  LinkConstants fresh = *this;
  fresh.source = LinkConstants().source;
  fresh.learnt = false;
  fresh.may_measure = false;
  return fresh;
}

}  // namespace dcoll
