// Communicators of some of the ranks: what process sets and PyTorch's groups are made of.
#include "engine/communicator/subset.h"

#include <pybind11/stl.h>

#include "bind/bind.h"

namespace py = pybind11;

namespace dcoll::bind {
namespace {

// Ctrl-C, while the core waits for other ranks without the interpreter's lock.
void look_for_signals() {
  const py::gil_scoped_acquire locked;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

}  // namespace

void bind_subset(py::module_& m) {
  m.def(
      "make_group",
      [](std::shared_ptr<Communicator> whole, std::vector<int> ranks, Bootstrap* job) {
        return make_group(std::move(whole), std::move(ranks), job, look_for_signals);
      },
      py::arg("whole"), py::arg("ranks"), py::arg("job").none(true), py::call_guard<py::gil_scoped_release>(),
      py::keep_alive<0, 3>());
}

}  // namespace dcoll::bind
