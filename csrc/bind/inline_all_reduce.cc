// dcoll.allreduce, allreduce_, allreduce_async and allreduce_async_ as inline calls (inline_call.h).
#include "bind/inline_call.h"

namespace py = pybind11;

namespace dcoll::bind {
namespace {

bool read_options(const InlineCall& self, const Arguments& arguments, Call& call) {
  PyObject* compression = arguments.given[kCompression];
  return absent(arguments.given[kAverage]) && (compression == nullptr || compression == self.no_compression) &&
         read_op(self, arguments.given[kOp], call.op) && read_name(arguments.given[kName], call.name) &&
         read_factor(arguments.given[kPrescale], call.prescale) &&
         read_factor(arguments.given[kPostscale], call.postscale);
}

// A new tensor like this plain one; null: a Python error is set.
PyObject* new_result(PyObject* tensor, const Operand& source, const Shape& shape) {
  if (source.bytes() > kMostOwnBytes) {
    PyObject* result = new_in_core(tensor, source, shape);
    if (result != nullptr || PyErr_Occurred() != nullptr) return result;
  }
  return empty_like(tensor);
}

// A new reference to the result, or the handle; null: a Python error is set. `plain` false: nothing was done.
PyObject* reduce(InlineCall& self, const Ranks& ranks, const Arguments& arguments, bool& plain) {
  PyObject* const tensor = arguments.given[kTensor];
  Call call;
  Operand source;
  Shape shape;
  plain = read_options(self, arguments, call) && (self.in_place || !requires_grad(tensor)) &&
          read_operand(tensor, self.in_place ? Access::kWrite : Access::kRead, source, &shape);
  if (!plain) return nullptr;
  Operand target = source;
  py::object result = self.in_place ? py::reinterpret_borrow<py::object>(tensor)
                                    : py::reinterpret_steal<py::object>(new_result(tensor, source, shape));
  if (!result) return nullptr;
  if (!self.in_place) {
    plain = read_operand(result.ptr(), Access::kWrite, target) && target.count == source.count &&
            target.dtype == source.dtype;
    if (!plain) return nullptr;
  }
  call.in = source.data;
  call.out = target.data;
  call.count = source.count;
  call.dtype = source.dtype;
  call.dims = shape.all();
  if (self.handle != nullptr) return start_inline(self, ranks, call, tensor, result.ptr());
  std::shared_ptr<Operation> operation;
  if (!run_call(*ranks.core, call, source.bytes(), {tensor, result.ptr()}, operation)) return nullptr;
  if (self.in_place && !mark_written(tensor)) return nullptr;
  return result.release().ptr();
}

}  // namespace

PyObject* call_all_reduce(PyObject* object, PyObject* const* args, size_t nargsf, PyObject* names) {
  InlineCall& self = as_inline(object);
  Arguments arguments;
  if (arguments.place(args, PyVectorcall_NARGS(nargsf), names, parameters_of(self)) &&
      arguments.given[kTensor] != nullptr) {
    const Ranks ranks = find_ranks(self, arguments.given[kProcessSet]);
    // A reference of our own: another thread may call shutdown() while this one waits.
    const auto keep = py::reinterpret_borrow<py::object>(ranks.communicator);
    bool plain = ranks.core != nullptr;
    PyObject* result = plain ? reduce(self, ranks, arguments, plain) : nullptr;
    if (plain) return note_if_refused(self, result, ranks, arguments.given[kName]);
  }
  return hand_on(self, args, nargsf, names);
}

}  // namespace dcoll::bind
