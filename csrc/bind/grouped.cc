// Grouped all-reduce of plain tensors (operand.h): pointers are taken, results made and everything packed in one call.
#include "engine/grouped.h"

#include <pybind11/stl.h>

#include <optional>
#include <vector>

#include "base/error.h"
#include "bind/bind.h"
#include "bind/by_name.h"
#include "bind/operand.h"

namespace py = pybind11;

namespace dcoll::bind {
namespace {

// Above this the interpreter lock is given to other threads; below, handing it over may take longer than the work.
constexpr size_t kKeepLockBytes = 64 << 10;

using CommPtr = std::shared_ptr<Communicator>;

struct Group {
  std::vector<GroupTensor> tensors;
  py::list results;
};

// Nothing when a tensor is not plain. In place, the results are the tensors themselves.
std::optional<Group> read_group(const py::list& tensors, bool in_place) {
  Group group;
  group.tensors.reserve(tensors.size());
  for (const py::handle tensor : tensors) {
    Operand source;
    if (!read_operand(tensor.ptr(), in_place ? Access::kWrite : Access::kRead, source)) return std::nullopt;
    Operand target = source;
    py::object result = in_place ? py::reinterpret_borrow<py::object>(tensor)
                                 : py::reinterpret_steal<py::object>(empty_like(tensor.ptr()));
    if (!result) throw py::error_already_set();
    if (!in_place && !(read_operand(result.ptr(), Access::kWrite, target) && target.count == source.count)) {
      return std::nullopt;
    }
    group.tensors.push_back({source.data, target.data, source.count, source.dtype});
    if (!in_place) group.results.append(std::move(result));
  }
  if (in_place) group.results = tensors;
  return group;
}

// A group under way. Packing is done when it is made, so the inputs are free.
class GroupHandle {
 public:
  GroupHandle(CommPtr comm, std::unique_ptr<GroupedAllReduce> group)
      : comm_(std::move(comm)), group_(std::move(group)) {}
  bool poll() const { return group_->done(); }
  void wait(double timeout_s) {
    group_->finish([&](Operation& operation) { wait_interruptibly(*comm_, operation, timeout_s); });
  }

 private:
  CommPtr comm_;
  std::unique_ptr<GroupedAllReduce> group_;
};

ReduceCall options_of(int op, const std::string& name, double prescale, double postscale) {
  if (op < 0 || op >= kNumReduceOps) throw ArgumentError("reduce op code " + std::to_string(op) + " does not exist.");
  return {.op = static_cast<ReduceOp>(op), .prescale = prescale, .postscale = postscale, .name = name};
}

py::object reduce_now(const CommPtr& comm, const py::list& tensors, bool in_place, int op, const std::string& name,
                      double prescale, double postscale) {
  std::optional<Group> group = read_group(tensors, in_place);
  if (!group) return py::none();
  GroupedAllReduce reduction(comm, group->tensors, options_of(op, name, prescale, postscale));
  if (reduction.bytes() <= kKeepLockBytes) {
    reduction.run([&](Operation& operation) { wait_interruptibly(*comm, operation, -1); });
  } else {
    const py::gil_scoped_release unlocked;
    reduction.run([&](Operation& operation) {
      const py::gil_scoped_acquire locked;
      wait_interruptibly(*comm, operation, -1);
    });
  }
  return group->results;
}

using Start = void (GroupedAllReduce::*)();

py::object reduce_later(const CommPtr& comm, const py::list& tensors, bool in_place, const ReduceCall& options,
                        Start start) {
  std::optional<Group> group = read_group(tensors, in_place);
  if (!group) return py::none();
  auto reduction = std::make_unique<GroupedAllReduce>(comm, group->tensors, options);
  ((*reduction).*start)();
  return py::make_tuple(std::make_unique<GroupHandle>(comm, std::move(reduction)), group->results);
}

py::object start_group(const CommPtr& comm, const py::list& tensors, bool in_place, int op, const std::string& name,
                       double prescale, double postscale) {
  return reduce_later(comm, tensors, in_place, options_of(op, name, prescale, postscale), &GroupedAllReduce::start);
}

py::object start_group_by_name(const ByName& named, const py::list& tensors, bool in_place, int op,
                               const std::string& name, double prescale, double postscale) {
  return reduce_later(named.comm, tensors, in_place, options_of(op, name, prescale, postscale),
                      &GroupedAllReduce::start_by_name);
}

}  // namespace

void bind_grouped(py::module_& m) {
  using namespace py::literals;
  py::class_<GroupHandle>(m, "GroupHandle", py::is_final())
      .def("poll", &GroupHandle::poll)
      .def("wait", &GroupHandle::wait, "timeout"_a = -1.0);
  m.def("grouped_allreduce_sync", &reduce_now, "comm"_a, "tensors"_a, "in_place"_a, "op"_a, "name"_a = "",
        "prescale"_a = 1.0, "postscale"_a = 1.0);
  m.def("grouped_allreduce", &start_group, "comm"_a, "tensors"_a, "in_place"_a, "op"_a, "name"_a = "",
        "prescale"_a = 1.0, "postscale"_a = 1.0);
  m.def("grouped_allreduce", &start_group_by_name, "comm"_a, "tensors"_a, "in_place"_a, "op"_a, "name"_a = "",
        "prescale"_a = 1.0, "postscale"_a = 1.0);
}

}  // namespace dcoll::bind
