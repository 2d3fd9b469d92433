// The stack of a Python thread, asked for by a thread that is not Python's and must not wait for the interpreter lock
// for long: a C call of the program may hold that for minutes, or for ever. So a third thread waits for the lock, for
// as long as it takes; the asker goes on without it.
#include <string>
#include <system_error>
#include <thread>

#include "base/clock.h"
#include "base/thread_safety.h"
#include "bind/bind.h"

namespace py = pybind11;

namespace dcoll::bind {
namespace {

PyObject* stack_function;  // dcoll.job.stall.stack. Immortal: threads may use it to the end

struct Waiting {
  Mutex mutex;
  Condition changed;
  bool under_way DCOLL_GUARDED_BY(mutex) = false;  // a thread waits for Python's lock: one is enough
  uint64_t done DCOLL_GUARDED_BY(mutex) = 0;
  uint64_t asked DCOLL_GUARDED_BY(mutex) = 0;
  std::string lines DCOLL_GUARDED_BY(mutex);
};
Waiting* waiting;  // immortal, as its threads may outlive the module

std::string stack_of(uint64_t thread) {
  PyObject* lines = PyObject_CallFunction(stack_function, "K", static_cast<unsigned long long>(thread));
  const char* text = lines != nullptr ? PyUnicode_AsUTF8(lines) : nullptr;
  std::string found = text != nullptr ? text : "";
  Py_XDECREF(lines);
  PyErr_Clear();
  return found;
}

void get_stack(uint64_t thread) {
  const PyGILState_STATE state = PyGILState_Ensure();
  std::string lines = stack_of(thread);
  PyGILState_Release(state);
  const MutexLock lock(waiting->mutex);
  waiting->under_way = false;
  ++waiting->done;
  waiting->lines = std::move(lines);
  waiting->changed.notify_all();
}

std::string stack_within(uint64_t thread, std::chrono::milliseconds limit) {
  const auto end = Clock::now() + limit;
  const MutexLock lock(waiting->mutex);
  if (waiting->under_way || Py_IsInitialized() == 0) return "";
  waiting->under_way = true;
  const uint64_t own = ++waiting->asked;
  try {
    std::thread(get_stack, thread).detach();
  } catch (const std::system_error&) {  // no thread is to be had
    waiting->under_way = false;
    return "";
  }
  while (waiting->done < own && waiting->changed.wait_until(waiting->mutex, end)) {
  }
  return waiting->done >= own ? waiting->lines : "";
}

}  // namespace

void show_program_to(Communicator& comm) {
  if (comm.members().diagnosis == nullptr) return;
  if (stack_function == nullptr) {
    stack_function = py::object(py::module_::import("dcoll.job.stall").attr("stack")).release().ptr();
    waiting = new Waiting;
  }
  comm.members().diagnosis->set_program(stack_within);
}

}  // namespace dcoll::bind
