// Buffer: the core's memory through Python's buffer protocol.
#include <pybind11/stl.h>

#include "base/memory_hash.h"
#include "bind/bind.h"

namespace py = pybind11;

namespace dcoll::bind {
namespace {

// As signed numbers, which every library of tensors has.
std::vector<int64_t> hash_all(const std::vector<std::pair<uintptr_t, size_t>>& blocks) {
  const py::gil_scoped_release unlocked;
  std::vector<int64_t> hashes;
  for (const auto& [address, bytes] : blocks) {
    hashes.push_back(static_cast<int64_t>(hash_memory(reinterpret_cast<const void*>(address), bytes)));
  }
  return hashes;
}

}  // namespace

void bind_memory(py::module_& m) {
  m.def("hash_memory", &hash_all, py::arg("blocks"));
  py::class_<Memory, std::shared_ptr<Memory>>(m, "Buffer", py::buffer_protocol(), py::is_final())
      .def_buffer([](Memory& memory) {
        return py::buffer_info(reinterpret_cast<uint8_t*>(memory.data()), static_cast<py::ssize_t>(memory.bytes()));
      })
      .def_property_readonly("address", [](const Memory& memory) { return reinterpret_cast<uintptr_t>(memory.data()); })
      .def_property_readonly("nbytes", &Memory::bytes)
      .def_property_readonly("mapped", &Memory::is_mapped)
      .def(
          "appear_at",
          [](Memory& memory, uintptr_t address, size_t bytes) {
            memory.appear_at(reinterpret_cast<void*>(address), bytes);
          },
          py::arg("address"), py::arg("nbytes"))
      .def("__len__", &Memory::bytes);
}

}  // namespace dcoll::bind
