// Waiting for operations from Python.
#include <algorithm>
#include <iterator>
#include <memory>
#include <vector>

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
  if (operation.done.load(std::memory_order_acquire)) comm.wait_for(operation, 0);  // its name is free from now on
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

// A frame of Python whose tensors the core works on, though the call that had them work has thrown.
struct Kept {
  bool released() const { return comm->in_forked_child() || (operation->released() && settled(*operation)); }

  std::shared_ptr<Communicator> comm;
  std::shared_ptr<Operation> operation;
  py::object frame;
};

void keep_caller(const std::shared_ptr<Communicator>& comm, const std::shared_ptr<Operation>& operation) {
  static auto& kept = *new std::vector<Kept>;  // never destroyed: some must outlive the interpreter
  const auto ended = std::partition(kept.begin(), kept.end(), [](const Kept& one) { return !one.released(); });
  const std::vector<Kept> let_go(std::make_move_iterator(ended), std::make_move_iterator(kept.end()));
  kept.erase(ended, kept.end());
  // What it has as local variables lives as long as it does, as under a traceback.
  auto* const caller = reinterpret_cast<PyObject*>(PyEval_GetFrame());
  if (caller != nullptr) kept.push_back({comm, operation, py::reinterpret_borrow<py::object>(caller)});
}

}  // namespace

void wait_keeping_caller(const std::shared_ptr<Communicator>& comm, const std::shared_ptr<Operation>& operation) {
  try {
    wait_all(*comm, *operation, -1);
  } catch (...) {
    if (!operation->released()) keep_caller(comm, operation);
    throw;
  }
}

}  // namespace dcoll::bind
