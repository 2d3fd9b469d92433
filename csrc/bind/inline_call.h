// Inline calls: Python callables that do the plain collectives in C, or start them, and leave all other calls to the
// Python function they stand for.
//
// A plain call has a plain tensor (operand.h), arguments of the usual types, and a communicator. It takes no dict, no
// string and no allocation of ours from here to the core and back; that is what a call of 4 bytes consists of. (One
// that is only started makes its operation and two handles, the core's and Python's.) Any other call goes to the Python
// function with the very arguments it came with, before anything was sent: so errors, warnings and odd tensors are that
// function's business alone.
#pragma once

#include <pybind11/pybind11.h>

#include <initializer_list>
#include <memory>
#include <span>
#include <string_view>

#include "bind/bind.h"
#include "bind/operand.h"

namespace dcoll::bind {

struct InlineCall {
  PyObject_HEAD;
  vectorcallfunc call;
  PyObject* dict;  // what functools.update_wrapper copies
  PyObject* weakrefs;
  PyObject* otherwise;     // the Python function
  PyObject* communicator;  // null: the job's
  Communicator* core;
  PyObject* no_compression;      // null: any compression is the function's business
  PyObject* ops[kNumReduceOps];  // dcoll.ReduceOp by code
  PyObject* wrap_rows;           // makes a result of the core's memory
  PyObject* handle;              // the type of what an asynchronous call returns; null: a synchronous one
  Kind kind;
  bool in_place;
};
inline InlineCall& as_inline(PyObject* self) { return *reinterpret_cast<InlineCall*>(self); }

enum Parameter {
  kTensor,
  kAverage,
  kName,
  kCompression,
  kOp,
  kPrescale,
  kPostscale,
  kProcessSet,
  kRootRank,
  kSplits,
  kNumParameters
};

struct Arguments {
  PyObject* given[kNumParameters] = {};  // borrowed; null: not given

  // `order`: the function's parameters. False: too many, twice, or an unknown name.
  bool place(PyObject* const* args, Py_ssize_t positional, PyObject* names, std::span<const Parameter> order);
};
std::span<const Parameter> parameters_of(const InlineCall& self);

// A process set with a communicator. Nulls: the Python function knows.
struct Ranks {
  PyObject* object;  // the set's; null: the job, or the callable's own
  PyObject* communicator;
  Communicator* core;
};
Ranks find_ranks(const InlineCall& self, PyObject* process_set);

inline bool absent(PyObject* object) { return object == nullptr || object == Py_None; }
// False: not of the usual type. No Python error is set.
bool read_factor(PyObject* object, double& factor);
bool read_op(const InlineCall& self, PyObject* object, ReduceOp& op);
bool read_text(PyObject* object, std::string_view& text);
inline bool read_name(PyObject* object, std::string_view& name) { return absent(object) || read_text(object, name); }

// After the core's run_or_submit: waits for what it returned. False: a Python error is set; `memory` is what the core
// reads and writes.
bool finish_call(Communicator& core, const std::shared_ptr<Operation>& operation,
                 std::initializer_list<PyObject*> memory);

// With or without the interpreter lock, as the size suggests; then finish_call. `operation` gets what was returned.
inline bool run_call(Communicator& core, const Call& call, size_t bytes, std::initializer_list<PyObject*> memory,
                     std::shared_ptr<Operation>& operation) {
  try {
    operation = with_lock_as_pays(bytes, [&] { return core.run_or_submit(call); });
  } catch (...) {
    set_error(std::current_exception());
    return false;
  }
  return finish_call(core, operation, memory);
}

// Starts an asynchronous call. A new reference to its handle, which gives `result`; null: a Python error is set.
PyObject* start_inline(const InlineCall& self, const Ranks& ranks, const Call& call, PyObject* tensor,
                       PyObject* result);

// Hands a call to the Python function it stands for; note_if_refused() of its failures.
PyObject* hand_on(InlineCall& self, PyObject* const* args, size_t nargsf, PyObject* names);
// After a call that may have failed: where it did before the other ranks heard of it, the communicator keeps the reason
// for them. Not of one that would have met by its name, in no order.
PyObject* note_if_refused(const InlineCall& self, PyObject* result, const Ranks& ranks, PyObject* name);

// What is called (inline_collective.cc).
PyObject* call_collective(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* names);
void bind_all_reduce_plain(pybind11::module_& m);

}  // namespace dcoll::bind
