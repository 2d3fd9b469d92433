// dcoll._C.kernels: the CPU kernels by address, for bench/kernels.py and for comparing the GPU's results with.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bind/arguments.h"
#include "kernels/cast.h"
#include "kernels/codec.h"
#include "kernels/low_rank.h"
#include "kernels/pack.h"
#include "kernels/reduce.h"
#include "kernels/topk.h"

namespace py = pybind11;
using namespace dcoll;
using namespace dcoll::bind;

namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

size_t encode_top(uintptr_t message, uintptr_t src, size_t count, size_t k, uintptr_t error, uintptr_t velocity,
                  double momentum) {
  if (k > count || (velocity != 0 && error == 0)) {
    throw ArgumentError("encode_top: k is at most count, and a velocity needs an error.");
  }
  return kernels::encode_top(to_pointer(message), to_pointer<float>(src), count, k,
                             {to_pointer<float>(error), to_pointer<float>(velocity), static_cast<float>(momentum)});
}

bool sum_top(uintptr_t dst, const std::vector<uintptr_t>& messages, size_t count, size_t k, double factor) {
  return by_address(&kernels::sum_top)(dst, messages, count, k, factor) == messages.size();
}

void bind_elements(py::module_& k) {
  using namespace py::literals;
  k.def("reduce2", by_address(&kernels::reduce2), "dst"_a, "a"_a, "b"_a, "count"_a, "dtype"_a, "op"_a, "scale"_a = 1.0,
        NoGil());
  k.def("reduce_n", by_address(&kernels::reduce_n), "dst"_a, "srcs"_a, "count"_a, "dtype"_a, "op"_a, "scale"_a = 1.0,
        NoGil());
  k.def("reduce_n_to_n", by_address(&kernels::reduce_n_to_n), "dsts"_a, "srcs"_a, "count"_a, "dtype"_a, "op"_a,
        "scale"_a = 1.0, NoGil());
  k.def("scale", by_address(&kernels::scale), "dst"_a, "src"_a, "count"_a, "dtype"_a, "scale"_a, NoGil());
  k.def("cast", by_address(&kernels::cast), "dst"_a, "dst_dtype"_a, "src"_a, "src_dtype"_a, "count"_a, NoGil());
  k.def("pack", by_address(&kernels::pack), "flat"_a, "segments"_a, NoGil());
  k.def("unpack", by_address(&kernels::unpack), "segments"_a, "flat"_a, NoGil());
}

void bind_encoded(py::module_& k) {
  using namespace py::literals;
  k.def("encoded_bytes", by_address(&kernels::encoded_bytes), "codec"_a, "count"_a);
  k.def("encode", by_address(&kernels::encode), "codec"_a, "dst"_a, "src"_a, "count"_a, "error"_a = 0,
        "key"_a = py::none(), NoGil());
  k.def("decode", by_address(&kernels::decode), "codec"_a, "dst"_a, "src"_a, "count"_a, NoGil());
  k.def("sum_encoded", by_address(&kernels::sum_encoded), "codec"_a, "dst"_a, "srcs"_a, "count"_a, "scale"_a = 1.0,
        "error"_a = 0, "key"_a = py::none(), NoGil());
  k.def("top_bytes", &kernels::top_bytes, "count"_a, "k"_a);
  k.def("encode_top", &encode_top, "message"_a, "src"_a, "count"_a, "k"_a, "error"_a = 0, "velocity"_a = 0,
        "momentum"_a = 0.0, NoGil());
  k.def("sum_top", &sum_top, "dst"_a, "messages"_a, "count"_a, "k"_a, "factor"_a = 1.0, NoGil());
}

void bind_low_rank(py::module_& k) {
  using namespace py::literals;
  k.def(
      "add_and_project",
      [](uintptr_t p, uintptr_t matrix, uintptr_t source, uintptr_t error, uintptr_t q, size_t rows, size_t columns,
         size_t rank) { by_address (&kernels::add_and_project)(p, matrix, source, error, q, {rows, columns, rank}); },
      "p"_a, "matrix"_a, "source"_a, "error"_a, "q"_a, "rows"_a, "columns"_a, "rank"_a, NoGil());
  k.def(
      "orthonormalise",
      [](const std::vector<std::tuple<uintptr_t, size_t, size_t>>& factors) {
        for (const auto& [p, rows, rank] : factors) kernels::orthonormalise(to_pointer<float>(p), rows, rank);
      },
      "factors"_a, NoGil());
  k.def(
      "project_back",
      [](uintptr_t q, uintptr_t matrix, uintptr_t p, size_t rows, size_t columns, size_t rank) {
        by_address (&kernels::project_back)(q, matrix, p, {rows, columns, rank});
      },
      "q"_a, "matrix"_a, "p"_a, "rows"_a, "columns"_a, "rank"_a, NoGil());
  k.def(
      "split",
      [](uintptr_t matrix, uintptr_t error, uintptr_t p, uintptr_t q, uintptr_t sum, size_t rows, size_t columns,
         size_t rank) { by_address (&kernels::split)(matrix, error, p, q, sum, {rows, columns, rank}); },
      "matrix"_a, "error"_a, "p"_a, "q"_a, "sum"_a, "rows"_a, "columns"_a, "rank"_a, NoGil());
}

}  // namespace

void bind_kernels(py::module_& m) {
  py::module_ k = m.def_submodule("kernels", "The CPU kernels, by address.");
  k.def("active_isa", &kernels::active_isa);
  k.def("set_isa", &kernels::set_isa, py::arg("isa"));
  bind_elements(k);
  bind_encoded(k);
  bind_low_rank(k);
}
