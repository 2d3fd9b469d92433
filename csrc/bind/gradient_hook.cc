// GradientHook: what autograd calls when the gradient of a parameter is complete, for every parameter in every
// backward. In C, because a model may have a thousand small parameters, and a Python function that does the same takes
// several microseconds each.
//
// It does the usual things: a gradient that autograd has just made is copied into its bucket, the parameter's .grad
// becomes the view of it, and the Reducer is told. Everything else goes to the methods begin_backward() and
// bring_in(index) of the object that owns the hooks (dcoll.optimizer.gradients.GradientSync).
//
// Hooks of small parameters are not registered but called when backward has ended, all by take_gradients(): autograd
// takes longer to call a hook of Python, even one that does nothing, than all of this takes.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <structmember.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "base/hash.h"
#include "bind/bind.h"
#include "bind/operand.h"
#include "engine/buckets/bucket.h"

namespace py = pybind11;

namespace dcoll::bind {
namespace {

// What the hooks of one owner share; the owner sets it.
struct HookState {
  std::shared_ptr<Reducer> reducer;  // null: bring_in() is always called
  long long task = -2;               // the backward that runs, by autograd's number; -2 is none
  bool idle = false;                 // gradients stay where they are: more backward passes follow
  bool sums_again = false;           // reducing a sum once more would be wrong
};

struct GradientHook {
  PyObject_HEAD;
  vectorcallfunc call;
  PyObject* owner;
  PyObject* views;       // list, by index
  PyObject* graph_task;  // tells the number of the backward that runs on this thread
  std::shared_ptr<HookState>* state;
  size_t index;
  bool row_major;  // the view is
};

GradientHook* cast(PyObject* self) { return reinterpret_cast<GradientHook*>(self); }

PyObject* kGrad = nullptr;
PyObject* kBegin = nullptr;
PyObject* kBringIn = nullptr;
PyObject* kVersion = nullptr;
PyObject* kDataPtr = nullptr;
PyObject* kHookType = nullptr;

// False: a Python error is set.
bool is_running(const GradientHook& self, bool& running) {
  PyObject* number = PyObject_CallNoArgs(self.graph_task);
  if (number == nullptr) return false;
  running = PyLong_AsLongLong(number) == (*self.state)->task;
  Py_DECREF(number);
  return PyErr_Occurred() == nullptr;
}

// Whether the gradient can be taken as it lies in memory: of the parameter's dtype and number of elements, row-major as
// the view is. That it has the same shape is torch's to find, when it becomes .grad.
bool is_usual(const GradientHook& self, PyObject* gradient, const Reducer& reducer, Operand& operand) {
  if (!self.row_major || !read_operand(gradient, Access::kRead, operand)) return false;
  const ParamInfo& info = reducer.param(self.index);
  return operand.dtype == info.dtype && operand.count == info.count;
}

PyObject* bring_in(const GradientHook& self) {
  PyObject* index = PyLong_FromSize_t(self.index);
  if (index == nullptr) return nullptr;
  PyObject* result = PyObject_CallMethodOneArg(self.owner, kBringIn, index);
  Py_DECREF(index);
  return result;
}

PyObject* take(const GradientHook& self, PyObject* param, const py::object& gradient) {
  HookState& state = **self.state;
  if (state.reducer == nullptr) return bring_in(self);
  // Borrowed; a reference of our own, because setting .grad may run anything.
  const auto view = py::reinterpret_borrow<py::object>(PyList_GetItem(self.views, static_cast<Py_ssize_t>(self.index)));
  if (!view) return nullptr;
  const void* from = nullptr;
  if (gradient.ptr() == view.ptr()) {
    if (state.sums_again) return bring_in(self);
  } else {
    Operand operand;
    if (!is_usual(self, gradient.ptr(), *state.reducer, operand)) return bring_in(self);
    if (PyObject_SetAttr(param, kGrad, view.ptr()) != 0) {
      PyErr_Clear();  // bring_in() says what is wrong with it
      return bring_in(self);
    }
    from = operand.data;
  }
  try {
    if (state.reducer->mark_ready(self.index, from)) Py_RETURN_NONE;
  } catch (...) {
    set_error(std::current_exception());
    return nullptr;
  }
  return bring_in(self);  // ready twice: it raises
}

PyObject* vectorcall(PyObject* object, PyObject* const* args, size_t nargsf, PyObject*) {
  const GradientHook& self = *cast(object);
  if (PyVectorcall_NARGS(nargsf) != 1) {
    PyErr_SetString(PyExc_TypeError, "a GradientHook takes the parameter");
    return nullptr;
  }
  bool running = false;
  if (!is_running(self, running)) return nullptr;
  if (!running) {
    PyObject* none = PyObject_CallMethodNoArgs(self.owner, kBegin);
    if (none == nullptr) return nullptr;
    Py_DECREF(none);
  }
  if ((*self.state)->idle) Py_RETURN_NONE;
  const auto gradient = py::reinterpret_steal<py::object>(PyObject_GetAttr(args[0], kGrad));
  return gradient ? take(self, args[0], gradient) : nullptr;
}

// As if autograd had called the hooks of those of the parameters that have a gradient.
void take_gradients(const py::list& hooks, const py::list& params) {
  PyObject* const type = kHookType;
  for (size_t i = 0; i < hooks.size() && i < params.size(); ++i) {
    const py::object hook = hooks[i], param = params[i];
    if (reinterpret_cast<PyObject*>(Py_TYPE(hook.ptr())) != type) throw py::type_error("expected GradientHooks");
    const py::object gradient = py::getattr(param, kGrad);
    if (gradient.is_none()) continue;
    const auto none = py::reinterpret_steal<py::object>(take(*cast(hook.ptr()), param.ptr(), gradient));
    if (!none) throw py::error_already_set();
  }
}

// A number that differs when a gradient came, went or was written to by torch in between. 0: there is none.
uint64_t gradient_marks(const py::list& params) {
  Fingerprint marks;
  bool any = false;
  for (size_t i = 0; i < params.size(); ++i) {
    const py::object gradient = py::getattr(PyList_GET_ITEM(params.ptr(), static_cast<Py_ssize_t>(i)), kGrad);
    if (gradient.is_none()) continue;
    const size_t writes = PyLong_AsSize_t(py::getattr(gradient, kVersion).ptr());
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    marks.add(i).add(reinterpret_cast<uintptr_t>(gradient.ptr())).add(writes);
    any = true;
  }
  return any ? marks.value() | 1 : 0;
}

// What `function(object)` counts; -1: a Python error is set.
long count_by(const py::object& function, PyObject* object) {
  PyObject* number = PyObject_CallOneArg(function.ptr(), object);
  if (number == nullptr) return -1;
  const long count = PyLong_AsLong(number);
  Py_DECREF(number);
  return count;
}

// Whether a tensor does not lie where it did: somebody has set its .data.
bool has_left(PyObject* view, PyObject* address) {
  Operand operand;
  if (read_operand(view, Access::kRead, operand)) return operand.data != PyLong_AsVoidPtr(address);
  return !py::getattr(view, kDataPtr)().equal(py::handle(address));
}

// The gradients that somebody else has, of those that are no parameter's .grad now: the tensor, here or in C++ (which
// saved it for a backward, say), or another one of the same storage; and those that have left their place. No call that
// can be left out is made: this is asked for every parameter in every step.
std::vector<size_t> kept_gradients(const py::list& views, const py::list& params, const py::list& addresses,
                                   const py::list& storages, const py::list& usual, const py::object& tensor_uses,
                                   const py::object& storage_uses) {
  std::vector<size_t> kept;
  for (size_t i = 0; i < views.size() && i < params.size() && i < addresses.size(); ++i) {
    const auto at = static_cast<Py_ssize_t>(i);
    PyObject* const view = PyList_GET_ITEM(views.ptr(), at);  // the list has the only reference
    if (has_left(view, PyList_GET_ITEM(addresses.ptr(), at))) {
      kept.push_back(i);  // its storage may be gone
      continue;
    }
    bool only_ours = Py_REFCNT(view) == 1;
    if (only_ours && !tensor_uses.is_none()) only_ours = count_by(tensor_uses, view) == 1;
    if (only_ours && !storage_uses.is_none() && i < storages.size() && i < usual.size()) {
      only_ours = count_by(storage_uses, PyList_GET_ITEM(storages.ptr(), at)) <=
                  PyLong_AsLong(PyList_GET_ITEM(usual.ptr(), at));
    }
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    if (only_ours) continue;
    if (py::getattr(PyList_GET_ITEM(params.ptr(), at), kGrad).ptr() != view) kept.push_back(i);
  }
  return kept;
}

// --- the type --------------------------------------------------------------------------------------------------------

int traverse_hook(PyObject* object, visitproc visit, void* arg) {
  GradientHook& self = *cast(object);
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(self.owner);
  Py_VISIT(self.views);
  Py_VISIT(self.graph_task);
  return 0;
}

int clear_hook(PyObject* object) {
  GradientHook& self = *cast(object);
  Py_CLEAR(self.owner);
  Py_CLEAR(self.views);
  Py_CLEAR(self.graph_task);
  return 0;
}

void free_hook(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  clear_hook(object);
  delete cast(object)->state;
  type->tp_free(object);
  Py_DECREF(type);
}

PyObject* make_hook(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"owner", "views", "graph_task", "state", "index", "row_major", nullptr};
  PyObject *owner, *views, *graph_task, *state;
  Py_ssize_t index = 0;
  int row_major = 0;
  if (PyArg_ParseTupleAndKeywords(args, kwargs, "OO!OOnp:GradientHook", const_cast<char**>(names), &owner, &PyList_Type,
                                  &views, &graph_task, &state, &index, &row_major) == 0) {
    return nullptr;
  }
  std::shared_ptr<HookState> shared;
  try {
    shared = py::cast<std::shared_ptr<HookState>>(py::handle(state));
  } catch (const py::cast_error&) {
    PyErr_Format(PyExc_TypeError, "expected a dcoll._C.HookState, got %R", state);
    return nullptr;
  }
  PyObject* object = type->tp_alloc(type, 0);
  if (object == nullptr) return nullptr;
  GradientHook& self = *cast(object);
  self.call = vectorcall;
  self.owner = Py_NewRef(owner);
  self.views = Py_NewRef(views);
  self.graph_task = Py_NewRef(graph_task);
  self.state = new std::shared_ptr<HookState>(std::move(shared));
  self.index = static_cast<size_t>(index);
  self.row_major = row_major != 0;
  return object;
}

PyMemberDef hook_members[] = {{"__vectorcalloffset__", T_PYSSIZET, offsetof(GradientHook, call), READONLY, nullptr},
                              {nullptr, 0, 0, 0, nullptr}};
PyType_Slot hook_slots[] = {{Py_tp_new, reinterpret_cast<void*>(make_hook)},
                            {Py_tp_dealloc, reinterpret_cast<void*>(free_hook)},
                            {Py_tp_traverse, reinterpret_cast<void*>(traverse_hook)},
                            {Py_tp_clear, reinterpret_cast<void*>(clear_hook)},
                            {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                            {Py_tp_members, hook_members},
                            {0, nullptr}};
PyType_Spec hook_spec = {"dcoll._C.GradientHook", sizeof(GradientHook), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL, hook_slots};

}  // namespace

void bind_gradient_hook(py::module_& m) {
  kGrad = PyUnicode_InternFromString("grad");
  kBegin = PyUnicode_InternFromString("begin_backward");
  kBringIn = PyUnicode_InternFromString("bring_in");
  kVersion = PyUnicode_InternFromString("_version");
  kDataPtr = PyUnicode_InternFromString("data_ptr");
  if (kGrad == nullptr || kVersion == nullptr || kDataPtr == nullptr || kBegin == nullptr || kBringIn == nullptr)
    throw py::error_already_set();
  py::class_<HookState, std::shared_ptr<HookState>>(m, "HookState", py::is_final())
      .def(py::init<>())
      .def_readwrite("reducer", &HookState::reducer)
      .def_readwrite("task", &HookState::task)
      .def_readwrite("idle", &HookState::idle)
      .def_readwrite("sums_again", &HookState::sums_again);
  PyObject* type = PyType_FromSpec(&hook_spec);
  if (type == nullptr) throw py::error_already_set();
  kHookType = type;
  m.add_object("GradientHook", py::reinterpret_borrow<py::object>(type));  // and one reference for good
  m.def("take_gradients", &take_gradients, py::arg("hooks"), py::arg("params"));
  m.def("gradient_marks", &gradient_marks, py::arg("params"));
  m.def("kept_gradients", &kept_gradients, py::arg("views"), py::arg("params"), py::arg("addresses"),
        py::arg("storages"), py::arg("usual"), py::arg("tensor_uses"), py::arg("storage_uses"));
}

}  // namespace dcoll::bind
