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
  m.def("timeline_on", [](const Communicator& comm) { return comm.timeline().on(); }, "comm"_a);
  m.def(
      "timeline_span",
      [](const Communicator& comm, const std::string& track, const std::string& name, int64_t begin_ns, int64_t end_ns,
         uint64_t nbytes) {
        if (comm.timeline().on()) comm.timeline().span(track, name, begin_ns, end_ns, nbytes);
      },
      "comm"_a, "track"_a, "name"_a, "begin_ns"_a, "end_ns"_a, "nbytes"_a = 0);
}

}  // namespace dcoll::bind
