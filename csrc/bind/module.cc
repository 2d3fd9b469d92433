// The compiled module dcoll._C.
#include <pybind11/stl.h>

#include "base/horovod_settings.h"
#include "base/settings.h"
#include "base/types.h"
#include "bind/bind.h"

namespace py = pybind11;

namespace {

using Row = std::tuple<std::string, std::string, std::string, std::string, std::string>;

std::vector<Row> settings_rows() {
  std::vector<Row> rows;
  for (const dcoll::SettingInfo& info : dcoll::setting_table()) {
    rows.emplace_back(info.name, info.fallback, info.allowed, info.help, dcoll::setting_text(info.name));
  }
  return rows;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "The compiled core of dcoll. See dcoll/_C.pyi.";
  m.attr("__version__") = DCOLL_VERSION;
  m.attr("cuda_built") = DCOLL_CUDA != 0;

  for (int code = 0; code < dcoll::kNumDTypes; ++code) {
    const py::str name(std::string(dcoll::dtype_name(static_cast<dcoll::DType>(code))));
    m.attr(name.attr("upper")()) = code;
  }
  using dcoll::ReduceOp;
  const std::pair<const char*, ReduceOp> ops[] = {
      {"AVERAGE", ReduceOp::kAverage}, {"SUM", ReduceOp::kSum},      {"ADASUM", ReduceOp::kAdasum},
      {"MIN", ReduceOp::kMin},         {"MAX", ReduceOp::kMax},      {"PRODUCT", ReduceOp::kProduct},
      {"BIT_AND", ReduceOp::kBitAnd},  {"BIT_OR", ReduceOp::kBitOr}, {"BIT_XOR", ReduceOp::kBitXor}};
  for (const auto& [name, op] : ops) m.attr(name) = static_cast<int>(op);

  m.def("settings", &settings_rows);
  m.def("horovod_settings", [] {
    std::vector<std::tuple<std::string, std::string, std::string>> rows;
    for (const dcoll::HorovodSetting& one : dcoll::horovod_settings())
      rows.emplace_back(one.variable, one.setting, one.instead);
    return rows;
  });

  dcoll::bind::bind_errors(m);
  dcoll::bind::bind_memory(m);
  dcoll::bind::bind_on_device(m);
  dcoll::bind::bind_communicator(m);
  dcoll::bind::bind_world(m);
  dcoll::bind::bind_reducer(m);
  dcoll::bind::bind_gradient_hook(m);
  dcoll::bind::bind_operand(m);
  dcoll::bind::bind_grouped(m);
  dcoll::bind::bind_grouped_rows(m);
  dcoll::bind::bind_inline_calls(m);
  bind_kernels(m);
  bind_cuda(m);
  bind_plan(m);
}
