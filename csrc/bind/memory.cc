// Buffer: the core's memory through Python's buffer protocol.
#include <pybind11/stl.h>

#include <cstring>
#include <string>

#include "base/error.h"
#include "base/memory_hash.h"
#include "bind/bind.h"
#include "device/arena.h"
#include "device/descriptors.h"

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

// Some bytes of a block of a device's arena. Torch takes them as memory of a GPU by __cuda_array_interface__ (version
// 3), or of the emulated device as a buffer.
struct DeviceBuffer {
  int device;
  std::shared_ptr<device::Block> block;
  size_t offset, bytes;

  static DeviceBuffer make(int device, size_t bytes) {
    const py::gil_scoped_release unlocked;
    return {device, device::arena_of(device).alloc_or_wait(bytes), 0, bytes};
  }
  DeviceBuffer part(size_t begin, size_t length) const {
    if (begin > bytes || length > bytes - begin) throw ArgumentError("a part must lie in the buffer");
    return {device, block, offset + begin, length};
  }
  std::byte* data() const { return block->data() + offset; }
  py::dict cuda_array() const {
    using namespace py::literals;
    if (device::is_emulated(device)) throw py::attribute_error("the emulated device is the CPU");
    return py::dict("shape"_a = py::make_tuple(bytes), "typestr"_a = "|u1",
                    "data"_a = py::make_tuple(reinterpret_cast<uintptr_t>(data()), false), "version"_a = 3);
  }
  py::buffer_info info() const {
    if (!device::is_emulated(device)) throw py::buffer_error("memory of a GPU is not the CPU's");
    return {reinterpret_cast<uint8_t*>(data()), static_cast<py::ssize_t>(bytes)};
  }
};

// What one process shows another to find out whether it can open a device's memory.
constexpr uint64_t kShown = 0x0123456789abcdef;

void copy_now(device::Device& device, void* to, const void* from) {
  const device::Stream stream = device.make_stream();
  try {
    device.copy(to, from, sizeof(kShown), stream);
  } catch (const device::DeviceError&) {
    device.destroy_stream(stream);
    throw;
  }
  device.drain(stream);
  device.destroy_stream(stream);
}

// Shown until the process ends.
py::bytes show_device_memory(int number) {
  constexpr size_t kPage = size_t{2} << 20;  // smaller ones share one
  device::Handle handle{};
  {
    const py::gil_scoped_release unlocked;
    device::Device& device = device::device_of(number);
    void* const data = device.allocate(kPage);
    copy_now(device, data, &kShown);
    handle = device.handle_of(data);
  }
  return {reinterpret_cast<const char*>(handle.data()), handle.size()};
}

const char* open_device_memory(int number, const std::string& shown) {
  const py::gil_scoped_release unlocked;
  device::Handle handle{};
  if (shown.size() != handle.size()) throw ArgumentError("this is nothing that show_device_memory() has returned");
  std::memcpy(handle.data(), shown.data(), shown.size());
  device::Device& device = device::device_of(number);
  void* const opened = device.open(handle);
  uint64_t found = 0;
  try {
    copy_now(device, &found, opened);
  } catch (const device::DeviceError&) {
    device.close(opened);
    throw;
  }
  device.close(opened);
  if (found != kShown) throw device::DeviceError(device.name() + ": what the other process wrote is not there");
  return device::way_of(handle);
}

void bind_device_buffer(py::module_& m) {
  py::class_<DeviceBuffer>(m, "DeviceBuffer", py::buffer_protocol(), py::is_final())
      .def(py::init(&DeviceBuffer::make), py::arg("device"), py::arg("nbytes"))
      .def("part", &DeviceBuffer::part, py::arg("offset"), py::arg("nbytes"))
      .def_buffer(&DeviceBuffer::info)
      .def_property_readonly("__cuda_array_interface__", &DeviceBuffer::cuda_array)
      .def("__len__", [](const DeviceBuffer& buffer) { return buffer.bytes; });
  m.def("show_device_memory", &show_device_memory, py::arg("device"));
  m.def("open_device_memory", &open_device_memory, py::arg("device"), py::arg("shown"));
}

}  // namespace

void bind_memory(py::module_& m) {
  bind_device_buffer(m);
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
