// Making communicators: from MPI, alone, or as threads.
#include "engine/world.h"

#include <pybind11/stl.h>

#include "bind/bind.h"

namespace py = pybind11;

namespace dcoll::bind {

void bind_world(py::module_& m) {
  py::class_<MpiBackend>(m, "Mpi", py::is_final())
      .def_property_readonly("rank", &MpiBackend::rank)
      .def_property_readonly("size", &MpiBackend::size)
      .def_property_readonly("library_version", &MpiBackend::library_version)
      .def_property_readonly("library_path", &MpiBackend::library_path)
      .def_property_readonly("thread_level", &MpiBackend::thread_level)
      .def("subset", &MpiBackend::subset, py::arg("ranks"), py::call_guard<py::gil_scoped_release>())
      .def("finalize", &MpiBackend::finalize, py::call_guard<py::gil_scoped_release>())
      .def("abort", &MpiBackend::abort, py::arg("exit_code"), py::call_guard<py::gil_scoped_release>());

  m.def("load_mpi", &load_mpi, py::arg("plugin_path"), py::call_guard<py::gil_scoped_release>());
  m.def(
      "connect_world",
      [](MpiBackend* mpi) {
        const Settings settings = Settings::from_env();
        const py::gil_scoped_release unlocked;
        return connect_world(mpi, settings);
      },
      py::arg("mpi").none(true), py::keep_alive<0, 1>());
  m.def("connect_local", [](int n) { return connect_threads(n, Settings::from_env()); }, py::arg("n"));
}

}  // namespace dcoll::bind
