// Schedules, their proof and their cost, for Python: dcoll._C.plan. Nothing here communicates.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.h"
#include "bind/bind.h"
#include "bind/constants.h"
#include "engine/links/coding.h"
#include "kernels/codec.h"
#include "plan/algorithms.h"
#include "plan/describe.h"
#include "plan/encoded.h"
#include "plan/hierarchical.h"
#include "plan/select.h"
#include "plan/verify.h"

namespace {

namespace py = pybind11;
using namespace dcoll;

py::dict to_dict(const plan::Step& step, uint32_t send_channel) {
  py::dict dict;
  dict["op"] = std::string(plan::step_op_name(step.op));
  dict["src"] = std::string(plan::buffer_name(step.src));
  dict["src_chunk"] = step.src_chunk;
  dict["dst"] = std::string(plan::buffer_name(step.dst));
  dict["chunk"] = step.chunk;
  dict["count"] = step.count;
  dict["receives_from"] = plan::receives(step.op) ? py::object(py::int_(step.peer)) : py::none();
  dict["sends_to"] = plan::sends(step.op) ? py::object(py::int_(plan::destination(step))) : py::none();
  dict["send_channel"] = plan::sends(step.op) ? py::object(py::int_(send_channel)) : py::none();
  dict["finalize"] = step.finalize;
  dict["text"] = plan::describe(step);
  return dict;
}

py::list build(const std::string& collective, const std::string& algo, uint32_t n, uint32_t rank, uint32_t root) {
  const plan::Schedule schedule = plan::algorithm_named(plan::parse_collective(collective), algo).build(n, rank, root);
  py::list channels;
  for (uint32_t c = 0; c < schedule.channels.size(); ++c) {
    const plan::Channel& channel = schedule.channels[c];
    py::list steps;
    for (const plan::Step& step : channel.steps) steps.append(to_dict(step, plan::send_channel(channel, c)));
    channels.append(steps);
  }
  return channels;
}

std::string verify(const std::string& collective, const std::string& algo, uint32_t n, uint32_t slot_depth,
                   uint32_t rounds, bool in_place, uint32_t root) {
  const plan::Algorithm& algorithm = plan::algorithm_named(plan::parse_collective(collective), algo);
  const plan::VerifyOptions options{.slot_depth = slot_depth, .rounds = rounds, .in_place = in_place, .root = root};
  const py::gil_scoped_release unlocked;
  return plan::verify(plan::build_all(algorithm, n, root), algorithm.collective, options).message;
}

// nodes: the node of each rank.
plan::Topology topology_of(std::vector<uint32_t> nodes, const py::dict& constants) {
  if (nodes.empty()) throw ArgumentError("there must be at least one rank, got nodes of no rank");
  plan::Topology topology = plan::Topology::on(std::move(nodes));
  static_cast<plan::Constants&>(topology) = bind::constants_from(constants);
  return topology;
}

py::dict choose(const std::string& collective, uint64_t bytes, std::vector<uint32_t> nodes, uint64_t slice_bytes,
                const py::dict& constants) {
  const plan::Collective kind = plan::parse_collective(collective);
  const plan::Topology topology = topology_of(std::move(nodes), constants);
  plan::Choice choice;
  {
    py::gil_scoped_release unlocked;
    choice = plan::select(kind, bytes, topology, slice_bytes);
  }
  py::list candidates;
  for (const plan::Candidate& candidate : choice.candidates) {
    candidates.append(py::make_tuple(std::string(candidate.algorithm->name), candidate.predicted_us,
                                     candidate.slice_bytes, std::string(candidate.algorithm->reason)));
  }
  py::dict dict;
  dict["name"] = std::string(choice.algorithm->name);
  dict["reason"] = std::string(choice.algorithm->reason);
  dict["why"] = choice.why;
  dict["candidates"] = candidates;
  return dict;
}

py::dict hierarchical(uint64_t bytes, std::vector<uint32_t> nodes, uint64_t slice_bytes, const py::dict& constants) {
  const plan::Topology topology = topology_of(std::move(nodes), constants);
  const plan::HierarchicalCost cost = plan::predict_hierarchical(bytes, topology, slice_bytes);
  py::dict dict;
  dict["between"] = cost.between == nullptr ? py::object(py::none()) : py::str(std::string(cost.between->name));
  dict["agreement_us"] = cost.agreement_us;
  dict["in_node_us"] = cost.in_node_us;
  dict["between_us"] = cost.between_us;
  dict["total_us"] = cost.total_us();
  dict["why"] = cost.why;
  return dict;
}

py::dict encoded(const std::string& codec, uint64_t bytes, std::vector<uint32_t> nodes, double encode_us_per_byte,
                 double decode_us_per_byte, uint64_t slice_bytes, const py::dict& constants, bool two_levels) {
  const kernels::Encoding encoding = kernels::encoding_named(codec);
  if (!encoding) throw ArgumentError("'' is no codec: there is nothing to compare");
  const plan::Coding coding{.share = kernels::encoded_share(encoding),
                            .gathered = encoding.codec == kernels::Codec::kTopK,
                            .encode_us_per_byte = encode_us_per_byte,
                            .decode_us_per_byte = decode_us_per_byte};
  const auto times =
      plan::predict_encoded(bytes, coding, topology_of(std::move(nodes), constants), slice_bytes, two_levels);
  py::dict dict;
  dict["plain_us"] = times.plain_us;
  dict["encoded_us"] = times.encoded_us;
  dict["pays"] = times.pays();
  dict["close"] = times.is_close(bytes);
  return dict;
}

std::pair<double, double> coding(const std::string& codec) {
  const kernels::Encoding encoding = kernels::encoding_named(codec);
  if (!encoding) throw ArgumentError("'' is no codec: there is nothing to measure");
  const py::gil_scoped_release unlocked;
  const plan::Coding measured = measure_coding(encoding);
  return {measured.encode_us_per_byte, measured.decode_us_per_byte};
}

std::vector<std::tuple<std::string, std::string, std::string>> algorithms() {
  std::vector<std::tuple<std::string, std::string, std::string>> rows;
  for (const plan::Algorithm& algorithm : plan::algorithms()) {
    rows.emplace_back(plan::collective_name(algorithm.collective), algorithm.name, algorithm.reason);
  }
  return rows;
}

}  // namespace

void bind_plan(py::module_& m) {
  py::module_ sub = m.def_submodule("plan", "Schedules as data: build, verify, select. Nothing here communicates.");
  sub.def("algorithms", &algorithms);
  sub.def("build", &build, py::arg("collective"), py::arg("algo"), py::arg("n"), py::arg("rank"), py::arg("root") = 0);
  sub.def("verify", &verify, py::arg("collective"), py::arg("algo"), py::arg("n"), py::arg("slot_depth") = 1,
          py::arg("rounds") = 2, py::arg("in_place") = false, py::arg("root") = 0);
  sub.def("select", &choose, py::arg("collective"), py::arg("bytes"), py::arg("nodes"),
          py::arg("slice_bytes") = plan::kDefaultSliceBytes, py::arg("constants") = py::dict());
  sub.def("hierarchical", &hierarchical, py::arg("bytes"), py::arg("nodes"),
          py::arg("slice_bytes") = plan::kDefaultSliceBytes, py::arg("constants") = py::dict());
  sub.def("encoded", &encoded, py::arg("codec"), py::arg("bytes"), py::arg("nodes"), py::arg("encode_us_per_byte"),
          py::arg("decode_us_per_byte"), py::arg("slice_bytes") = plan::kDefaultSliceBytes,
          py::arg("constants") = py::dict(), py::arg("two_levels") = false);
  sub.def("coding", &coding, py::arg("codec"));
  sub.attr("DEFAULT_SLICE_BYTES") = plan::kDefaultSliceBytes;
  sub.def("constants", [] { return bind::to_dict(plan::Constants{}); });
  bind_simulate(sub);
}
