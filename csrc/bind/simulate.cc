// The simulator of large clusters, for bench/simulate.py: dcoll._C.plan.simulate.
#include "plan/simulate.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <string>

#include "base/error.h"
#include "bind/bind.h"

namespace {

namespace py = pybind11;
using namespace dcoll;

// alpha, overhead (us), beta (us per byte), fan-in: the numbers of a link, in the order of plan::LinkModel.
using Link = std::array<double, 4>;

plan::LinkModel link_model(const Link& link) {
  return {.alpha_us = link[0], .overhead_us = link[1], .beta_us_per_byte = link[2], .fan_in = link[3]};
}

py::dict simulate(const std::string& collective, const std::string& algo, bool hierarchical, uint64_t bytes,
                  uint32_t nodes, uint32_t ranks_per_node, uint32_t rails, uint32_t nodes_per_rack,
                  double oversubscription, double spine_alpha_us, const Link& memory, const Link& network,
                  double gamma_us_per_byte, double compression, double encode_us_per_byte, double decode_us_per_byte,
                  uint64_t slice_bytes, uint32_t lanes) {
  const plan::Collective kind = plan::parse_collective(collective);
  const plan::Algorithm& algorithm = plan::algorithm_named(kind, algo);
  if (hierarchical && kind != plan::Collective::kAllReduce) {
    throw ArgumentError("hierarchical is an all_reduce, got " + collective);
  }
  plan::Cluster cluster;
  cluster.nodes = nodes;
  cluster.ranks_per_node = ranks_per_node;
  cluster.rails = rails;
  cluster.nodes_per_rack = nodes_per_rack;
  cluster.oversubscription = oversubscription;
  cluster.spine_alpha_us = spine_alpha_us;
  cluster.compression = compression;
  cluster.encode_us_per_byte = encode_us_per_byte;
  cluster.decode_us_per_byte = decode_us_per_byte;
  cluster.constants.memory = link_model(memory);
  cluster.constants.network = link_model(network);
  cluster.constants.gamma_us_per_byte = gamma_us_per_byte;
  plan::SimulateOptions options;
  options.slice_bytes = slice_bytes;
  options.lanes = lanes;
  plan::Simulated result;
  {
    py::gil_scoped_release unlocked;
    result = hierarchical ? plan::simulate_hierarchical(algorithm, cluster, bytes, options)
                          : plan::simulate(algorithm, cluster, bytes, options);
  }
  py::dict dict;
  dict["us"] = result.us;
  dict["method"] = result.method == plan::Method::kOneGroup ? "one group" : "every rank";
  dict["events"] = result.events;
  return dict;
}

}  // namespace

void bind_simulate(py::module_& plan_module) {
  const plan::Topology defaults;
  auto link = [](const plan::LinkModel& model) {
    return Link{model.alpha_us, model.overhead_us, model.beta_us_per_byte, model.fan_in};
  };
  plan_module.def("simulate", &simulate, py::arg("collective"), py::arg("algo"), py::kw_only(),
                  py::arg("hierarchical") = false, py::arg("bytes"), py::arg("nodes"), py::arg("ranks_per_node") = 1,
                  py::arg("rails") = 1, py::arg("nodes_per_rack") = 0, py::arg("oversubscription") = 1.0,
                  py::arg("spine_alpha_us") = 0.0, py::arg("memory") = link(defaults.memory),
                  py::arg("network") = link(defaults.network),
                  py::arg("gamma_us_per_byte") = defaults.gamma_us_per_byte, py::arg("compression") = 1.0,
                  py::arg("encode_us_per_byte") = 0.0, py::arg("decode_us_per_byte") = 0.0,
                  py::arg("slice_bytes") = plan::kDefaultSliceBytes, py::arg("lanes") = 1);
}
