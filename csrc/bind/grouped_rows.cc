// Grouped all-gather and reduce-scatter. Tensors come as (address, rows, elements per row, dtype code), whatever they
// are in Python, so that ranks with other kinds of tensors call the same.
#include "engine/grouped_rows.h"

#include <pybind11/stl.h>

#include <cstdint>
#include <string>
#include <tuple>
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
using Described = std::vector<std::tuple<uintptr_t, size_t, size_t, int>>;

std::vector<RowTensor> tensors_of(const Described& described) {
  std::vector<RowTensor> tensors;
  for (const auto& [address, rows, row_elems, dtype] : described) {
    if (dtype < 0 || dtype >= kNumDTypes) {
      throw ArgumentError("dtype code " + std::to_string(dtype) + " does not exist; allowed are 0 to " +
                          std::to_string(kNumDTypes - 1) + ".");
    }
    tensors.push_back({reinterpret_cast<const void*>(address), rows, row_elems, static_cast<DType>(dtype)});
  }
  return tensors;
}

// A group under way, or done. Packing is done when it is made, so the inputs are free.
class RowGroupHandle {
 public:
  RowGroupHandle(CommPtr comm, std::unique_ptr<GroupedRows> group) : comm_(std::move(comm)), group_(std::move(group)) {}
  bool poll() const { return group_->done(); }
  void wait(double timeout_s) {
    group_->finish([&](Operation& operation) { wait_interruptibly(*comm_, operation, timeout_s); });
  }
  std::vector<size_t> rows() const {
    check_finished();
    return group_->rows();
  }
  void unpack(const std::vector<uintptr_t>& addresses) const {
    check_finished();
    std::vector<void*> results;
    for (const uintptr_t address : addresses) results.push_back(reinterpret_cast<void*>(address));
    group_->unpack(results);
  }

 private:
  void check_finished() const {
    if (!poll()) throw ArgumentError("the group is not finished; call wait() first.");
  }
  CommPtr comm_;
  std::unique_ptr<GroupedRows> group_;
};

// What describes a plain tensor with rows (operand.h); nothing for others.
py::object describe(py::handle tensor) {
  Operand operand;
  if (!read_operand(tensor.ptr(), Access::kRead, operand)) return py::none();
  const py::tuple shape = tensor.attr("shape");
  if (shape.empty()) return py::none();
  const auto rows = shape[0].cast<size_t>();
  size_t row_elems = rows > 0 ? operand.count / rows : 1;
  for (size_t dim = 1; rows == 0 && dim < shape.size(); ++dim) row_elems *= shape[dim].cast<size_t>();
  return py::make_tuple(reinterpret_cast<uintptr_t>(operand.data), rows, row_elems, static_cast<int>(operand.dtype));
}

py::object describe_all(const py::list& tensors) {
  py::list described;
  for (const py::handle tensor : tensors) {
    py::object one = describe(tensor);
    if (one.is_none()) return one;
    described.append(std::move(one));
  }
  return described;
}

// New tensors like the given ones, but with these numbers of rows.
py::list with_rows(const py::list& tensors, const std::vector<size_t>& rows, const py::dict& makers) {
  py::list made;
  for (size_t i = 0; i < rows.size(); ++i) {
    const py::object tensor = tensors[i];
    py::tuple shape = tensor.attr("shape");
    if (shape[0].cast<size_t>() != rows[i]) {
      py::tuple other(shape.size());
      other[0] = rows[i];
      for (size_t dim = 1; dim < shape.size(); ++dim) other[dim] = shape[dim];
      shape = std::move(other);
    }
    made.append(makers[py::type::of(tensor)](tensor, shape));
  }
  return made;
}

// The results of a finished group, in new tensors like those that were given. makers: of each type, what makes a tensor
// from one of that type and a shape.
py::object unpack_new(const RowGroupHandle& group, const py::list& tensors, const py::dict& makers) {
  py::list results = with_rows(tensors, group.rows(), makers);
  std::vector<uintptr_t> addresses;
  for (const py::handle result : results) {
    Operand operand;
    if (!read_operand(result.ptr(), Access::kWrite, operand)) return py::none();
    addresses.push_back(reinterpret_cast<uintptr_t>(operand.data));
  }
  group.unpack(addresses);
  return results;
}

using Handle = std::unique_ptr<RowGroupHandle>;
using Group = std::unique_ptr<GroupedRows>;

Handle start(const CommPtr& comm, Group group) {
  group->start();
  return std::make_unique<RowGroupHandle>(comm, std::move(group));
}

Handle start(const ByName& named, Group group) {
  group->start_by_name();
  return std::make_unique<RowGroupHandle>(named.comm, std::move(group));
}

Handle run(const CommPtr& comm, Group group) {
  if (group->bytes() <= kKeepLockBytes) {
    group->run([&](Operation& operation) { wait_interruptibly(*comm, operation, -1); });
  } else {
    const py::gil_scoped_release unlocked;
    group->run([&](Operation& operation) {
      const py::gil_scoped_acquire locked;
      wait_interruptibly(*comm, operation, -1);
    });
  }
  return std::make_unique<RowGroupHandle>(comm, std::move(group));
}

Group gather(const CommPtr& comm, const Described& tensors, const std::string& name) {
  return std::make_unique<GroupedAllGather>(comm, tensors_of(tensors), name);
}

Group scatter(const CommPtr& comm, const Described& tensors, int op, const std::string& name, double prescale,
              double postscale) {
  if (op < 0 || op >= kNumReduceOps) throw ArgumentError("reduce op code " + std::to_string(op) + " does not exist.");
  const ReduceCall options{.op = static_cast<ReduceOp>(op), .prescale = prescale, .postscale = postscale, .name = name};
  return std::make_unique<GroupedReduceScatter>(comm, tensors_of(tensors), options);
}

}  // namespace

void bind_grouped_rows(py::module_& m) {
  using namespace py::literals;
  py::class_<RowGroupHandle>(m, "RowGroupHandle", py::is_final())
      .def("poll", &RowGroupHandle::poll)
      .def("wait", &RowGroupHandle::wait, "timeout"_a = -1.0)
      .def("rows", &RowGroupHandle::rows)
      .def("unpack", &RowGroupHandle::unpack, "addresses"_a);
  m.def("describe_rows", &describe_all, "tensors"_a);
  m.def("unpack_rows", &unpack_new, "group"_a, "tensors"_a, "makers"_a);
  const auto define_gather = [&](const char* name, auto function) {
    m.def(name, function, "comm"_a, "tensors"_a, "name"_a = "");
  };
  const auto define_scatter = [&](const char* name, auto function) {
    m.def(name, function, "comm"_a, "tensors"_a, "op"_a, "name"_a = "", "prescale"_a = 1.0, "postscale"_a = 1.0);
  };
  using Name = const std::string&;
  define_gather("grouped_allgather_sync",
                [](const CommPtr& c, const Described& t, Name name) { return run(c, gather(c, t, name)); });
  define_gather("grouped_allgather",
                [](const CommPtr& c, const Described& t, Name name) { return start(c, gather(c, t, name)); });
  define_gather("grouped_allgather",
                [](const ByName& c, const Described& t, Name name) { return start(c, gather(c.comm, t, name)); });
  define_scatter("grouped_reducescatter_sync", [](const CommPtr& c, const Described& t, int op, Name name, double pre,
                                                  double post) { return run(c, scatter(c, t, op, name, pre, post)); });
  define_scatter("grouped_reducescatter", [](const CommPtr& c, const Described& t, int op, Name name, double pre,
                                             double post) { return start(c, scatter(c, t, op, name, pre, post)); });
  define_scatter("grouped_reducescatter",
                 [](const ByName& c, const Described& t, int op, Name name, double pre, double post) {
                   return start(c, scatter(c.comm, t, op, name, pre, post));
                 });
}

}  // namespace dcoll::bind
