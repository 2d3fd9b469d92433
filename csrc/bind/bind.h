// The parts of the compiled module; dcoll/_C.pyi is their documentation.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>

#include "engine/communicator/communicator.h"
#include "engine/core/memory.h"

namespace dcoll::bind {

// Sets the Python error that belongs to a C++ exception, for functions that pybind11 does not call.
void set_error(std::exception_ptr error);
// Whether the Python error that is set is one from before the other ranks heard of the call.
bool was_refused();

// The communicator in its Python object; null, with a Python error set, when the object is none.
Communicator* communicator_of(PyObject* object);

// Starts the call, to meet those of its name if it has one, otherwise in order. A new reference to the core's handle;
// null: a Python error is set.
PyObject* start_call(PyObject* communicator, const Call& call);

void bind_errors(pybind11::module_& m);
void bind_memory(pybind11::module_& m);
void bind_on_device(pybind11::module_& m);
void bind_communicator(pybind11::module_& m);
void bind_world(pybind11::module_& m);
void bind_reducer(pybind11::module_& m);
void bind_gradient_hook(pybind11::module_& m);
void bind_operand(pybind11::module_& m);
void bind_grouped(pybind11::module_& m);
void bind_grouped_rows(pybind11::module_& m);
void bind_inline_calls(pybind11::module_& m);

// For reports of stalls: where this process's program is.
void show_program_to(Communicator& comm);

// Above this the interpreter lock is given to other threads during a call; below, handing it over and getting it back
// may take longer than the call.
inline constexpr size_t kKeepLockBytes = 64 << 10;

// Whatever moves so many bytes, with or without the interpreter lock. `work` may use no Python.
template <typename Work>
decltype(auto) with_lock_as_pays(size_t bytes, Work&& work) {
  if (bytes <= kKeepLockBytes) return work();
  const pybind11::gil_scoped_release unlocked;
  return work();
}

// Waits without the interpreter lock, but looks for Ctrl-C now and then. timeout_s < 0: no limit.
void wait_interruptibly(Communicator& comm, Operation& operation, double timeout_s, Spin spin = Spin::kAllowed);

// Runs a group of engine/buckets on this thread, with or without the interpreter lock.
template <typename Group>
void run_group(Group& group, Communicator& comm) {
  if (group.bytes() <= kKeepLockBytes) {
    return group.run([&](Operation& operation) { wait_interruptibly(comm, operation, -1); });
  }
  const pybind11::gil_scoped_release unlocked;
  group.run([&](Operation& operation) {
    const pybind11::gil_scoped_acquire locked;
    wait_interruptibly(comm, operation, -1);
  });
}

}  // namespace dcoll::bind

// In files of their own beside the layers they show.
void bind_kernels(pybind11::module_& m);
void bind_cuda(pybind11::module_& m);
void bind_plan(pybind11::module_& m);
void bind_simulate(pybind11::module_& plan);
