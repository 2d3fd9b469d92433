#include "bind/constants.h"

#include <array>
#include <string>

#include "base/error.h"

namespace dcoll::bind {
namespace {

namespace py = pybind11;

struct Part {
  const char* name;
  double plan::LinkModel::* value;
};
constexpr std::array kParts = {
    Part{"alpha_us", &plan::LinkModel::alpha_us},
    Part{"overhead_us", &plan::LinkModel::overhead_us},
    Part{"beta_us_per_byte", &plan::LinkModel::beta_us_per_byte},
    Part{"fan_in", &plan::LinkModel::fan_in},
    Part{"burst_bytes", &plan::LinkModel::burst_bytes},
    Part{"transit_us_per_byte", &plan::LinkModel::transit_us_per_byte},
};

py::dict link_dict(const plan::LinkModel& link) {
  py::dict dict;
  for (const Part& part : kParts) dict[part.name] = link.*part.value;
  return dict;
}

void fill(plan::LinkModel& link, const py::dict& dict) {
  for (const auto& [key, value] : dict) {
    const auto name = py::cast<std::string>(key);
    const Part* found = nullptr;
    for (const Part& part : kParts) found = name == part.name ? &part : found;
    if (found == nullptr) throw ArgumentError("a link has no constant '" + name + "': see dcoll/_C.pyi");
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
