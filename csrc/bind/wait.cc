// Waiting for operations from Python.
#include <algorithm>

#include "base/clock.h"
#include "base/error.h"
#include "bind/bind.h"
#include "bind/on_device.h"

namespace py = pybind11;

namespace dcoll::bind {

void wait_interruptibly(Communicator& comm, Operation& operation, double timeout_s, Spin spin) {
  constexpr double kLookForSignalsSeconds = 0.1;
  const auto begin = Clock::now();
  operation.waiter.store(PyThread_get_thread_ident(), std::memory_order_relaxed);
  while (!operation.done.load(std::memory_order_acquire)) {
    const double left = timeout_s < 0 ? kLookForSignalsSeconds : timeout_s - seconds_between(begin, Clock::now());
    if (left <= 0) throw TimeoutError(comm.unfinished_text(operation, timeout_s));
    bool done;
    {
      const py::gil_scoped_release unlocked;
      done = comm.wait_for(operation, std::min(left, kLookForSignalsSeconds), spin);
    }
    if (!done && PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
  comm.wait_for(operation, 0);  // whoever ended it, and when: its name is free from now on
  if (operation.error) std::rethrow_exception(operation.error);
}

void wait_all(Communicator& comm, Operation& operation, double timeout_s, Spin spin) {
  try {
    wait_interruptibly(comm, operation, timeout_s, spin);
  } catch (...) {
    if (operation.done.load(std::memory_order_acquire)) wait_settled(operation);
    throw;
  }
  settle(comm, operation);
}

namespace {

// For ever, for what the core has begun with it may go on as long as the peers take: what the function of Python that
// called has as variables. Not its frame, which knows all its callers and may be cleared.
void keep_variables_of_caller() {
  auto* const caller = reinterpret_cast<PyObject*>(PyEval_GetFrame());
  if (caller == nullptr) return;
  try {
    py::reinterpret_borrow<py::object>(caller).attr("f_locals").attr("copy")().inc_ref();
  } catch (const py::error_already_set&) {
    Py_INCREF(caller);
  }
}

}  // namespace

void wait_keeping_memory(Communicator& comm, Operation& operation) {
  try {
    wait_all(comm, operation, -1);
  } catch (...) {
    if (!operation.released() || !settled(operation)) keep_variables_of_caller();
    throw;
  }
}

}  // namespace dcoll::bind
