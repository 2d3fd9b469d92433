// InlineAllReduce: a Python callable that does the plain synchronous all-reduce in C and leaves all other calls to the
// Python function it stands for.
//
// A plain call has a plain tensor (operand.h), arguments of the usual types, and a communicator. It takes no dict, no
// string and no allocation of ours from here to the core and back; that is what a call of 4 bytes consists of. Any
// other call goes to the Python function with the very arguments it came with, before anything was sent: so errors,
// warnings and odd tensors are that function's business alone.
#include <pybind11/pybind11.h>
#include <structmember.h>

#include <algorithm>
#include <cstddef>
#include <vector>

#include "bind/bind.h"
#include "bind/operand.h"

namespace py = pybind11;

namespace dcoll::bind {
namespace {

// Above this the interpreter lock is given to other threads during the call; below, handing it over and getting it back
// may take longer than the call.
constexpr size_t kKeepLockBytes = 64 << 10;

// The job's communicator: what a callable without one of its own uses. Null between shutdown() and init().
PyObject* job = nullptr;
Communicator* job_communicator = nullptr;

// The process sets with a communicator, by their Python objects; the global one is among them. Few, so a list.
struct ProcessSet {
  PyObject* object;  // a reference
  PyObject* communicator;
  Communicator* core;
};
std::vector<ProcessSet> process_sets;

struct InlineAllReduce {
  PyObject_HEAD;
  vectorcallfunc call;
  PyObject* dict;  // what functools.update_wrapper copies
  PyObject* weakrefs;
  PyObject* otherwise;     // the Python function
  PyObject* communicator;  // null: the job's
  Communicator* core;
  PyObject* no_compression;      // null: any compression is the function's business
  PyObject* ops[kNumReduceOps];  // dcoll.ReduceOp by code
  bool in_place;
};

InlineAllReduce* cast(PyObject* self) { return reinterpret_cast<InlineAllReduce*>(self); }

// The parameters, in the order of dcoll.allreduce's. dcoll.allreduce_ has no compression.
enum Parameter { kTensor, kAverage, kName, kCompression, kOp, kPrescale, kPostscale, kProcessSet, kNumParameters };
constexpr const char* kParameterNames[kNumParameters] = {
    "tensor", "average", "name", "compression", "op", "prescale_factor", "postscale_factor", "process_set"};
PyObject* interned[kNumParameters];

struct Arguments {
  PyObject* given[kNumParameters] = {};  // borrowed; null: not given

  // False: too many, twice, or an unknown name. Names in a call's source are interned, so comparing addresses finds
  // them.
  bool place(PyObject* const* args, Py_ssize_t positional, PyObject* names, bool in_place) {
    if (positional > kNumParameters - in_place) return false;
    for (Py_ssize_t i = 0; i < positional; ++i) given[i + (in_place && i >= kCompression)] = args[i];
    const Py_ssize_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
    for (Py_ssize_t i = 0; i < named; ++i) {
      int at = 0;
      while (at < kNumParameters && interned[at] != PyTuple_GET_ITEM(names, i)) ++at;
      if (at == kNumParameters || given[at] != nullptr || (in_place && at == kCompression)) return false;
      given[at] = args[positional + i];
    }
    return given[kTensor] != nullptr;
  }
};

bool absent(PyObject* object) { return object == nullptr || object == Py_None; }

bool read_factor(PyObject* object, double& factor) {
  if (object == nullptr) return true;
  if (!PyFloat_CheckExact(object)) return false;
  factor = PyFloat_AS_DOUBLE(object);
  return true;
}

bool read_op(const InlineAllReduce& self, PyObject* object, ReduceOp& op) {
  if (absent(object)) {
    op = ReduceOp::kAverage;
    return true;
  }
  for (int code = 0; code < kNumReduceOps; ++code) {
    if (self.ops[code] == object) {
      op = static_cast<ReduceOp>(code);
      return true;
    }
  }
  return false;
}

bool read_name(PyObject* object, std::string_view& name) {
  if (absent(object)) return true;
  if (!PyUnicode_CheckExact(object)) return false;
  Py_ssize_t length = 0;
  const char* text = PyUnicode_AsUTF8AndSize(object, &length);  // kept by the string once it was asked for
  if (text == nullptr) {
    PyErr_Clear();
    return false;
  }
  name = {text, static_cast<size_t>(length)};
  return true;
}

bool read_options(const InlineAllReduce& self, const Arguments& arguments, ReduceCall& call) {
  PyObject* compression = arguments.given[kCompression];
  return absent(arguments.given[kAverage]) && (compression == nullptr || compression == self.no_compression) &&
         read_op(self, arguments.given[kOp], call.op) && read_name(arguments.given[kName], call.name) &&
         read_factor(arguments.given[kPrescale], call.prescale) &&
         read_factor(arguments.given[kPostscale], call.postscale);
}

std::shared_ptr<Operation> begin(Communicator& core, const ReduceCall& call, size_t bytes) {
  if (bytes <= kKeepLockBytes) return core.run_or_submit(call);
  const py::gil_scoped_release unlocked;
  return core.run_or_submit(call);
}

// False: a Python error is set. `memory` is what the core reads and writes.
bool run(Communicator& core, const ReduceCall& call, size_t bytes, std::initializer_list<PyObject*> memory) {
  std::shared_ptr<Operation> operation;
  try {
    operation = begin(core, call, bytes);
    if (operation != nullptr) wait_interruptibly(core, *operation, -1);
    return true;
  } catch (...) {
    set_error(std::current_exception());
  }
  // Ctrl-C ends the wait, not the operation: the core works on this memory for as long as the peers take. So it must
  // never be freed.
  if (operation != nullptr && !operation->done.load(std::memory_order_acquire)) {
    for (PyObject* object : memory) Py_INCREF(object);
  }
  return false;
}

// A new reference to the result; null: a Python error is set. `plain` false: nothing was done.
PyObject* reduce(InlineAllReduce& self, Communicator& core, const Arguments& arguments, bool& plain) {
  PyObject* const tensor = arguments.given[kTensor];
  ReduceCall call;
  Operand source;
  plain = read_options(self, arguments, call) && (self.in_place || !requires_grad(tensor)) &&
          read_operand(tensor, self.in_place ? Access::kWrite : Access::kRead, source);
  if (!plain) return nullptr;
  Operand target = source;
  py::object result = self.in_place ? py::reinterpret_borrow<py::object>(tensor)
                                    : py::reinterpret_steal<py::object>(empty_like(tensor));
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
  if (!run(core, call, source.bytes(), {tensor, result.ptr()})) return nullptr;
  if (self.in_place && !mark_written(tensor)) return nullptr;
  return result.release().ptr();
}

// Who reduces: the process set asked for, the callable's own communicator, or the job's. Nulls: the function knows.
ProcessSet find_communicator(const InlineAllReduce& self, PyObject* process_set) {
  if (process_set == nullptr) {
    if (self.communicator != nullptr) return {nullptr, self.communicator, self.core};
    return {nullptr, job, job_communicator};
  }
  for (const ProcessSet& known : process_sets) {
    if (known.object == process_set) return known;
  }
  return {};
}

PyObject* vectorcall(PyObject* object, PyObject* const* args, size_t nargsf, PyObject* names) {
  InlineAllReduce& self = *cast(object);
  Arguments arguments;
  if (arguments.place(args, PyVectorcall_NARGS(nargsf), names, self.in_place)) {
    const ProcessSet ranks = find_communicator(self, arguments.given[kProcessSet]);
    // A reference of our own: another thread may call shutdown() while this one waits.
    const auto keep = py::reinterpret_borrow<py::object>(ranks.communicator);
    bool plain = ranks.core != nullptr;
    PyObject* result = plain ? reduce(self, *ranks.core, arguments, plain) : nullptr;
    if (plain) return result;
  }
  return PyObject_Vectorcall(self.otherwise, args, nargsf, names);
}

// --- the type
// ---------------------------------------------------------------------------------------------------------

int traverse(PyObject* object, visitproc visit, void* arg) {
  InlineAllReduce& self = *cast(object);
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(self.dict);
  Py_VISIT(self.otherwise);
  Py_VISIT(self.communicator);
  Py_VISIT(self.no_compression);
  for (PyObject* op : self.ops) Py_VISIT(op);
  return 0;
}

int clear(PyObject* object) {
  InlineAllReduce& self = *cast(object);
  self.core = nullptr;
  Py_CLEAR(self.dict);
  Py_CLEAR(self.otherwise);
  Py_CLEAR(self.communicator);
  Py_CLEAR(self.no_compression);
  for (PyObject*& op : self.ops) Py_CLEAR(op);
  return 0;
}

void dealloc(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  if (cast(object)->weakrefs != nullptr) PyObject_ClearWeakRefs(object);
  clear(object);
  type->tp_free(object);
  Py_DECREF(type);
}

PyObject* create(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"otherwise", "ops", "in_place", "communicator", "no_compression", nullptr};
  PyObject *otherwise, *ops, *communicator = Py_None, *no_compression = nullptr;
  int in_place = 0;
  if (PyArg_ParseTupleAndKeywords(args, kwargs, "OO!p|OO:InlineAllReduce", const_cast<char**>(names), &otherwise,
                                  &PyTuple_Type, &ops, &in_place, &communicator, &no_compression) == 0) {
    return nullptr;
  }
  Communicator* core = nullptr;
  if (communicator != Py_None && (core = communicator_of(communicator)) == nullptr) return nullptr;
  PyObject* object = type->tp_alloc(type, 0);
  if (object == nullptr) return nullptr;
  InlineAllReduce& self = *cast(object);
  self.call = vectorcall;
  self.otherwise = Py_NewRef(otherwise);
  self.in_place = in_place != 0;
  self.no_compression = Py_XNewRef(no_compression);
  if (core != nullptr) {
    self.communicator = Py_NewRef(communicator);
    self.core = core;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(ops); ++i) {
    PyObject* op = PyTuple_GET_ITEM(ops, i);
    const long code = PyLong_AsLong(op);
    if (code >= 0 && code < kNumReduceOps && self.ops[code] == nullptr) {
      self.ops[code] = Py_NewRef(op);
    } else {
      if (PyErr_Occurred() == nullptr) PyErr_Format(PyExc_ValueError, "%R is not the code of an operator", op);
      Py_DECREF(object);
      return nullptr;
    }
  }
  return object;
}

// As a function in a class body: a method of the instances.
PyObject* bind_to(PyObject* self, PyObject* instance, PyObject*) {
  return instance == nullptr || instance == Py_None ? Py_NewRef(self) : PyMethod_New(self, instance);
}

PyObject* repr(PyObject* self) { return PyObject_Repr(cast(self)->otherwise); }

// Pickled, and copied, by name, as functions are.
PyObject* reduce_for_pickle(PyObject* self, PyObject*) { return PyObject_GetAttrString(self, "__qualname__"); }

PyMethodDef methods[] = {{"__reduce__", reduce_for_pickle, METH_NOARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
PyMemberDef members[] = {{"__vectorcalloffset__", T_PYSSIZET, offsetof(InlineAllReduce, call), READONLY, nullptr},
                         {"__dictoffset__", T_PYSSIZET, offsetof(InlineAllReduce, dict), READONLY, nullptr},
                         {"__weaklistoffset__", T_PYSSIZET, offsetof(InlineAllReduce, weakrefs), READONLY, nullptr},
                         {nullptr, 0, 0, 0, nullptr}};
PyGetSetDef attributes[] = {{"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, nullptr, nullptr},
                            {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(create)},
                       {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
                       {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                       {Py_tp_clear, reinterpret_cast<void*>(clear)},
                       {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                       {Py_tp_descr_get, reinterpret_cast<void*>(bind_to)},
                       {Py_tp_repr, reinterpret_cast<void*>(repr)},
                       {Py_tp_methods, methods},
                       {Py_tp_members, members},
                       {Py_tp_getset, attributes},
                       {0, nullptr}};
PyType_Spec spec = {"dcoll._C.InlineAllReduce", sizeof(InlineAllReduce), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL, slots};

void set_job(const py::object& communicator) {
  Communicator* core = nullptr;
  if (!communicator.is_none() && (core = communicator_of(communicator.ptr())) == nullptr) throw py::error_already_set();
  const auto before = py::reinterpret_steal<py::object>(job);  // freed at the end, when the new one is in place
  job = core != nullptr ? Py_NewRef(communicator.ptr()) : nullptr;
  job_communicator = core;
}

// None: the set is no more.
void set_process_set(const py::object& process_set, const py::object& communicator) {
  Communicator* core = nullptr;
  if (!communicator.is_none() && (core = communicator_of(communicator.ptr())) == nullptr) throw py::error_already_set();
  const auto found = std::find_if(process_sets.begin(), process_sets.end(),
                                  [&](const ProcessSet& known) { return known.object == process_set.ptr(); });
  if (found != process_sets.end()) {
    const auto object = py::reinterpret_steal<py::object>(found->object);  // freed when the list is whole again
    const auto before = py::reinterpret_steal<py::object>(found->communicator);
    process_sets.erase(found);
  }
  if (core == nullptr) return;
  process_sets.push_back({Py_NewRef(process_set.ptr()), Py_NewRef(communicator.ptr()), core});
}

}  // namespace

void bind_inline_all_reduce(py::module_& m) {
  for (int i = 0; i < kNumParameters; ++i) {
    interned[i] = PyUnicode_InternFromString(kParameterNames[i]);
    if (interned[i] == nullptr) throw py::error_already_set();
  }
  PyObject* type = PyType_FromSpec(&spec);
  if (type == nullptr) throw py::error_already_set();
  m.add_object("InlineAllReduce", py::reinterpret_steal<py::object>(type));
  m.def("set_process_set", &set_process_set, py::arg("process_set"), py::arg("communicator").none(true));
  m.def("set_job", &set_job, py::arg("communicator").none(true));
}

}  // namespace dcoll::bind
