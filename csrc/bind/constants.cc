#include "bind/constants.h"

#include <algorithm>
#include <string>

#include "base/error.h"

namespace dcoll::bind {
namespace {

namespace py = pybind11;

py::dict link_dict(const plan::LinkModel& link) {
  py::dict dict;
  for (const plan::LinkPart& part : plan::kLinkParts) dict[part.name] = link.*part.value;
  return dict;
}

void fill(plan::LinkModel& link, const py::dict& dict) {
  for (const auto& [key, value] : dict) {
    const auto name = py::cast<std::string>(key);
    const auto* const found = std::ranges::find(plan::kLinkParts, name, &plan::LinkPart::name);
    if (found == plan::kLinkParts.end()) throw ArgumentError("a link has no constant '" + name + "': see dcoll/_C.pyi");
    link.*found->value = py::cast<double>(value);
  }
}

}  // namespace

py::dict to_dict(const plan::Constants& constants) {
  py::dict dict;
  dict["memory"] = link_dict(constants.memory);
  dict["network"] = link_dict(constants.network);
  dict["gamma_us_per_byte"] = constants.gamma_us_per_byte;
  dict["handshake_us"] = constants.handshake_us;
  dict["shared_cores"] = constants.shared_cores;
  return dict;
}

plan::Constants constants_from(const py::dict& dict) {
  plan::Constants constants;
  for (const auto& [key, value] : dict) {
    const auto name = py::cast<std::string>(key);
    if (name == "memory") {
      fill(constants.memory, py::cast<py::dict>(value));
    } else if (name == "network") {
      fill(constants.network, py::cast<py::dict>(value));
    } else if (name == "gamma_us_per_byte") {
      constants.gamma_us_per_byte = py::cast<double>(value);
    } else if (name == "handshake_us") {
      constants.handshake_us = py::cast<double>(value);
    } else if (name == "shared_cores") {
      constants.shared_cores = py::cast<bool>(value);
    } else {
      throw ArgumentError("no constant is called '" + name +
                          "': use memory, network, gamma_us_per_byte, handshake_us, shared_cores");
    }
  }
  return constants;
}

}  // namespace dcoll::bind
