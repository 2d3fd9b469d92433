#include "transport/mapped/local.h"

#include "transport/mapped/mapped.h"

namespace dcoll {

std::vector<Endpoint> connect_local(int n, const MappedOptions& options, const std::vector<int>& numa_nodes) {
  const RegionLayout layout(n, options);
  std::vector<std::shared_ptr<Region>> regions;
  for (int rank = 0; rank < n; ++rank) {
    regions.push_back(std::make_shared<Region>(-1, layout.region_bytes));
    regions.back()->initialize(rank, numa_nodes.empty() ? -1 : numa_nodes.at(static_cast<size_t>(rank)));
    regions.back()->set_bell(make_bell());
  }
  std::vector<Endpoint> endpoints;
  for (int rank = 0; rank < n; ++rank) {
    endpoints.push_back(make_mapped_endpoint("local", MappedWorld{rank, layout, regions}));
  }
  return endpoints;
}

}  // namespace dcoll
