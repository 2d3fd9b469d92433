// Reducer: the gradient buckets of engine/buckets/bucket.h.
#include <pybind11/stl.h>

#include "base/error.h"
#include "bind/bind.h"
#include "engine/buckets/bucket.h"

namespace py = pybind11;

namespace dcoll::bind {
namespace {

std::shared_ptr<Reducer> make_reducer(std::shared_ptr<Communicator> comm, const std::vector<size_t>& numels,
                                      const std::vector<int>& dtypes, const std::vector<std::string>& names, int op,
                                      size_t bucket_bytes, size_t first_bucket_bytes, double prescale, double postscale,
                                      std::optional<int> wire, std::vector<size_t> groups, std::string label,
                                      std::string_view codec) {
  if (numels.size() != dtypes.size() || numels.size() != names.size()) {
    throw ArgumentError("Reducer needs one numel, dtype and name per parameter; got " + std::to_string(numels.size()) +
                        ", " + std::to_string(dtypes.size()) + " and " + std::to_string(names.size()) + ".");
  }
  std::vector<ParamInfo> params;
  for (size_t i = 0; i < numels.size(); ++i) params.push_back({numels[i], static_cast<DType>(dtypes[i]), names[i]});
  const auto wire_dtype = wire ? std::optional(static_cast<DType>(*wire)) : std::nullopt;
  return std::make_shared<Reducer>(
      std::move(comm), std::move(params),
      ReducerOptions{static_cast<ReduceOp>(op), bucket_bytes, first_bucket_bytes, prescale, postscale,
                     kernels::codec_named(codec), wire_dtype, std::move(groups), std::move(label)});
}

auto waiting_in(Reducer& reducer) {
  return [&](Operation& operation) { wait_interruptibly(reducer.communicator(), operation, -1); };
}

std::vector<size_t> bucket_params(const Reducer& reducer, size_t index) {
  std::vector<size_t> params;
  for (const Bucket::Slot& slot : reducer.bucket(index).slots) params.push_back(slot.param);
  return params;
}

}  // namespace

void bind_reducer(py::module_& m) {
  using namespace py::literals;
  py::class_<Reducer, std::shared_ptr<Reducer>>(m, "Reducer", py::is_final())
      .def(py::init(&make_reducer), "comm"_a, "numels"_a, "dtypes"_a, "names"_a, "op"_a, "bucket_bytes"_a,
           "first_bucket_bytes"_a, "prescale"_a = 1.0, "postscale"_a = 1.0, "wire_dtype"_a = py::none(),
           "groups"_a = std::vector<size_t>{}, "label"_a = "", "codec"_a = "")
      .def("num_buckets", &Reducer::num_buckets)
      .def("bucket_of", &Reducer::bucket_of, "param"_a)
      .def("bucket_params", &bucket_params, "bucket"_a)
      .def(
          "bucket_buffer", [](const Reducer& self, size_t index) { return self.bucket(index).memory; }, "bucket"_a)
      .def("offset_bytes", &Reducer::offset_bytes, "param"_a)
      .def("gradient", &Reducer::gradient, "param"_a)
      .def("move", &Reducer::move, "params"_a)
      .def(
          "mark_ready",
          [](Reducer& self, size_t param, uintptr_t gradient) {
            return self.mark_ready(param, reinterpret_cast<const void*>(gradient));
          },
          "param"_a, "gradient_ptr"_a = 0)
      .def("finish", [](Reducer& self) { return self.finish(waiting_in(self)); })
      .def("abandon", &Reducer::abandon)
      .def("settle", [](Reducer& self) { self.settle(waiting_in(self)); })
      .def("missing", &Reducer::missing)
      .def("order", &Reducer::order)
      .def("rebuild", &Reducer::rebuild, "order"_a)
      .def("wait_seconds", &Reducer::wait_seconds);
}

}  // namespace dcoll::bind
