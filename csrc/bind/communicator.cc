// Communicator and Handle.
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>

#include "base/error.h"
#include "bind/bind.h"

namespace py = pybind11;

namespace dcoll::bind {
namespace {

using CommPtr = std::shared_ptr<Communicator>;

const void* in_pointer(uintptr_t address) { return reinterpret_cast<const void*>(address); }
void* out_pointer(uintptr_t address) { return reinterpret_cast<void*>(address); }

DType dtype_from(int code) {
  if (code < 0 || code >= kNumDTypes) {
    throw ArgumentError("dtype code " + std::to_string(code) + " does not exist; allowed are 0 to " +
                        std::to_string(kNumDTypes - 1) + ".");
  }
  return static_cast<DType>(code);
}

ReduceOp op_from(int code) {
  if (code < 0 || code >= kNumReduceOps) {
    throw ArgumentError("reduce op code " + std::to_string(code) + " does not exist; allowed are 0 to " +
                        std::to_string(kNumReduceOps - 1) + ".");
  }
  return static_cast<ReduceOp>(code);
}

// A running collective. Dropped unfinished, it is waited for: the core still uses the caller's memory until then.
class Handle {
 public:
  Handle(CommPtr comm, std::shared_ptr<Operation> operation)
      : comm_(std::move(comm)), operation_(std::move(operation)) {}
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  ~Handle() {
    if (poll()) return;
    const py::gil_scoped_release unlocked;
    comm_->wait_for(*operation_, -1);
  }

  bool poll() const { return operation_->done.load(std::memory_order_acquire); }
  void wait(double timeout_s) { wait_interruptibly(*comm_, *operation_, timeout_s); }
  std::shared_ptr<Memory> output() const {
    check_finished();
    if (operation_->output == nullptr) {
      throw ArgumentError(operation_->request.describe() +
                          " has no output of its own: it wrote to the caller's memory.");
    }
    return operation_->output;
  }
  std::vector<int64_t> counts() const {
    check_finished();
    return operation_->counts;
  }

 private:
  void check_finished() const {
    if (!poll()) throw ArgumentError(operation_->request.describe() + " is not finished; call wait() first.");
  }
  CommPtr comm_;
  std::shared_ptr<Operation> operation_;
};

std::unique_ptr<Handle> start(const CommPtr& comm, Request request) {
  return std::make_unique<Handle>(comm, comm->submit(std::move(request)));
}

Request all_reduce_request(uintptr_t in, uintptr_t out, size_t count, int dtype, int op, std::string name,
                           double prescale, double postscale, std::string algo) {
  return {.kind = Kind::kAllReduce,
          .in = in_pointer(in),
          .out = out_pointer(out),
          .count = count,
          .dtype = dtype_from(dtype),
          .op = op_from(op),
          .prescale = prescale,
          .postscale = postscale,
          .algo = std::move(algo),
          .name = std::move(name),
          .splits = {}};
}

std::unique_ptr<Handle> all_reduce(const CommPtr& comm, uintptr_t in, uintptr_t out, size_t count, int dtype, int op,
                                   std::string name, double prescale, double postscale, std::string algo) {
  return start(comm,
               all_reduce_request(in, out, count, dtype, op, std::move(name), prescale, postscale, std::move(algo)));
}

void all_reduce_sync(const CommPtr& comm, uintptr_t in, uintptr_t out, size_t count, int dtype, int op,
                     std::string name, double prescale, double postscale, std::string algo) {
  const auto operation = comm->run_or_submit(
      all_reduce_request(in, out, count, dtype, op, std::move(name), prescale, postscale, std::move(algo)));
  if (operation != nullptr) wait_interruptibly(*comm, *operation, -1);
}

void bind_collectives(py::class_<Communicator, CommPtr>& comm) {
  using namespace py::literals;
  comm.def("allreduce", all_reduce, "in_ptr"_a, "out_ptr"_a, "count"_a, "dtype"_a, "op"_a, "name"_a = "",
           "prescale"_a = 1.0, "postscale"_a = 1.0, "algo"_a = "");
  comm.def("allreduce_sync", all_reduce_sync, "in_ptr"_a, "out_ptr"_a, "count"_a, "dtype"_a, "op"_a, "name"_a = "",
           "prescale"_a = 1.0, "postscale"_a = 1.0, "algo"_a = "");
  comm.def(
      "broadcast",
      [](const CommPtr& self, uintptr_t ptr, size_t nbytes, int root, int dtype, std::string name) {
        return start(self, {.kind = Kind::kBroadcast,
                            .in = in_pointer(ptr),
                            .out = out_pointer(ptr),
                            .count = nbytes,
                            .dtype = dtype_from(dtype),
                            .root = root,
                            .name = std::move(name)});
      },
      "ptr"_a, "nbytes"_a, "root"_a, "dtype"_a, "name"_a = "");
  comm.def(
      "allgather",
      [](const CommPtr& self, uintptr_t in, size_t rows, size_t row_bytes, int dtype, std::string name) {
        return start(self, {.kind = Kind::kAllGather,
                            .in = in_pointer(in),
                            .count = rows,
                            .row_elems = row_bytes,
                            .dtype = dtype_from(dtype),
                            .name = std::move(name)});
      },
      "in_ptr"_a, "rows"_a, "row_bytes"_a, "dtype"_a, "name"_a = "");
  comm.def(
      "reducescatter",
      [](const CommPtr& self, uintptr_t in, uintptr_t out, size_t rows, size_t row_elems, int dtype, int op,
         std::string name, double prescale, double postscale) {
        return start(self, {.kind = Kind::kReduceScatter,
                            .in = in_pointer(in),
                            .out = out_pointer(out),
                            .count = rows,
                            .row_elems = row_elems,
                            .dtype = dtype_from(dtype),
                            .op = op_from(op),
                            .prescale = prescale,
                            .postscale = postscale,
                            .name = std::move(name)});
      },
      "in_ptr"_a, "out_ptr"_a, "rows"_a, "row_elems"_a, "dtype"_a, "op"_a, "name"_a = "", "prescale"_a = 1.0,
      "postscale"_a = 1.0);
  comm.def(
      "alltoall",
      [](const CommPtr& self, uintptr_t in, const std::vector<size_t>& splits, size_t row_bytes, int dtype,
         std::string name) {
        size_t rows = 0;
        for (const size_t split : splits) rows += split;
        return start(self, {.kind = Kind::kAllToAll,
                            .in = in_pointer(in),
                            .count = rows,
                            .row_elems = row_bytes,
                            .dtype = dtype_from(dtype),
                            .name = std::move(name),
                            .splits = splits});
      },
      "in_ptr"_a, "splits"_a, "row_bytes"_a, "dtype"_a, "name"_a = "");
  comm.def(
      "barrier",
      [](const CommPtr& self, std::string name) {
        return start(self, {.kind = Kind::kBarrier, .name = std::move(name)});
      },
      "name"_a = "");
  comm.def("barrier_sync", [](const CommPtr& self) {
    const auto operation = self->submit({.kind = Kind::kBarrier}, Communicator::Start::kByWaiter);
    wait_interruptibly(*self, *operation, -1);
  });
}

}  // namespace

Communicator* communicator_of(PyObject* object) {
  try {
    return py::cast<Communicator*>(py::handle(object));
  } catch (const py::cast_error&) {
    PyErr_Format(PyExc_TypeError, "expected a dcoll._C.Communicator, got %R", object);
    return nullptr;
  }
}

void wait_interruptibly(Communicator& comm, Operation& operation, double timeout_s) {
  constexpr double kLookForSignalsSeconds = 0.1;
  const auto begin = Clock::now();
  while (!operation.done.load(std::memory_order_acquire)) {
    const double left = timeout_s < 0 ? kLookForSignalsSeconds : timeout_s - seconds_between(begin, Clock::now());
    if (left <= 0) {
      throw TimeoutError(operation.request.describe() + " is not finished after " + std::to_string(timeout_s) +
                         " s. It goes on: wait again, or raise the timeout.");
    }
    bool done;
    {
      const py::gil_scoped_release unlocked;
      done = comm.wait_for(operation, std::min(left, kLookForSignalsSeconds));
    }
    if (!done && PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
  if (operation.error) std::rethrow_exception(operation.error);
}

void bind_communicator(py::module_& m) {
  py::class_<Handle>(m, "Handle", py::is_final())
      .def("poll", &Handle::poll)
      .def("wait", &Handle::wait, py::arg("timeout") = -1.0)
      .def("output", &Handle::output)
      .def("counts", &Handle::counts);

  py::class_<Communicator, CommPtr> comm(m, "Communicator", py::is_final());
  comm.def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("size", &Communicator::size)
      .def_property_readonly("local_rank", &Communicator::local_rank)
      .def_property_readonly("local_size", &Communicator::local_size)
      .def_property_readonly("node", &Communicator::node)
      .def_property_readonly("num_nodes", &Communicator::num_nodes)
      .def_property_readonly("nodes", &Communicator::nodes)
      .def_property_readonly("transports", &Communicator::transports)
      .def("alloc", &Communicator::alloc, py::arg("nbytes"))
      .def("fail", &Communicator::fail, py::arg("text"), py::call_guard<py::gil_scoped_release>())
      .def("failure", &Communicator::failure)
      .def("close", &Communicator::close, py::call_guard<py::gil_scoped_release>());
  bind_collectives(comm);
}

}  // namespace dcoll::bind
