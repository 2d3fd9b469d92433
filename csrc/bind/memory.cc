// Buffer: the core's memory through Python's buffer protocol.
#include "bind/bind.h"

namespace py = pybind11;

namespace dcoll::bind {

void bind_memory(py::module_& m) {
  py::class_<Memory, std::shared_ptr<Memory>>(m, "Buffer", py::buffer_protocol(), py::is_final())
      .def_buffer([](Memory& memory) {
        return py::buffer_info(reinterpret_cast<uint8_t*>(memory.data()), static_cast<py::ssize_t>(memory.bytes()));
      })
      .def_property_readonly("address", [](const Memory& memory) { return reinterpret_cast<uintptr_t>(memory.data()); })
      .def_property_readonly("nbytes", &Memory::bytes)
      .def_property_readonly("mapped", &Memory::is_mapped)
      .def("__len__", &Memory::bytes);
}

}  // namespace dcoll::bind
