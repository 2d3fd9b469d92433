// Reducer: the gradient buckets of engine/buckets/bucket.h, and the rounds that Reducers in Python count too.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include "base/error.h"
#include "bind/arguments.h"
#include "bind/bind.h"
#include "engine/buckets/bucket.h"

namespace py = pybind11;

namespace dcoll::bind {
namespace {

std::shared_ptr<Reducer> make_reducer(std::shared_ptr<Communicator> comm, const std::vector<size_t>& numels,
                                      const std::vector<int>& dtypes, const std::vector<std::string>& names, int op,
                                      size_t bucket_bytes, size_t first_bucket_bytes, double prescale, double postscale,
                                      std::optional<int> wire, std::vector<size_t> groups, std::string label,
                                      std::string_view codec, bool feedback, double momentum, size_t warmup_steps,
                                      size_t start_step) {
  if (numels.size() != dtypes.size() || numels.size() != names.size()) {
    throw ArgumentError("Reducer needs one numel, dtype and name per parameter; got " + std::to_string(numels.size()) +
                        ", " + std::to_string(dtypes.size()) + " and " + std::to_string(names.size()) + ".");
  }
  std::vector<ParamInfo> params;
  for (size_t i = 0; i < numels.size(); ++i) params.push_back({numels[i], to_dtype(dtypes[i]), names[i]});
  const auto wire_dtype = wire ? std::optional(to_dtype(*wire)) : std::nullopt;
  return std::make_shared<Reducer>(std::move(comm), std::move(params),
                                   ReducerOptions{.op = to_op(op),
                                                  .bucket_bytes = bucket_bytes,
                                                  .first_bucket_bytes = first_bucket_bytes,
                                                  .prescale = prescale,
                                                  .postscale = postscale,
                                                  .encoding = kernels::encoding_named(codec),
                                                  .feedback = feedback,
                                                  .momentum = momentum,
                                                  .start_step = start_step,
                                                  .warmup_steps = warmup_steps,
                                                  .wire = wire_dtype,
                                                  .groups = std::move(groups),
                                                  .label = std::move(label)});
}

auto waiting_in(const auto& of) {
  return [&](Operation& operation) { wait_interruptibly(of.communicator(), operation, -1); };
}

std::vector<size_t> bucket_params(const Reducer& reducer, size_t index) {
  std::vector<size_t> params;
  for (const Bucket::Slot& slot : reducer.bucket(index).slots) params.push_back(slot.param);
  return params;
}

using Floats = py::array_t<float, py::array::c_style | py::array::forcecast>;
constexpr std::pair<const char*, Reducer::Kept> kKept[] = {{"error", Reducer::Kept::kError},
                                                           {"velocity", Reducer::Kept::kVelocity}};

// Only what there is.
std::map<std::string, Floats> kept(const Reducer& reducer, size_t param) {
  std::map<std::string, Floats> all;
  for (const auto& [name, what] : kKept) {
    const std::vector<float> values = reducer.kept(param, what);
    if (!values.empty()) all.emplace(name, Floats(static_cast<py::ssize_t>(values.size()), values.data()));
  }
  return all;
}

void keep(Reducer& reducer, size_t param, const std::map<std::string, Floats>& values) {
  for (const auto& [name, what] : kKept) {
    const auto found = values.find(name);
    if (found == values.end()) continue;
    reducer.keep(param, what, {found->second.data(), static_cast<size_t>(found->second.size())});
  }
}

}  // namespace

void bind_reducer(py::module_& m) {
  using namespace py::literals;
  py::class_<Rounds>(m, "Rounds", py::is_final())
      .def(py::init<std::shared_ptr<Communicator>, std::string, bool>(), "comm"_a, "name"_a, "scheduled"_a)
      .def("ended", &Rounds::ended)
      .def("set_ended", &Rounds::set_ended, "rounds"_a)
      .def("end_one", &Rounds::end_one)
      .def("may_differ", &Rounds::may_differ)
      .def("agree", [](Rounds& self) { self.agree(waiting_in(self)); });
  py::class_<Reducer, std::shared_ptr<Reducer>>(m, "Reducer", py::is_final())
      .def(py::init(&make_reducer), "comm"_a, "numels"_a, "dtypes"_a, "names"_a, "op"_a, "bucket_bytes"_a,
           "first_bucket_bytes"_a, "prescale"_a = 1.0, "postscale"_a = 1.0, "wire_dtype"_a = py::none(),
           "groups"_a = std::vector<size_t>{}, "label"_a = "", "codec"_a = "", "feedback"_a = true, "momentum"_a = 0.0,
           "warmup_steps"_a = 0, "start_step"_a = 0)
      .def("rounds", [](Reducer& self) { return self.rounds().ended(); })
      .def(
          "set_rounds", [](Reducer& self, size_t rounds) { self.rounds().set_ended(rounds); }, "rounds"_a)
      .def("num_buckets", &Reducer::num_buckets)
      .def("bucket_params", &bucket_params, "bucket"_a)
      .def(
          "bucket_name", [](const Reducer& self, size_t index) { return self.bucket(index).name; }, "bucket"_a)
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
      .def("kept", &kept, "param"_a)
      .def("keep", &keep, "param"_a, "values"_a)
      .def("wait_seconds", &Reducer::wait_seconds);
}

}  // namespace dcoll::bind
