// The exception classes: base/error.h, rooted at dcoll.DcollError.
#include "base/error.h"
#include "bind/bind.h"

namespace py = pybind11;

namespace dcoll::bind {
namespace {

struct Classes {
  py::object root, argument, mismatch, joined, timeout, peer, transport;
};
// Immortal on purpose: errors may be raised while the interpreter shuts down.
Classes* classes;

py::object make_class(py::module_& m, const char* name, const char* doc, py::object bases) {
  const std::string qualified = std::string("dcoll.") + name;
  py::object made =
      py::reinterpret_steal<py::object>(PyErr_NewExceptionWithDoc(qualified.c_str(), doc, bases.ptr(), nullptr));
  if (!made) throw py::error_already_set();
  m.attr(name) = made;
  return made;
}

void translate(std::exception_ptr error) {
  try {
    std::rethrow_exception(error);
  } catch (const ArgumentError& e) {
    py::set_error(classes->argument, e.what());
  } catch (const JoinedError& e) {
    py::set_error(classes->joined, e.what());
  } catch (const MismatchError& e) {
    py::set_error(classes->mismatch, e.what());
  } catch (const TimeoutError& e) {
    py::set_error(classes->timeout, e.what());
  } catch (const PeerError& e) {
    py::set_error(classes->peer, e.what());
  } catch (const TransportError& e) {
    py::set_error(classes->transport, e.what());
  } catch (const Error& e) {
    py::set_error(classes->root, e.what());
  }
}

}  // namespace

bool was_refused() {
  if (PyErr_ExceptionMatches(classes->argument.ptr()) != 0) return true;
  return PyErr_ExceptionMatches(PyExc_Exception) != 0 && PyErr_ExceptionMatches(classes->root.ptr()) == 0;
}

void set_error(std::exception_ptr error) {
  try {
    translate(error);
  } catch (py::error_already_set& e) {
    e.restore();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what());
  }
}

void bind_errors(py::module_& m) {
  classes = new Classes;
  py::object runtime_error = py::reinterpret_borrow<py::object>(PyExc_RuntimeError);
  py::object value_error = py::reinterpret_borrow<py::object>(PyExc_ValueError);
  classes->root = make_class(m, "DcollError", "Everything dcoll raises by itself.", runtime_error);
  classes->argument = make_class(m, "ArgumentError", "An argument that can never work; nothing was sent.",
                                 py::make_tuple(classes->root, value_error));
  classes->mismatch =
      make_class(m, "MismatchError",
                 "The ranks called different collectives; raised on all of them, the job can go on.", classes->root);
  classes->joined = make_class(m, "JoinedError", "A collective that cannot go on without a rank that called join().",
                               classes->mismatch);
  classes->timeout = make_class(m, "TimeoutError", "A deadline passed; names the ranks waited for.", classes->root);
  classes->peer = make_class(m, "PeerError", "Another rank failed, died or left; carries its words.", classes->root);
  classes->transport = make_class(m, "TransportError", "MPI, a socket or shared memory failed.", classes->root);
  py::register_exception_translator(translate);
}

}  // namespace dcoll::bind
