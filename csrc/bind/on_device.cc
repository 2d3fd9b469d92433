#include "bind/on_device.h"

#include "base/error.h"
#include "base/settings.h"
#include "bind/bind.h"
#include "device/device.h"
#include "device/nccl.h"
#include "engine/core/staging.h"

namespace py = pybind11;

namespace dcoll::bind {
namespace {

// What tells the current stream of a GPU of this thread: torch's. Immortal on purpose.
PyObject* stream_of = nullptr;

device::Stream current_stream(int number) {
  device::device_of(number);  // ArgumentError where there is none, in our words
  if (device::is_emulated(number) || stream_of == nullptr) return nullptr;
  const auto answer = py::reinterpret_steal<py::object>(PyObject_CallFunction(stream_of, "i", number));
  if (!answer) throw py::error_already_set();
  return reinterpret_cast<device::Stream>(answer.cast<uintptr_t>());
}

// Without Python's lock: whoever drives may want it.
void tell_peers(Communicator& comm, const std::string& text) {
  const py::gil_scoped_release unlocked;
  comm.fail(text);
}

void use_streams(py::object function) { stream_of = function.release().ptr(); }

}  // namespace

std::shared_ptr<Operation> submit(const OnDevice& self, Request request) try {
  if (self.device != device::kHost && !is_meeting(request.kind)) {
    request.device = self.device;
    request.stream = current_stream(self.device);
    if (device::device_of(self.device).is_capturing(request.stream)) {
      throw ArgumentError("a collective cannot become a part of a CUDA graph, for the host takes part in it: call " +
                          std::string(kind_name(request.kind)) + " outside of torch.cuda.graph()");
    }
  }
  return self.by_name ? self.comm->submit_by_name(std::move(request))
                      : self.comm->submit(std::move(request), Communicator::Start::kSoon);
} catch (const device::DeviceError& e) {  // before there is an operation that would tell the others
  const std::string text =
      std::string(e.what()) + " (on rank " + std::to_string(self.comm->members().job_rank(self.comm->rank())) + ")";
  tell_peers(*self.comm, text);
  throw device::DeviceError(text);
}

bool settled(Operation& operation) noexcept {
  try {
    return operation.staging == nullptr || operation.staging->settled();
  } catch (const Error&) {  // a wait says so
    return true;
  }
}

void settle(Communicator& comm, Operation& operation) {
  if (operation.staging == nullptr || !operation.done.load(std::memory_order_acquire)) return;
  const device::Stream stream = current_stream(operation.request.device);
  const py::gil_scoped_release unlocked;
  try {
    operation.staging->hold(stream);
  } catch (const device::DeviceError& e) {
    comm.fail(e.what());
    throw;
  }
}

void wait_settled(Operation& operation) noexcept {
  if (operation.staging == nullptr) return;
  const py::gil_scoped_release unlocked;
  try {
    operation.staging->wait();
  } catch (const Error&) {  // nobody asks
  }
}

void bind_on_device(py::module_& m) {
  using namespace py::literals;
  py::class_<OnDevice>(m, "OnDevice", py::is_final())
      .def(py::init([](CommPtr comm, int device) { return OnDevice{std::move(comm), false, device}; }), "comm"_a,
           "device"_a)
      .def(py::init([](const OnDevice& on, int device) { return OnDevice{on.comm, on.by_name, device}; }), "comm"_a,
           "device"_a)
      .def_readonly("device", &OnDevice::device)
      .def_property_readonly("rank", [](const OnDevice& self) { return self.comm->rank(); })
      .def_property_readonly("size", [](const OnDevice& self) { return self.comm->size(); });
  m.attr("EMULATED_DEVICE") = device::kEmulated;
  m.def("nccl_version", &device::nccl_version);
  m.def("emulates_device", [] { return setting_text("DCOLL_DEVICE") == "emulated"; });
  m.def("use_streams", &use_streams, "current_stream"_a);
  m.def("share_emulated", &device::share_emulated, "shares"_a);
  m.def("place_emulated", &device::place_emulated, "place"_a);
  m.def("let_emulated_compute", &device::let_emulated_compute, "computes"_a);
  m.def("fail_emulated_after", &device::fail_emulated_after, "pieces"_a);
}

}  // namespace dcoll::bind
