// Communicators of some of the ranks: what process sets are made of.
#include "engine/communicator/subset.h"

#include <pybind11/stl.h>

#include "bind/bind.h"

namespace py = pybind11;

namespace dcoll::bind {

void bind_subset(py::module_& m) {
  py::class_<Subset>(m, "Subset", py::is_final())
      .def(py::init<std::shared_ptr<Communicator>, std::vector<int>>(), py::arg("whole"), py::arg("ranks"))
      .def_property_readonly("offset", &Subset::offset)
      .def("connect", &Subset::connect, py::arg("offsets"), py::arg("job").none(true),
           py::call_guard<py::gil_scoped_release>(), py::keep_alive<0, 3>());
}

}  // namespace dcoll::bind
