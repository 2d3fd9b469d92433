// Grouped all-gather and reduce-scatter. Tensors are plain ones (operand.h), or come as (address, shape, elements per
// row, dtype code), so that ranks with other kinds of tensors call the same.
#include "engine/buckets/grouped_rows.h"

#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "base/error.h"
#include "bind/arguments.h"
#include "bind/bind.h"
#include "bind/on_device.h"
#include "bind/operand.h"
#include "bind/shared_results.h"

namespace py = pybind11;

namespace dcoll::bind {
namespace {

// All dimensions but the first, where ranks compare them.
std::vector<int64_t> row_dims_of(Dims shape) {
  const Dims dims = shape.subspan(1);
  return compared(dims) ? std::vector<int64_t>(dims.begin(), dims.end()) : std::vector<int64_t>();
}

// A plain tensor with rows (operand.h), or (address, shape, elements per row, dtype code). False: neither.
bool read_tensor(py::handle given, RowTensor& tensor) {
  if (PyTuple_CheckExact(given.ptr())) {
    const auto [address, shape, row_elems, dtype] =
        given.cast<std::tuple<uintptr_t, std::vector<int64_t>, size_t, int>>();
    if (shape.empty()) return false;
    tensor = {to_pointer(address), static_cast<size_t>(shape[0]), row_elems, to_dtype(dtype), row_dims_of(shape)};
    return true;
  }
  Operand operand;
  Shape shape;
  if (!read_operand(given.ptr(), Access::kRead, operand, &shape) || shape.ndim == 0) return false;
  tensor = {operand.data, static_cast<size_t>(shape.dims[0]), shape.row_elems(), operand.dtype,
            row_dims_of(shape.all())};
  return true;
}

// Nothing when one of them is neither, or, where results are to carry gradients, requires one.
std::optional<std::vector<RowTensor>> read_tensors(const py::list& given, bool graded) {
  std::vector<RowTensor> tensors(given.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    PyObject* tensor = PyList_GET_ITEM(given.ptr(), static_cast<Py_ssize_t>(i));
    if ((graded && requires_grad(tensor)) || !read_tensor(tensor, tensors[i])) return std::nullopt;
  }
  return tensors;
}

// A group under way, or done. Packing is done when it is made, so the inputs are free.
class RowGroupHandle {
 public:
  RowGroupHandle(CommPtr comm, std::unique_ptr<GroupedRows> group) : comm_(std::move(comm)), group_(std::move(group)) {}
  ~RowGroupHandle() {  // giving memory back takes as long as copying it
    with_lock_as_pays(group_->bytes(), [this] { group_.reset(); });
  }
  RowGroupHandle(const RowGroupHandle&) = delete;
  RowGroupHandle& operator=(const RowGroupHandle&) = delete;
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
    for (const uintptr_t address : addresses) results.push_back(to_pointer(address));
    with_lock_as_pays(group_->bytes(), [&] { group_->unpack(results); });
  }

 private:
  void check_finished() const {
    if (!poll()) throw ArgumentError("the group is not finished; call wait() first.");
  }
  CommPtr comm_;
  std::unique_ptr<GroupedRows> group_;
};

// New tensors like the given ones, but with these numbers of rows.
py::list with_rows(const py::list& tensors, const std::vector<size_t>& rows, const py::dict& makers) {
  py::list made(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    const py::handle tensor = PyList_GET_ITEM(tensors.ptr(), static_cast<Py_ssize_t>(i));
    const py::tuple shape = tensor.attr("shape");
    py::tuple wanted(shape.size());
    wanted[0] = rows[i];
    for (size_t dim = 1; dim < shape.size(); ++dim) wanted[dim] = shape[dim];
    PyObject* maker = PyDict_GetItemWithError(makers.ptr(), reinterpret_cast<PyObject*>(Py_TYPE(tensor.ptr())));
    if (maker == nullptr) throw ArgumentError("makers has none for a tensor's type.");
    PyObject* arguments[] = {tensor.ptr(), wanted.ptr()};
    PyObject* result = PyObject_Vectorcall(maker, arguments, 2, nullptr);
    if (result == nullptr) throw py::error_already_set();
    PyList_SET_ITEM(made.ptr(), static_cast<Py_ssize_t>(i), result);
  }
  return made;
}

// In a block of several dtypes: every tensor is as aligned as one of its own.
size_t room_for(const Operand& operand) { return round_up(operand.bytes(), Memory::kAlignment); }

// The same as tensors of one block of memory, filled: a third of the time. Nothing when they are too large to share
// one, or when one of them is empty or cannot be made of given memory.
std::optional<py::list> in_one_block(const RowGroupHandle& group, const py::list& tensors,
                                     const std::vector<size_t>& rows) {
  std::vector<Operand> operands(rows.size());
  std::vector<Shape> shapes(rows.size());
  size_t bytes = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    PyObject* tensor = PyList_GET_ITEM(tensors.ptr(), static_cast<Py_ssize_t>(i));
    if (maker_of(tensor) == nullptr || !read_operand(tensor, Access::kRead, operands[i], &shapes[i])) return {};
    if (shapes[i].ndim == 0) return {};
    shapes[i].dims[0] = static_cast<int64_t>(rows[i]);
    operands[i].count = shapes[i].elems();
    bytes += room_for(operands[i]);
    if (operands[i].count == 0 || bytes > SharedResults::kMostBytes) return {};
  }
  auto memory = Memory::uninitialized(bytes);
  std::vector<uintptr_t> addresses;
  std::byte* at = memory->data();
  for (Operand& operand : operands) {
    operand.data = at;
    addresses.push_back(reinterpret_cast<uintptr_t>(at));
    at += room_for(operand);
  }
  group.unpack(addresses);
  SharedResults results(std::move(memory), rows.size());
  py::list made(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto index = static_cast<Py_ssize_t>(i);
    PyObject* result = results.make(maker_of(PyList_GET_ITEM(tensors.ptr(), index)), operands[i], shapes[i]);
    if (result == nullptr) throw py::error_already_set();
    PyList_SET_ITEM(made.ptr(), index, result);
  }
  return made;
}

// The results of a finished group, in new tensors like those that were given. makers: of each type, what makes a tensor
// from one of that type and a shape.
py::object unpack_new(const RowGroupHandle& group, const py::list& tensors, const py::dict& makers) {
  const std::vector<size_t> rows = group.rows();
  if (auto results = in_one_block(group, tensors, rows)) return *results;
  py::list results = with_rows(tensors, rows, makers);
  std::vector<uintptr_t> addresses;
  for (const py::handle result : results) {
    Operand operand;
    if (!read_operand(result.ptr(), Access::kWrite, operand)) return py::none();
    addresses.push_back(reinterpret_cast<uintptr_t>(operand.data));
  }
  group.unpack(addresses);
  return results;
}

using StartedRows = std::unique_ptr<RowGroupHandle>;
using Rows = std::unique_ptr<GroupedRows>;  // null: not all of the tensors can be read

StartedRows start(const OnDevice& on, Rows group) {
  if (group == nullptr) return nullptr;
  group->start(on.by_name);
  return std::make_unique<RowGroupHandle>(on.comm, std::move(group));
}

StartedRows run(const CommPtr& comm, Rows group) {
  if (group == nullptr) return nullptr;
  run_group(*group, *comm);
  return std::make_unique<RowGroupHandle>(comm, std::move(group));
}

Rows gather(const CommPtr& comm, const py::list& given, const std::string& name, bool graded = false) {
  auto tensors = read_tensors(given, graded);
  if (!tensors) return nullptr;
  const size_t bytes = bytes_of(*tensors);
  return with_lock_as_pays(bytes, [&] { return std::make_unique<GroupedAllGather>(comm, std::move(*tensors), name); });
}

Rows scatter(const CommPtr& comm, const py::list& given, int op, const std::string& name, double prescale,
             double postscale, bool graded = false) {
  const Call options{.op = to_op(op), .prescale = prescale, .postscale = postscale, .name = name};
  auto tensors = read_tensors(given, graded);
  if (!tensors) return nullptr;
  const size_t bytes = bytes_of(*tensors);
  return with_lock_as_pays(bytes,
                           [&] { return std::make_unique<GroupedReduceScatter>(comm, std::move(*tensors), options); });
}

}  // namespace

void bind_grouped_rows(py::module_& m) {
  using namespace py::literals;
  py::class_<RowGroupHandle>(m, "RowGroupHandle", py::is_final())
      .def("poll", &RowGroupHandle::poll)
      .def("released", &RowGroupHandle::poll)  // as a group of all-reduces
      .def("wait", &RowGroupHandle::wait, "timeout"_a = -1.0)
      .def("rows", &RowGroupHandle::rows)
      .def("unpack", &RowGroupHandle::unpack, "addresses"_a);
  m.def("unpack_rows", &unpack_new, "group"_a, "tensors"_a, "makers"_a);
  using Name = const std::string&;
  m.def(
      "grouped_allgather_sync",
      [](const CommPtr& c, const py::list& t, Name name, bool graded) { return run(c, gather(c, t, name, graded)); },
      "comm"_a, "tensors"_a, "name"_a = "", "graded"_a = false);
  m.def(
      "grouped_reducescatter_sync",
      [](const CommPtr& c, const py::list& t, int op, Name name, double pre, double post, bool graded) {
        return run(c, scatter(c, t, op, name, pre, post, graded));
      },
      "comm"_a, "tensors"_a, "op"_a, "name"_a = "", "prescale"_a = 1.0, "postscale"_a = 1.0, "graded"_a = false);
  const auto define_starts = [&]<typename Self>(const Self&) {
    m.def(
        "grouped_allgather",
        [](const Self& self, const py::list& t, Name name) {
          const OnDevice on{self};
          return start(on, gather(on.comm, t, name));
        },
        "comm"_a, "tensors"_a, "name"_a = "");
    m.def(
        "grouped_reducescatter",
        [](const Self& self, const py::list& t, int op, Name name, double pre, double post) {
          const OnDevice on{self};
          return start(on, scatter(on.comm, t, op, name, pre, post));
        },
        "comm"_a, "tensors"_a, "op"_a, "name"_a = "", "prescale"_a = 1.0, "postscale"_a = 1.0);
  };
  define_starts(CommPtr());
  define_starts(OnDevice());
}

}  // namespace dcoll::bind
