// allreduce, broadcast, allgather, reducescatter, alltoall and barrier as inline calls (inline_call.h).
#include <pybind11/stl.h>

#include <algorithm>

#include "base/error.h"
#include "bind/arguments.h"
#include "bind/inline_call.h"

namespace py = pybind11;

namespace dcoll::bind {
namespace {

// Roots are numbers of the job. False: not a plain number, or no rank of the set.
bool read_root(const Communicator& core, PyObject* object, int& root) {
  if (object == nullptr || !PyLong_CheckExact(object)) return false;
  int overflow = 0;
  const long rank = PyLong_AsLongAndOverflow(object, &overflow);
  const std::vector<int>& job_ranks = core.members().job_ranks;
  if (overflow != 0 || rank < 0) return false;
  if (job_ranks.empty()) {
    root = static_cast<int>(rank);
    return rank < core.size();
  }
  const auto found = std::find(job_ranks.begin(), job_ranks.end(), static_cast<int>(rank));
  root = static_cast<int>(found - job_ranks.begin());
  return found != job_ranks.end();
}

// One call under way: what its steps share.
class CollectiveCall {
 public:
  CollectiveCall(InlineCall& self, const Ranks& ranks, const Arguments& arguments)
      : self_(self), ranks_(ranks), core_(*ranks.core), arguments_(arguments), tensor_(arguments.given[kTensor]) {
    call_.kind = self.kind;
  }

  // False: not a plain call, and nothing was done, or a Python error is set.
  bool read() {
    if (self_.kind == Kind::kBarrier) return true;
    if (tensor_ == nullptr || !read_name(arguments_.given[kName], call_.name)) return false;
    if (!self_.in_place && requires_grad(tensor_)) return false;
    if (!read_operand(tensor_, self_.in_place ? Access::kWrite : Access::kRead, source_, &shape_)) return false;
    call_.in = source_.data;
    call_.dtype = source_.dtype;
    // Of all-reduces the core takes others than the plainly valid ones too: Adasum, and bitwise operators.
    if (!read_kind() || (self_.kind != Kind::kAllReduce && !call_.plainly_valid(core_.size()))) return false;
    if (!self_.in_place) return make_result();
    result_ = py::reinterpret_borrow<py::object>(tensor_);
    call_.out = source_.data;
    return true;
  }

  // A new reference; null: a Python error is set.
  PyObject* run() {
    if (self_.handle != nullptr) return start_inline(self_, ranks_, call_, tensor_, result_.ptr());
    std::shared_ptr<Operation> operation;
    if (!run_call(core_, call_, source_.bytes(), {tensor_, result_.ptr()}, operation)) return nullptr;
    if (self_.kind == Kind::kBarrier) return Py_NewRef(Py_None);
    if (self_.in_place) return mark_written(tensor_) ? result_.release().ptr() : nullptr;
    if (operation == nullptr || operation->output == nullptr) return result_.release().ptr();
    return wrap(*operation);
  }

 private:
  bool read_kind() {
    if (self_.kind == Kind::kAllReduce) {
      call_.count = source_.count;
      call_.dims = shape_.all();
      return absent(arguments_.given[kAverage]) && read_reduction();
    }
    if (self_.kind == Kind::kBroadcast) {
      call_.count = source_.bytes();
      call_.dims = shape_.all();
      return read_root(core_, arguments_.given[kRootRank], call_.root);
    }
    call_.row_elems = shape_.row_elems();
    if (self_.kind == Kind::kReduceScatter) {
      return arguments_.given[kOp] != Py_None && read_rows() && read_reduction();
    }
    if (self_.handle != nullptr) return false;  // the Python function's handle takes a result of any size
    call_.row_elems *= dtype_bytes(source_.dtype);
    return (self_.kind == Kind::kAllGather || absent(arguments_.given[kSplits])) && read_rows();
  }

  bool read_rows() {
    if (shape_.ndim == 0) return false;
    call_.count = static_cast<size_t>(shape_.dims[0]);
    call_.dims = shape_.of_row();
    return true;
  }

  bool read_reduction() {
    PyObject* compression = arguments_.given[kCompression];
    if (compression != nullptr && compression != self_.no_compression) return false;
    return read_op(self_, arguments_.given[kOp], call_.op) &&
           read_factor(arguments_.given[kPrescale], call_.prescale) &&
           read_factor(arguments_.given[kPostscale], call_.postscale);
  }

  // A new tensor for the result. Of an all-gather and an all-to-all it is a guess: ranks mostly bring as many rows as
  // this one.
  bool make_result() {
    const auto size = static_cast<int64_t>(core_.size());
    Shape shape = shape_;
    bool same_shape = true;
    if (self_.kind == Kind::kAllGather) {
      shape.dims[0] *= size;
      same_shape = false;
    } else if (self_.kind == Kind::kReduceScatter) {
      shape.dims[0] = shape.dims[0] / size + (core_.rank() < shape.dims[0] % size);
      same_shape = false;
    }
    if (is_ragged(self_.kind)) {
      call_.out_bytes = source_.bytes() * (same_shape ? 1 : core_.size());
      if (call_.out_bytes == 0) return false;
    }
    const size_t bytes = shape.elems() * dtype_bytes(source_.dtype);
    if (bytes > kMostOwnBytes) result_ = py::reinterpret_steal<py::object>(new_in_core(tensor_, source_, shape));
    if (!result_ && PyErr_Occurred() == nullptr) {
      if (call_.out_bytes > kMostOwnBytes) return false;  // the Python function wraps memory of the core
      result_ =
          py::reinterpret_steal<py::object>(same_shape ? empty_like(tensor_) : new_empty(tensor_, source_, shape));
    }
    Operand target;
    if (!result_ || !read_operand(result_.ptr(), Access::kWrite, target)) return false;
    call_.out = target.data;
    return !same_shape || (target.count == source_.count && target.dtype == source_.dtype);
  }

  // The result is of another size than was guessed, and lies in memory of the core.
  PyObject* wrap(Operation& operation) {
    try {
      if (self_.wrap_rows == nullptr) throw Error("a ragged result, but the callable has no wrap_rows");
      const py::function wrap_rows = py::reinterpret_borrow<py::function>(self_.wrap_rows);
      return wrap_rows(py::handle(tensor_), operation.output, operation.counts).release().ptr();
    } catch (...) {
      set_error(std::current_exception());
      return nullptr;
    }
  }

  InlineCall& self_;
  const Ranks& ranks_;
  Communicator& core_;
  const Arguments& arguments_;
  PyObject* const tensor_;
  Call call_;
  Operand source_;
  Shape shape_;
  py::object result_;
};

}  // namespace

PyObject* call_collective(PyObject* object, PyObject* const* args, size_t nargsf, PyObject* names) {
  InlineCall& self = as_inline(object);
  Arguments arguments;
  if (arguments.place(args, PyVectorcall_NARGS(nargsf), names, parameters_of(self))) {
    const Ranks ranks = find_ranks(self, arguments.given[kProcessSet]);
    // A reference of our own: another thread may call shutdown() while this one waits.
    const auto keep = py::reinterpret_borrow<py::object>(ranks.communicator);
    if (ranks.core != nullptr) {
      CollectiveCall call(self, ranks, arguments);
      PyObject* const name = arguments.given[kName];
      if (call.read()) return note_if_refused(self, call.run(), ranks, name);
      if (PyErr_Occurred() != nullptr) return note_if_refused(self, nullptr, ranks, name);
    }
  }
  return hand_on(self, args, nargsf, names);
}

namespace {

// What torch.distributed's all_reduce() is here, where it is plain: see dcoll/_C.pyi.
PyObject* all_reduce_plain(PyObject*, PyObject* const* args, Py_ssize_t given) {
  if (given != 3) return PyErr_Format(PyExc_TypeError, "all_reduce_plain takes 3 arguments, but got %zd", given);
  Communicator* const core = communicator_of(args[0]);
  const long op = core == nullptr ? -1 : PyLong_AsLong(args[2]);
  if (PyErr_Occurred() != nullptr) return nullptr;
  Operand operand;
  if (!read_operand(args[1], Access::kWrite, operand) || operand.dtype == DType::kBool) Py_RETURN_FALSE;
  const auto keep = py::reinterpret_borrow<py::object>(args[0]);
  std::shared_ptr<Operation> operation;
  try {
    const Call call{.kind = Kind::kAllReduce,
                    .in = operand.data,
                    .out = operand.data,
                    .count = operand.count,
                    .dtype = operand.dtype,
                    .op = to_op(static_cast<int>(op))};
    if (!run_call(*core, call, operand.bytes(), {args[1]}, operation)) return nullptr;
  } catch (...) {
    set_error(std::current_exception());
    return nullptr;
  }
  Py_RETURN_TRUE;
}

PyMethodDef functions[] = {
    {"all_reduce_plain", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(all_reduce_plain)), METH_FASTCALL,
     nullptr},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

void bind_all_reduce_plain(py::module_& m) {
  if (PyModule_AddFunctions(m.ptr(), functions) != 0) throw py::error_already_set();
}

}  // namespace dcoll::bind
