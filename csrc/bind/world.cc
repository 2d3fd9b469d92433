// Making communicators: from MPI, alone, or as threads.
#include "engine/world.h"

#include <pybind11/stl.h>

#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "bind/bind.h"

namespace py = pybind11;

namespace dcoll::bind {
namespace {

// A thread of the core's own, so that nothing in the interpreter can keep it from running: neither a lock that is held
// nor Python's own end.
void abort_after(const py::object& mpi, double seconds, int exit_code, std::string text) {
  mpi.inc_ref();  // for ever: the thread uses it
  std::thread([&backend = mpi.cast<MpiBackend&>(), seconds, exit_code, text = std::move(text)] {
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    if (!text.empty()) std::fprintf(stderr, "%s\n", text.c_str());
    backend.abort(exit_code);
  }).detach();
}

// Ctrl-C, while the core waits for other ranks without the interpreter's lock.
void look_for_signals() {
  const py::gil_scoped_acquire locked;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

std::unique_ptr<MpiBackend> load(const std::string& plugin_path) {
  const StartUp start = start_up_from_env(look_for_signals);
  const py::gil_scoped_release unlocked;
  return load_mpi(plugin_path, start);
}

}  // namespace

void bind_world(py::module_& m) {
  py::class_<MpiBackend>(m, "Mpi", py::is_final())
      .def_property_readonly("rank", &MpiBackend::rank)
      .def_property_readonly("size", &MpiBackend::size)
      .def_property_readonly("library_version", &MpiBackend::library_version)
      .def_property_readonly("library_path", &MpiBackend::library_path)
      .def_property_readonly("thread_level", &MpiBackend::thread_level)
      .def("subset", &MpiBackend::subset, py::arg("ranks"), py::call_guard<py::gil_scoped_release>())
      .def("finalize", &MpiBackend::finalize, py::call_guard<py::gil_scoped_release>())
      .def("abort_after", &abort_after, py::arg("seconds"), py::arg("exit_code"), py::arg("text") = "");

  m.def("load_mpi", &load, py::arg("plugin_path"));
  m.def(
      "connect_world",
      [](MpiBackend* mpi) {
        const Settings settings = Settings::from_env();
        std::shared_ptr<Communicator> comm;
        {
          const py::gil_scoped_release unlocked;
          comm = connect_world(mpi, settings, look_for_signals);
        }
        show_program_to(*comm);
        return comm;
      },
      py::arg("mpi").none(true), py::keep_alive<0, 1>());
  m.def(
      "connect_local",
      [](int n) {
        auto comms = connect_threads(n, Settings::from_env());
        for (const auto& comm : comms) show_program_to(*comm);
        return comms;
      },
      py::arg("n"));
}

}  // namespace dcoll::bind
