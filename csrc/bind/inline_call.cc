#include "bind/inline_call.h"

#include <structmember.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <string>
#include <vector>

namespace py = pybind11;

namespace dcoll::bind {
namespace {

// The job's communicator: what a callable without one of its own uses. Null between shutdown() and init().
PyObject* job = nullptr;
Communicator* job_communicator = nullptr;

// The process sets with a communicator, by their Python objects; the global one is among them. Few, so a list.
std::vector<Ranks> process_sets;

constexpr const char* kParameterNames[kNumParameters] = {
    "tensor",          "average",          "name",        "compression", "op",
    "prescale_factor", "postscale_factor", "process_set", "root_rank",   "splits"};
PyObject* interned[kNumParameters];

}  // namespace

std::span<const Parameter> parameters_of(const InlineCall& self) {
  static constexpr std::array kReduce{kTensor, kAverage, kName, kCompression, kOp, kPrescale, kPostscale, kProcessSet};
  static constexpr std::array kReducePlainly{kTensor, kAverage, kName, kOp, kPrescale, kPostscale, kProcessSet};
  static constexpr std::array kBroadcast{kTensor, kRootRank, kName, kProcessSet};
  static constexpr std::array kGather{kTensor, kName, kProcessSet};
  static constexpr std::array kScatter{kTensor, kName, kCompression, kOp, kProcessSet, kPrescale, kPostscale};
  static constexpr std::array kScatterPlainly{kTensor, kName, kOp, kProcessSet, kPrescale, kPostscale};
  static constexpr std::array kExchange{kTensor, kSplits, kName, kProcessSet};
  static constexpr std::array kMeet{kProcessSet};
  const bool starts = self.handle != nullptr;  // without compression
  if (self.kind == Kind::kAllReduce && (starts || self.in_place)) return kReducePlainly;
  if (self.kind == Kind::kAllReduce) return kReduce;
  if (self.kind == Kind::kBroadcast) return kBroadcast;
  if (self.kind == Kind::kAllGather) return kGather;
  if (self.kind == Kind::kReduceScatter && starts) return kScatterPlainly;
  if (self.kind == Kind::kReduceScatter) return kScatter;
  if (self.kind == Kind::kAllToAll) return kExchange;
  return kMeet;
}

// Names in a call's source are interned, so comparing addresses finds them.
bool Arguments::place(PyObject* const* args, Py_ssize_t positional, PyObject* names, std::span<const Parameter> order) {
  if (static_cast<size_t>(positional) > order.size()) return false;
  for (Py_ssize_t i = 0; i < positional; ++i) given[order[static_cast<size_t>(i)]] = args[i];
  const Py_ssize_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  for (Py_ssize_t i = 0; i < named; ++i) {
    const PyObject* name = PyTuple_GET_ITEM(names, i);
    const auto found = std::find_if(order.begin(), order.end(), [&](Parameter at) { return interned[at] == name; });
    if (found == order.end() || given[*found] != nullptr) return false;
    given[*found] = args[positional + i];
  }
  return true;
}

Ranks find_ranks(const InlineCall& self, PyObject* process_set) {
  if (process_set == nullptr) {
    if (self.communicator != nullptr) return {nullptr, self.communicator, self.core};
    return {nullptr, job, job_communicator};
  }
  for (const Ranks& known : process_sets) {
    if (known.object == process_set) return known;
  }
  return {};
}

bool read_factor(PyObject* object, double& factor) {
  if (object == nullptr) return true;
  if (!PyFloat_CheckExact(object)) return false;
  factor = PyFloat_AS_DOUBLE(object);
  return true;
}

bool read_op(const InlineCall& self, PyObject* object, ReduceOp& op) {
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

bool read_text(PyObject* object, std::string_view& text) {
  if (!PyUnicode_CheckExact(object)) return false;
  Py_ssize_t length = 0;
  const char* bytes = PyUnicode_AsUTF8AndSize(object, &length);  // kept by the string once it was asked for
  if (bytes == nullptr) {
    PyErr_Clear();
    return false;
  }
  text = {bytes, static_cast<size_t>(length)};
  return true;
}

bool finish_call(Communicator& core, const std::shared_ptr<Operation>& operation,
                 std::initializer_list<PyObject*> memory) {
  if (operation == nullptr) return true;
  try {
    wait_interruptibly(core, *operation, -1);
    return true;
  } catch (...) {
    set_error(std::current_exception());
  }
  // Ctrl-C ends the wait, not the operation: the core works on this memory for as long as the peers take. So it must
  // never be freed, and neither after a failure that left a message half there.
  if (!operation->released()) {
    for (PyObject* object : memory) Py_XINCREF(object);
  }
  return false;
}

namespace {

void note_refused(Communicator& core) {
  const py::error_scope kept;
  std::string text = reinterpret_cast<PyTypeObject*>(kept.type)->tp_name;
  try {
    if (kept.value != nullptr) text += ": " + std::string(py::str(kept.value));
  } catch (const py::error_already_set&) {  // of a class whose __str__ fails, or not to be said in UTF-8
  }
  const py::gil_scoped_release unlocked;
  core.note_refused(text);
}

}  // namespace

PyObject* note_if_refused(const InlineCall& self, PyObject* result, const Ranks& ranks, PyObject* name) {
  const bool named = name != nullptr && PyUnicode_Check(name) && PyUnicode_GET_LENGTH(name) > 0;
  const bool by_name = self.handle != nullptr && named;
  if (result == nullptr && ranks.core != nullptr && !by_name && was_refused()) note_refused(*ranks.core);
  return result;
}

PyObject* start_inline(const InlineCall& self, const Ranks& ranks, const Call& call, PyObject* tensor,
                       PyObject* result) {
  const auto core = py::reinterpret_steal<py::object>(start_call(ranks.communicator, call));
  if (!core || (self.in_place && !mark_written(tensor))) return nullptr;
  PyObject* const args[] = {core.ptr(), self.in_place ? Py_None : tensor, Py_None, result};
  return PyObject_Vectorcall(self.handle, args, std::size(args), nullptr);
}

PyObject* hand_on(InlineCall& self, PyObject* const* args, size_t nargsf, PyObject* names) {
  PyObject* result = PyObject_Vectorcall(self.otherwise, args, nargsf, names);
  if (result != nullptr) return result;
  // By value: the keys of a program's **kwargs need not be interned.
  const auto is = [](PyObject* name, Parameter parameter) {
    return PyUnicode_CompareWithASCIIString(name, kParameterNames[parameter]) == 0;
  };
  const Py_ssize_t positional = PyVectorcall_NARGS(nargsf);
  const auto order = parameters_of(self);
  const auto given = [&](Parameter parameter) -> PyObject* {
    const auto place = std::ranges::find(order, parameter);
    if (place != order.end() && place - order.begin() < positional) return args[place - order.begin()];
    for (Py_ssize_t i = 0; names != nullptr && i < PyTuple_GET_SIZE(names); ++i) {
      if (is(PyTuple_GET_ITEM(names, i), parameter)) return args[positional + i];
    }
    return nullptr;
  };
  const Ranks ranks = find_ranks(self, given(kProcessSet));
  const auto keep = py::reinterpret_borrow<py::object>(ranks.communicator);
  return note_if_refused(self, result, ranks, given(kName));
}

namespace {

// --- the types

int traverse(PyObject* object, visitproc visit, void* arg) {
  InlineCall& self = as_inline(object);
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(self.dict);
  Py_VISIT(self.otherwise);
  Py_VISIT(self.communicator);
  Py_VISIT(self.no_compression);
  Py_VISIT(self.wrap_rows);
  Py_VISIT(self.handle);
  for (PyObject* op : self.ops) Py_VISIT(op);
  return 0;
}

int clear(PyObject* object) {
  InlineCall& self = as_inline(object);
  self.core = nullptr;
  Py_CLEAR(self.dict);
  Py_CLEAR(self.otherwise);
  Py_CLEAR(self.communicator);
  Py_CLEAR(self.no_compression);
  Py_CLEAR(self.wrap_rows);
  Py_CLEAR(self.handle);
  for (PyObject*& op : self.ops) Py_CLEAR(op);
  return 0;
}

void dealloc(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  if (as_inline(object).weakrefs != nullptr) PyObject_ClearWeakRefs(object);
  clear(object);
  type->tp_free(object);
  Py_DECREF(type);
}

// ops: the members of dcoll.ReduceOp. False: a Python error is set.
bool take_ops(InlineCall& self, PyObject* ops) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(ops); ++i) {
    PyObject* op = PyTuple_GET_ITEM(ops, i);
    const long code = PyLong_AsLong(op);
    if (code < 0 || code >= kNumReduceOps || self.ops[code] != nullptr) {
      if (PyErr_Occurred() == nullptr) PyErr_Format(PyExc_ValueError, "%R is not the code of an operator", op);
      return false;
    }
    self.ops[code] = Py_NewRef(op);
  }
  return true;
}

bool read_kind(const char* text, Kind& kind) {
  for (const Kind known :
       {Kind::kAllReduce, Kind::kBroadcast, Kind::kAllGather, Kind::kReduceScatter, Kind::kAllToAll, Kind::kBarrier}) {
    if (kind_name(known) == text) {
      kind = known;
      return true;
    }
  }
  PyErr_Format(PyExc_ValueError,
               "no collective '%s'; allowed are allreduce, broadcast, allgather, reducescatter, alltoall, barrier",
               text);
  return false;
}

// What is called of a group of tensors.
PyObject* call_otherwise(PyObject* object, PyObject* const* args, size_t nargsf, PyObject* names) {
  return hand_on(as_inline(object), args, nargsf, names);
}

PyObject* create(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"otherwise",      "collective", "ops",    "in_place", "communicator",
                                "no_compression", "wrap_rows",  "handle", "grouped",  nullptr};
  PyObject *otherwise, *ops, *communicator = Py_None, *no_compression = nullptr, *wrap_rows = nullptr,
                             *handle = nullptr;
  const char* collective = nullptr;
  int in_place = 0, grouped = 0;
  Kind kind{};
  if (PyArg_ParseTupleAndKeywords(args, kwargs, "OsO!|pOOOOp:InlineCall", const_cast<char**>(names), &otherwise,
                                  &collective, &PyTuple_Type, &ops, &in_place, &communicator, &no_compression,
                                  &wrap_rows, &handle, &grouped) == 0 ||
      !read_kind(collective, kind)) {
    return nullptr;
  }
  Communicator* core = nullptr;
  if (communicator != Py_None && (core = communicator_of(communicator)) == nullptr) return nullptr;
  PyObject* object = type->tp_alloc(type, 0);
  if (object == nullptr) return nullptr;
  InlineCall& self = as_inline(object);
  self.call = grouped != 0 ? call_otherwise : call_collective;
  self.otherwise = Py_NewRef(otherwise);
  self.no_compression = Py_XNewRef(no_compression);
  self.wrap_rows = Py_XNewRef(wrap_rows);
  self.handle = Py_XNewRef(handle);
  self.kind = kind;
  self.in_place = in_place != 0;
  if (core != nullptr) {
    self.communicator = Py_NewRef(communicator);
    self.core = core;
  }
  if (take_ops(self, ops)) return object;
  Py_DECREF(object);
  return nullptr;
}

// As a function in a class body: a method of the instances.
PyObject* bind_to(PyObject* self, PyObject* instance, PyObject*) {
  return instance == nullptr || instance == Py_None ? Py_NewRef(self) : PyMethod_New(self, instance);
}

PyObject* repr(PyObject* self) { return PyObject_Repr(as_inline(self).otherwise); }

// Pickled, and copied, by name, as functions are.
PyObject* reduce_for_pickle(PyObject* self, PyObject*) { return PyObject_GetAttrString(self, "__qualname__"); }

PyMethodDef methods[] = {{"__reduce__", reduce_for_pickle, METH_NOARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
PyMemberDef members[] = {{"__vectorcalloffset__", T_PYSSIZET, offsetof(InlineCall, call), READONLY, nullptr},
                         {"__dictoffset__", T_PYSSIZET, offsetof(InlineCall, dict), READONLY, nullptr},
                         {"__weaklistoffset__", T_PYSSIZET, offsetof(InlineCall, weakrefs), READONLY, nullptr},
                         {nullptr, 0, 0, 0, nullptr}};
PyGetSetDef attributes[] = {{"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, nullptr, nullptr},
                            {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyObject* make_type() {
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
  PyType_Spec spec = {"dcoll._C.InlineCall", sizeof(InlineCall), 0,
                      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL, slots};
  PyObject* type = PyType_FromSpec(&spec);
  if (type == nullptr) throw py::error_already_set();
  return type;
}

// A new reference to the object of a communicator; null of null.
PyObject* object_of(Communicator* core) { return core != nullptr ? py::cast(core).release().ptr() : nullptr; }

void set_job(Communicator* core) {
  const auto before = py::reinterpret_steal<py::object>(job);  // freed at the end, when the new one is in place
  job = object_of(core);
  job_communicator = core;
}

// Null: the set is no more.
void set_process_set(const py::object& process_set, Communicator* core) {
  const auto found = std::ranges::find(process_sets, process_set.ptr(), &Ranks::object);
  if (found != process_sets.end()) {
    const auto object = py::reinterpret_steal<py::object>(found->object);  // freed when the list is whole again
    const auto before = py::reinterpret_steal<py::object>(found->communicator);
    process_sets.erase(found);
  }
  if (core != nullptr) process_sets.push_back({Py_NewRef(process_set.ptr()), object_of(core), core});
}

}  // namespace

void bind_inline_calls(py::module_& m) {
  for (int i = 0; i < kNumParameters; ++i) {
    interned[i] = PyUnicode_InternFromString(kParameterNames[i]);
    if (interned[i] == nullptr) throw py::error_already_set();
  }
  m.add_object("InlineCall", py::reinterpret_steal<py::object>(make_type()));
  bind_all_reduce_plain(m);
  m.def("set_process_set", &set_process_set, py::arg("process_set"), py::arg("communicator").none(true));
  m.def("set_job", &set_job, py::arg("communicator").none(true));
}

}  // namespace dcoll::bind
