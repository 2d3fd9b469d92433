// Grouped all-reduce of plain tensors (operand.h): pointers are taken, results made and everything packed in one call.
#include "engine/buckets/grouped.h"

#include <pybind11/stl.h>

#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "bind/arguments.h"
#include "bind/bind.h"
#include "bind/on_device.h"
#include "bind/operand.h"
#include "bind/shared_results.h"

namespace py = pybind11;

namespace dcoll::bind {
namespace {

// The tensors of a call and what they are.
struct Group {
  py::list objects;
  std::vector<Operand> operands;
  std::vector<Shape> shapes;
  std::vector<GroupTensor> tensors;
  py::list results;
};

// Nothing when a tensor is not plain, or, where results are to carry them, requires a gradient.
std::optional<Group> read_group(const py::list& tensors, bool in_place, bool graded) {
  Group group;
  const Access access = in_place ? Access::kWrite : Access::kRead;
  group.objects = tensors;
  group.operands.resize(tensors.size());
  group.shapes.resize(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    PyObject* tensor = PyList_GET_ITEM(tensors.ptr(), static_cast<Py_ssize_t>(i));
    if (graded && requires_grad(tensor)) return std::nullopt;
    if (!read_operand(tensor, access, group.operands[i], &group.shapes[i])) return std::nullopt;
  }
  return group;
}

// Where each result goes: null if it stays where it is reduced. False: not plain.
bool place_results(Group& group, bool in_place) {
  size_t bytes = 0;
  for (const Operand& operand : group.operands) bytes += operand.bytes();
  group.tensors.reserve(group.operands.size());
  if (in_place) group.results = group.objects;
  for (size_t i = 0; i < group.operands.size(); ++i) {
    const Operand& source = group.operands[i];
    PyObject* tensor = PyList_GET_ITEM(group.objects.ptr(), static_cast<Py_ssize_t>(i));
    Operand target = source;
    if (!in_place && bytes <= SharedResults::kMostBytes && source.count > 0 && maker_of(tensor) != nullptr) {
      target.data = nullptr;
      group.results.append(py::none());
    } else if (!in_place) {
      auto result = py::reinterpret_steal<py::object>(empty_like(tensor));
      if (!result) throw py::error_already_set();
      if (!read_operand(result.ptr(), Access::kWrite, target) || target.count != source.count) return false;
      group.results.append(std::move(result));
    }
    group.tensors.push_back({source.data, target.data, source.count, source.dtype, group.shapes[i].all()});
  }
  return true;
}

// Once the memory is known: the results that stay there.
void make_results(Group& group, GroupedAllReduce& reduction) {
  struct Part {
    std::unique_ptr<SharedResults> results;
    std::byte* at = nullptr;
  };
  std::array<Part, kNumDTypes> parts;
  for (size_t i = 0; i < group.tensors.size(); ++i) {
    const GroupTensor& tensor = group.tensors[i];
    Part& part = parts[static_cast<size_t>(tensor.dtype)];
    if (part.results == nullptr) {
      const std::shared_ptr<Memory>& memory = reduction.memory_of(tensor.dtype);
      part = {std::make_unique<SharedResults>(memory, group.tensors.size()), memory->data()};
    }
    Operand operand = group.operands[i];
    operand.data = part.at;
    part.at += operand.bytes();
    if (tensor.out != nullptr || operand.count == 0) continue;
    const auto index = static_cast<Py_ssize_t>(i);
    PyObject* made =
        part.results->make(maker_of(PyList_GET_ITEM(group.objects.ptr(), index)), operand, group.shapes[i]);
    if (made == nullptr) throw py::error_already_set();
    PyList_SetItem(group.results.ptr(), index, made);
  }
}

// A group under way. Packing is done when it is made, so the inputs are free.
class GroupHandle {
 public:
  GroupHandle(CommPtr comm, std::unique_ptr<GroupedAllReduce> group)
      : comm_(std::move(comm)), group_(std::move(group)) {}
  bool poll() const { return group_->done(); }
  void wait(double timeout_s) {
    group_->wait_for([&](Operation& operation) { wait_interruptibly(*comm_, operation, timeout_s); });
    with_lock_as_pays(group_->bytes(), [&] { group_->unpack(); });
  }

 private:
  CommPtr comm_;
  std::unique_ptr<GroupedAllReduce> group_;
};

Call options_of(int op, const std::string& name, double prescale, double postscale, std::string_view codec) {
  return {.op = to_op(op),
          .prescale = prescale,
          .postscale = postscale,
          .encoding = kernels::encoding_named(codec),
          .name = name};
}

py::object reduce_now(const CommPtr& comm, const py::list& tensors, bool in_place, int op, const std::string& name,
                      double prescale, double postscale, bool graded, std::string_view codec) {
  std::optional<Group> group = read_group(tensors, in_place, graded);
  if (!group || !place_results(*group, in_place)) return py::none();
  GroupedAllReduce reduction(comm, group->tensors, options_of(op, name, prescale, postscale, codec));
  with_lock_as_pays(reduction.bytes(), [&] { reduction.pack(GroupedAllReduce::Submit::kNow); });
  if (!in_place) make_results(*group, reduction);
  try {
    run_group(reduction, *comm);
  } catch (...) {
    // Ctrl-C ends the wait, not the operation, which goes on reading the tensors. So they must never be freed.
    if (reduction.in_flight()) group->objects.inc_ref();
    throw;
  }
  if (in_place && !mark_all_written(tensors.ptr())) throw py::error_already_set();
  return group->results;
}

// Self: CommPtr, or OnDevice as comm.by_name.
template <typename Self>
py::object reduce_later(const Self& self, const py::list& tensors, bool in_place, int op, const std::string& name,
                        double prescale, double postscale, std::string_view codec) {
  const OnDevice on{self};
  std::optional<Group> group = read_group(tensors, in_place, false);
  if (!group || !place_results(*group, in_place)) return py::none();
  auto reduction =
      std::make_unique<GroupedAllReduce>(on.comm, group->tensors, options_of(op, name, prescale, postscale, codec));
  with_lock_as_pays(reduction->bytes(), [&] { reduction->pack(GroupedAllReduce::Submit::kLater); });
  if (!in_place) make_results(*group, *reduction);
  reduction->start(on.by_name);
  return py::make_tuple(std::make_unique<GroupHandle>(on.comm, std::move(reduction)), group->results);
}

}  // namespace

void bind_grouped(py::module_& m) {
  using namespace py::literals;
  py::class_<GroupHandle>(m, "GroupHandle", py::is_final())
      .def("poll", &GroupHandle::poll)
      .def("released", &GroupHandle::poll)  // a failure leaves messages in packed memory at most, which the core has
      .def("wait", &GroupHandle::wait, "timeout"_a = -1.0);
  m.def("grouped_allreduce_sync", &reduce_now, "comm"_a, "tensors"_a, "in_place"_a, "op"_a, "name"_a = "",
        "prescale"_a = 1.0, "postscale"_a = 1.0, "graded"_a = false, "codec"_a = "");
  const auto define = [&](auto function) {
    m.def("grouped_allreduce", function, "comm"_a, "tensors"_a, "in_place"_a, "op"_a, "name"_a = "", "prescale"_a = 1.0,
          "postscale"_a = 1.0, "codec"_a = "");
  };
  define(&reduce_later<CommPtr>);
  define(&reduce_later<OnDevice>);
}

}  // namespace dcoll::bind
