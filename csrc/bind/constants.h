// The constants of the cost model as Python sees them: {"memory": {"alpha_us": ...}, "network": {...},
// "gamma_us_per_byte": ...}. What is left out has its built-in value.
#pragma once

#include <pybind11/pybind11.h>

#include "plan/topology.h"

namespace dcoll::bind {

pybind11::dict to_dict(const plan::Constants& constants);
// Throws ArgumentError naming a key that is not one, or a value that is no number.
plan::Constants constants_from(const pybind11::dict& dict);

}  // namespace dcoll::bind
