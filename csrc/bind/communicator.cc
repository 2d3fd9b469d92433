// Communicator and Handle.
#include <pybind11/stl.h>

#include <algorithm>
#include <numeric>
#include <tuple>

#include "base/error.h"
#include "bind/arguments.h"
#include "bind/bind.h"
#include "bind/constants.h"
#include "bind/inline_call.h"
#include "bind/on_device.h"
#include "engine/watch/timeline.h"

namespace py = pybind11;

namespace dcoll::bind {
namespace {

std::string describe_path(Communicator& comm, const std::string& collective, size_t bytes, int dtype, int op,
                          const std::string& memory) {
  Call call{.kind = static_cast<Kind>(plan::parse_collective(collective)), .dtype = to_dtype(dtype), .op = to_op(op)};
  call.count = reduces(call.kind) ? bytes / dtype_bytes(call.dtype) : bytes;
  if (memory == "device") call.device = 0;  // any
  return comm.describe_path(call, memory == "mapped");
}

// A running collective. Dropped unfinished, it is waited for: the core still uses the caller's memory until then.
class Handle {
 public:
  Handle(CommPtr comm, std::shared_ptr<Operation> operation)
      : comm_(std::move(comm)), operation_(std::move(operation)) {}
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  ~Handle() {
    if (comm_->in_forked_child()) return;
    if (!operation_->done.load(std::memory_order_acquire)) {
      const py::gil_scoped_release unlocked;
      comm_->wait_for(*operation_, -1);
    }
    if (!waited_) wait_settled(*operation_);
  }

  bool poll() const { return comm_->poll(*operation_) && (comm_->in_forked_child() || settled(*operation_)); }
  bool released() const { return comm_->in_forked_child() || (operation_->released() && settled(*operation_)); }
  void wait(double timeout_s, bool spins) {
    wait_all(*comm_, *operation_, timeout_s, spins ? Spin::kAllowed : Spin::kBriefly);
    waited_ = true;
  }
  std::shared_ptr<Memory> output() const {
    check_finished();
    return operation_->output;
  }
  std::vector<int64_t> counts() const {
    check_finished();
    return operation_->counts;
  }
  int source() const {
    check_finished();
    return operation_->source;
  }

 private:
  void check_finished() const {
    // What it tells is there, though a device may still copy its result.
    if (!comm_->poll(*operation_))
      throw ArgumentError(operation_->request.describe() + " is not finished; call wait() first.");
  }
  CommPtr comm_;
  std::shared_ptr<Operation> operation_;
  bool waited_ = false;
};

OnDevice on_device(const CommPtr& comm) { return {comm}; }
const OnDevice& on_device(const OnDevice& self) { return self; }

std::unique_ptr<Handle> start(const OnDevice& self, Request request) {
  return std::make_unique<Handle>(self.comm, submit(self, std::move(request)));
}

// By hand: pybind11's conversion of a sequence costs a small operation a tenth of its time.
std::vector<int64_t> dims_of(const py::tuple& given) {
  std::vector<int64_t> dims(given.size());
  for (size_t i = 0; i < dims.size(); ++i) {
    dims[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(given.ptr(), static_cast<Py_ssize_t>(i)));
  }
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  return dims;
}

// What all collectives have.
Request request_of(Kind kind, uintptr_t in, uintptr_t out, size_t count, int dtype, std::string name,
                   const py::tuple& dims) {
  return {.kind = kind,
          .in = to_pointer(in),
          .out = to_pointer(out),
          .count = count,
          .dtype = to_dtype(dtype),
          .name = std::move(name),
          .dims = dims_of(dims)};
}

void set_reduction(Request& request, ReduceOp op, double prescale, double postscale) {
  request.op = op;
  request.prescale = prescale;
  request.postscale = postscale;
}

Request all_reduce_request(uintptr_t in, uintptr_t out, size_t count, int dtype, int op, std::string name,
                           double prescale, double postscale, std::string algo, const py::tuple& dims,
                           const std::string& codec, std::string group) {
  Request request = request_of(Kind::kAllReduce, in, out, count, dtype, std::move(name), dims);
  set_reduction(request, to_op(op), prescale, postscale);
  request.algo = std::move(algo);
  if (!codec.empty()) request.encoding = kernels::encoding_named(codec);
  request.group = std::move(group);
  return request;
}

// Several tensors one behind the other, each with factors of its own.
Request adasum_request(uintptr_t in, uintptr_t out, std::vector<size_t> elements, int dtype, std::string name,
                       double prescale, double postscale) {
  const size_t count = std::reduce(elements.begin(), elements.end());
  Request request = request_of(Kind::kAllReduce, in, out, count, dtype, std::move(name), py::tuple());
  set_reduction(request, ReduceOp::kAdasum, prescale, postscale);
  request.splits = std::move(elements);
  return request;
}

Request broadcast_request(uintptr_t address, size_t nbytes, int root, int dtype, std::string name,
                          const py::tuple& dims) {
  Request request = request_of(Kind::kBroadcast, address, address, nbytes, dtype, std::move(name), dims);
  request.root = root;
  return request;
}

Request all_gather_request(uintptr_t in, size_t rows, size_t row_bytes, int dtype, std::string name, uintptr_t out,
                           size_t out_bytes, const py::tuple& row_dims, std::string group) {
  Request request = request_of(Kind::kAllGather, in, out, rows, dtype, std::move(name), row_dims);
  request.row_elems = row_bytes;
  request.out_bytes = out_bytes;
  request.group = std::move(group);
  return request;
}

Request reduce_scatter_request(uintptr_t in, uintptr_t out, size_t rows, size_t row_elems, int dtype, int op,
                               std::string name, double prescale, double postscale, const py::tuple& row_dims) {
  Request request = request_of(Kind::kReduceScatter, in, out, rows, dtype, std::move(name), row_dims);
  set_reduction(request, to_op(op), prescale, postscale);
  request.row_elems = row_elems;
  return request;
}

Request all_to_all_request(uintptr_t in, std::vector<size_t> splits, size_t row_bytes, int dtype, std::string name,
                           uintptr_t out, size_t out_bytes, const py::tuple& row_dims) {
  const size_t rows = std::reduce(splits.begin(), splits.end());
  Request request = request_of(Kind::kAllToAll, in, out, rows, dtype, std::move(name), row_dims);
  request.row_elems = row_bytes;
  request.splits = std::move(splits);
  request.out_bytes = out_bytes;
  return request;
}

Request barrier_request(std::string name) { return {.kind = Kind::kBarrier, .name = std::move(name)}; }

// Each collective twice: `name` returns a handle, `name`_sync runs on the calling thread and returns the result.
template <typename Self, typename... Args>
auto starts(Request (*make)(Args...)) {
  return [make](const Self& self, Args... args) { return start(on_device(self), make(std::move(args)...)); };
}

std::shared_ptr<Operation> run(const CommPtr& comm, Request request) {
  const size_t bytes = std::max(request.call().bytes(), request.out_bytes);
  // Peers that are there already are copied from on the spot.
  const auto operation = with_lock_as_pays(bytes, [&] { return comm->run_or_submit(std::move(request)); });
  if (operation != nullptr) wait_keeping_memory(*comm, *operation);
  return operation;
}

std::shared_ptr<Operation> run(const OnDevice& self, Request request) {
  auto operation = submit(self, std::move(request));
  wait_keeping_memory(*self.comm, *operation);
  return operation;
}

template <typename Self, typename... Args>
auto runs(Request (*make)(Args...)) {
  return [make](const Self& self, Args... args) { run(self, make(std::move(args)...)); };
}

template <typename Self, typename... Args>
auto runs_ragged(Request (*make)(Args...)) {
  return [make](const Self& self, Args... args) {
    const auto operation = run(self, make(std::move(args)...));
    return py::make_tuple(operation->output, operation->counts);
  };
}

// ---- Messages between two ranks ----

uint64_t user_key(int32_t tag) { return point_key(PointSpace::kUser, tag); }

Request send_request(uintptr_t address, size_t nbytes, int peer, int32_t tag) {
  return message(Kind::kSend, to_pointer(address), nbytes, peer, user_key(tag));
}

Request receive_request(uintptr_t address, size_t nbytes, int peer, int32_t tag) {
  return message(Kind::kReceive, to_pointer(address), nbytes, peer, user_key(tag));
}

void bind_points(py::class_<Communicator, CommPtr>& comm, py::class_<OnDevice>& device) {
  using namespace py::literals;
  const auto define = [](auto& on, const char* name, auto function) {
    on.def(name, function, "address"_a, "nbytes"_a, "peer"_a, "tag"_a = 0);
  };
  define(comm, "isend", starts<CommPtr>(send_request));
  define(comm, "irecv", starts<CommPtr>(receive_request));
  define(device, "isend", starts<OnDevice>(send_request));
  define(device, "irecv", starts<OnDevice>(receive_request));
}

// The last rank to join.
int64_t join(const CommPtr& comm, const std::string& note) {
  const auto unlocked = [](auto&& work) {
    const py::gil_scoped_release release;
    return work();
  };
  for (const auto& operation : unlocked([&] { return comm->named_in_flight(); })) {
    try {
      wait_interruptibly(*comm, *operation, -1);
    } catch (const Error&) {  // its handle says so to whoever waits for it
    }
  }
  const auto operation = unlocked([&] { return comm->submit_join(note); });
  wait_interruptibly(*comm, *operation, -1);
  return operation->counts.front();
}

void bind_collectives(py::class_<Communicator, CommPtr>& comm, py::class_<OnDevice>& device) {
  using namespace py::literals;
  const py::tuple none;
  const auto all_reduce_args =
      std::make_tuple("in_ptr"_a, "out_ptr"_a, "count"_a, "dtype"_a, "op"_a, "name"_a = "", "prescale"_a = 1.0,
                      "postscale"_a = 1.0, "algo"_a = "", "dims"_a = none, "codec"_a = "", "group"_a = "");
  const auto broadcast_args = std::make_tuple("ptr"_a, "nbytes"_a, "root"_a, "dtype"_a, "name"_a = "", "dims"_a = none);
  const auto all_gather_args = std::make_tuple("in_ptr"_a, "rows"_a, "row_bytes"_a, "dtype"_a, "name"_a = "",
                                               "out_ptr"_a = 0, "out_bytes"_a = 0, "row_dims"_a = none, "group"_a = "");
  const auto reduce_scatter_args =
      std::make_tuple("in_ptr"_a, "out_ptr"_a, "rows"_a, "row_elems"_a, "dtype"_a, "op"_a, "name"_a = "",
                      "prescale"_a = 1.0, "postscale"_a = 1.0, "row_dims"_a = none);
  const auto all_to_all_args = std::make_tuple("in_ptr"_a, "splits"_a, "row_bytes"_a, "dtype"_a, "name"_a = "",
                                               "out_ptr"_a = 0, "out_bytes"_a = 0, "row_dims"_a = none);
  const auto define = [](auto& on, const char* name, auto function, const auto& args) {
    std::apply([&](const auto&... each) { on.def(name, function, each...); }, args);
  };
  const auto define_start = [&](const char* name, auto make, const auto& args) {
    define(comm, name, starts<CommPtr>(make), args);
    define(device, name, starts<OnDevice>(make), args);
  };
  const auto define_run = [&](const char* name, auto make, const auto& args) {
    define(comm, name, runs<CommPtr>(make), args);
    define(device, name, runs<OnDevice>(make), args);
  };
  const auto define_ragged = [&](const char* name, auto make, const auto& args) {
    define(comm, name, runs_ragged<CommPtr>(make), args);
    define(device, name, runs_ragged<OnDevice>(make), args);
  };
  define_start("allreduce", all_reduce_request, all_reduce_args);
  define_run("allreduce_sync", all_reduce_request, all_reduce_args);
  define_start("adasum", adasum_request,
               std::make_tuple("in_ptr"_a, "out_ptr"_a, "elements"_a, "dtype"_a, "name"_a = "", "prescale"_a = 1.0,
                               "postscale"_a = 1.0));
  define_start("broadcast", broadcast_request, broadcast_args);
  define_run("broadcast_sync", broadcast_request, broadcast_args);
  define_start("allgather", all_gather_request, all_gather_args);
  define_ragged("allgather_sync", all_gather_request, all_gather_args);
  define_start("reducescatter", reduce_scatter_request, reduce_scatter_args);
  define_run("reducescatter_sync", reduce_scatter_request, reduce_scatter_args);
  define_start("alltoall", all_to_all_request, all_to_all_args);
  define_ragged("alltoall_sync", all_to_all_request, all_to_all_args);
  define_start("barrier", barrier_request, std::make_tuple("name"_a = ""));
  define_run("barrier_sync", barrier_request, std::make_tuple("name"_a = ""));
}

std::shared_ptr<Memory> alloc(Communicator& comm, size_t bytes) {
  return with_lock_as_pays(bytes, [&] { return comm.alloc(bytes); });  // it is zeroed
}

// Whoever drives holds the lock that this needs for as long as a step takes.
Communicator::Constants constants_of(Communicator& comm) {
  const py::gil_scoped_release unlocked;
  return comm.constants();
}

py::dict encoded_costs(const Communicator& comm) {
  comm.check_process();
  using namespace py::literals;
  constexpr double kSecond = 1e9;
  py::dict all;
  for (const auto& [name, named] : comm.as_made().encoded_costs.all()) {
    const EncodedCost& cost = named.cost;
    const auto coding = static_cast<double>(cost.encode_ns + cost.decode_ns);
    all[py::str(name)] =
        py::dict("codec"_a = kernels::encoding_name(named.encoding), "calls"_a = cost.calls,
                 "elements"_a = cost.elements, "plain_bytes"_a = cost.plain_bytes, "wire_bytes"_a = cost.wire_bytes,
                 "saturated"_a = cost.saturated, "encode_seconds"_a = static_cast<double>(cost.encode_ns) / kSecond,
                 "decode_seconds"_a = static_cast<double>(cost.decode_ns) / kSecond,
                 "wire_seconds"_a = (static_cast<double>(cost.total_ns) - coding) / kSecond);
  }
  return all;
}

// The timeline of the process: engine/watch/timeline.h.
void bind_timeline(py::module_& m) {
  using namespace py::literals;
  m.def(
      "start_timeline",
      [](const Communicator& comm, const std::string& path, bool mark_cycles) {
        comm.check_process();
        comm.timeline().start(path, mark_cycles);
      },
      "comm"_a, "path"_a, "mark_cycles"_a = false, py::call_guard<py::gil_scoped_release>());
  m.def(
      "stop_timeline", [](const Communicator& comm) { comm.timeline().stop(); }, "comm"_a,
      py::call_guard<py::gil_scoped_release>());
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

PyObject* start_call(PyObject* communicator, const Call& call) {
  try {
    const auto comm = py::cast<CommPtr>(py::handle(communicator));
    Request request = Request::of(call, comm->size());
    auto operation = call.name.empty() ? comm->submit(std::move(request), Communicator::Start::kSoon)
                                       : comm->submit_by_name(std::move(request));
    return py::cast(std::make_unique<Handle>(comm, std::move(operation))).release().ptr();
  } catch (...) {
    set_error(std::current_exception());
    return nullptr;
  }
}

void bind_communicator(py::module_& m) {
  py::class_<Handle>(m, "Handle", py::is_final())
      .def("poll", &Handle::poll)
      .def("released", &Handle::released)
      .def("wait", &Handle::wait, py::arg("timeout") = -1.0, py::arg("spins") = true)
      .def("output", &Handle::output)
      .def("counts", &Handle::counts)
      .def_property_readonly("source", &Handle::source);

  py::class_<Communicator, CommPtr> comm(m, "Communicator", py::is_final());
  comm.def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("size", &Communicator::size)
      .def_property_readonly("local_rank", [](const Communicator& self) { return self.members().local_rank(); })
      .def_property_readonly("local_size", [](const Communicator& self) { return self.members().local_size(); })
      .def_property_readonly("node", [](const Communicator& self) { return self.members().node(); })
      .def_property_readonly("encodes", [](const Communicator& self) { return self.as_made().may_encode(SIZE_MAX); })
      .def_property_readonly("joins", &Communicator::joins)
      .def("tell_uncompressed", [](const Communicator& self) { self.as_made().tell_uncompressed(); })
      .def_property_readonly("num_nodes", [](const Communicator& self) { return self.members().num_nodes(); })
      .def_property_readonly("nodes", [](const Communicator& self) { return self.members().node_of_rank; })
      .def_property_readonly("transports", [](const Communicator& self) { return self.members().transport_of_rank; })
      .def_property_readonly("job_ranks", [](const Communicator& self) { return self.members().all_job_ranks(); })
      .def("constants", [](Communicator& self) { return bind::to_dict(constants_of(self).topology); })
      .def("constants_source", [](Communicator& self) { return constants_of(self).source; })
      .def("coding",
           [](Communicator& self, const std::string& codec) -> std::optional<std::pair<double, double>> {
             const Codings codings = constants_of(self).codings;
             const plan::Coding* const coding = codings.find(kernels::encoding_named(codec));
             if (coding == nullptr) return std::nullopt;
             return std::pair(coding->encode_us_per_byte, coding->decode_us_per_byte);
           })
      .def("describe_path", &describe_path, py::arg("collective"), py::arg("bytes"), py::arg("dtype"), py::arg("op"),
           py::arg("memory"), py::call_guard<py::gil_scoped_release>())
      .def("alloc", &alloc, py::arg("nbytes"))
      .def("scratch", &Communicator::scratch, py::arg("nbytes"))
      .def("fail", &Communicator::fail, py::arg("text"), py::call_guard<py::gil_scoped_release>())
      .def("failure", &Communicator::failure)
      .def("encoded_costs", &encoded_costs)
      .def("refuse", &Communicator::refuse, py::arg("why"), py::call_guard<py::gil_scoped_release>())
      .def("note_refused", &Communicator::note_refused, py::arg("why"), py::call_guard<py::gil_scoped_release>())
      .def_property("timeout_s", &Communicator::timeout_s, &Communicator::set_timeout)
      .def(
          "log",
          [](const Communicator& self, const std::string& level, const std::string& text) {
            self.log()(log_level_from(level), text);
          },
          py::arg("level"), py::arg("text"))
      .def("close", &Communicator::close, py::call_guard<py::gil_scoped_release>())
      .def("leave", &Communicator::leave, py::call_guard<py::gil_scoped_release>())
      .def("left", &Communicator::left, py::call_guard<py::gil_scoped_release>())
      .def("join", &join, py::arg("note") = "")
      .def_property_readonly("by_name", [](const CommPtr& self) { return OnDevice{self, true}; });
  auto device = py::reinterpret_borrow<py::class_<OnDevice>>(m.attr("OnDevice"));
  bind_collectives(comm, device);
  bind_points(comm, device);
  bind_timeline(m);
}

}  // namespace dcoll::bind
