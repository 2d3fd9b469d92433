// dcoll._C.kernels: the CPU kernels by address, for bench/kernels.py and for comparing the GPU's results with.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bind/kernel_args.h"
#include "kernels/cast.h"
#include "kernels/codec.h"
#include "kernels/pack.h"
#include "kernels/reduce.h"

namespace py = pybind11;
using namespace dcoll;
using namespace dcoll::bind;

void bind_kernels(py::module_& m) {
  py::module_ k = m.def_submodule("kernels", "The CPU kernels, by address.");
  using NoGil = py::call_guard<py::gil_scoped_release>;
  k.def("active_isa", [] { return std::string(kernels::active_isa()); });
  k.def("set_isa", [](const std::string& isa) { return kernels::set_isa(isa); }, py::arg("isa"));
  k.def(
      "reduce2",
      [](uintptr_t dst, uintptr_t a, uintptr_t b, size_t count, int dtype, int op, double scale) {
        kernels::reduce2(to_pointer(dst), to_pointer(a), to_pointer(b), count, to_dtype(dtype), to_op(op), scale);
      },
      py::arg("dst"), py::arg("a"), py::arg("b"), py::arg("count"), py::arg("dtype"), py::arg("op"),
      py::arg("scale") = 1.0, NoGil());
  k.def(
      "reduce_n",
      [](uintptr_t dst, const std::vector<uintptr_t>& srcs, size_t count, int dtype, int op, double scale) {
        kernels::reduce_n(to_pointer(dst), to_const_pointers(srcs), count, to_dtype(dtype), to_op(op), scale);
      },
      py::arg("dst"), py::arg("srcs"), py::arg("count"), py::arg("dtype"), py::arg("op"), py::arg("scale") = 1.0,
      NoGil());
  k.def(
      "reduce_n_to_n",
      [](const std::vector<uintptr_t>& dsts, const std::vector<uintptr_t>& srcs, size_t count, int dtype, int op,
         double scale) {
        kernels::reduce_n_to_n(to_pointers(dsts), to_const_pointers(srcs), count, to_dtype(dtype), to_op(op), scale);
      },
      py::arg("dsts"), py::arg("srcs"), py::arg("count"), py::arg("dtype"), py::arg("op"), py::arg("scale") = 1.0,
      NoGil());
  k.def(
      "scale",
      [](uintptr_t dst, uintptr_t src, size_t count, int dtype, double scale) {
        kernels::scale(to_pointer(dst), to_pointer(src), count, to_dtype(dtype), scale);
      },
      py::arg("dst"), py::arg("src"), py::arg("count"), py::arg("dtype"), py::arg("scale"), NoGil());
  k.def(
      "cast",
      [](uintptr_t dst, int dst_dtype, uintptr_t src, int src_dtype, size_t count) {
        kernels::cast(to_pointer(dst), to_dtype(dst_dtype), to_pointer(src), to_dtype(src_dtype), count);
      },
      py::arg("dst"), py::arg("dst_dtype"), py::arg("src"), py::arg("src_dtype"), py::arg("count"), NoGil());
  k.def(
      "encoded_bytes",
      [](std::string_view codec, size_t count) { return kernels::encoded_bytes(kernels::codec_named(codec), count); },
      py::arg("codec"), py::arg("count"));
  k.def(
      "encode",
      [](std::string_view codec, uintptr_t dst, uintptr_t src, size_t count, uintptr_t error) {
        return kernels::encode(kernels::codec_named(codec), to_pointer(dst), static_cast<float*>(to_pointer(src)),
                               count, static_cast<float*>(to_pointer(error)));
      },
      py::arg("codec"), py::arg("dst"), py::arg("src"), py::arg("count"), py::arg("error") = 0, NoGil());
  k.def(
      "decode",
      [](std::string_view codec, uintptr_t dst, uintptr_t src, size_t count) {
        kernels::decode(kernels::codec_named(codec), static_cast<float*>(to_pointer(dst)), to_pointer(src), count);
      },
      py::arg("codec"), py::arg("dst"), py::arg("src"), py::arg("count"), NoGil());
  k.def(
      "pack",
      [](uintptr_t flat, const std::vector<SegmentTuple>& segments) {
        kernels::pack(to_pointer(flat), to_segments(segments));
      },
      py::arg("flat"), py::arg("segments"), NoGil());
  k.def(
      "unpack",
      [](const std::vector<SegmentTuple>& segments, uintptr_t flat) {
        kernels::unpack(to_segments(segments), to_pointer(flat));
      },
      py::arg("segments"), py::arg("flat"), NoGil());
}
