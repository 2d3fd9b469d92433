// The timeline of a communicator's process: engine/watch/timeline.h.
#include "engine/watch/timeline.h"

#include "bind/bind.h"

namespace py = pybind11;

namespace dcoll::bind {

void bind_timeline(py::module_& m) {
  using namespace py::literals;
  m.def(
      "start_timeline",
      [](const Communicator& comm, const std::string& path, bool mark_cycles) {
        comm.check_process();
        comm.timeline().start(path, mark_cycles);
      },
      "comm"_a, "path"_a, "mark_cycles"_a = false, py::call_guard<py::gil_scoped_release>());
  m.def(
      "stop_timeline", [](const Communicator& comm) { comm.timeline().stop(); }, "comm"_a,
      py::call_guard<py::gil_scoped_release>());
}

}  // namespace dcoll::bind
