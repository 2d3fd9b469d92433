// dcoll._C.kernels: the CPU kernels by address, for bench/kernels.py and for comparing the GPU's results with.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bind/kernel_args.h"
#include "kernels/cast.h"
#include "kernels/codec.h"
#include "kernels/pack.h"
#include "kernels/reduce.h"
#include "kernels/topk.h"

namespace py = pybind11;
using namespace dcoll;
using namespace dcoll::bind;

namespace {

// Of the codecs whose encoded form is as long for any values.
kernels::Codec elementwise(std::string_view name) {
  const kernels::Codec codec = kernels::encoding_named(name).codec;
  if (codec != kernels::Codec::kNone && codec != kernels::Codec::kTopK) return codec;
  throw ArgumentError("'" + std::string(name) + "' is none of fp16, bf16, int8 and fp32: see encode_top for top-k.");
}

using NoGil = py::call_guard<py::gil_scoped_release>;

void bind_elements(py::module_& k) {
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
}

void bind_top(py::module_& k) {
  k.def("top_bytes", &kernels::top_bytes, py::arg("count"), py::arg("k"));
  k.def(
      "encode_top",
      [](uintptr_t message, uintptr_t src, size_t count, size_t k, uintptr_t error, uintptr_t velocity,
         double momentum) {
        const auto floats = [](uintptr_t at) { return static_cast<float*>(to_pointer(at)); };
        if (k > count || (velocity != 0 && error == 0)) {
          throw ArgumentError("encode_top: k is at most count, and a velocity needs an error.");
        }
        return kernels::encode_top(to_pointer(message), floats(src), count, k,
                                   {floats(error), floats(velocity), static_cast<float>(momentum)});
      },
      py::arg("message"), py::arg("src"), py::arg("count"), py::arg("k"), py::arg("error") = 0, py::arg("velocity") = 0,
      py::arg("momentum") = 0.0, NoGil());
  k.def(
      "sum_top",
      [](uintptr_t dst, const std::vector<uintptr_t>& messages, size_t count, size_t k, double factor) {
        std::vector<const void*> all;
        for (const uintptr_t message : messages) all.push_back(to_pointer(message));
        return kernels::sum_top(static_cast<float*>(to_pointer(dst)), all, count, k, factor) == all.size();
      },
      py::arg("dst"), py::arg("messages"), py::arg("count"), py::arg("k"), py::arg("factor") = 1.0, NoGil());
}

void bind_codecs(py::module_& k) {
  k.def(
      "encoded_bytes",
      [](std::string_view codec, size_t count) { return kernels::encoded_bytes(elementwise(codec), count); },
      py::arg("codec"), py::arg("count"));
  k.def(
      "encode",
      [](std::string_view codec, uintptr_t dst, uintptr_t src, size_t count, uintptr_t error, kernels::Key key) {
        return kernels::encode(elementwise(codec), to_pointer(dst), static_cast<float*>(to_pointer(src)), count,
                               static_cast<float*>(to_pointer(error)), key);
      },
      py::arg("codec"), py::arg("dst"), py::arg("src"), py::arg("count"), py::arg("error") = 0,
      py::arg("key") = py::none(), NoGil());
  k.def(
      "decode",
      [](std::string_view codec, uintptr_t dst, uintptr_t src, size_t count) {
        kernels::decode(elementwise(codec), static_cast<float*>(to_pointer(dst)), to_pointer(src), count);
      },
      py::arg("codec"), py::arg("dst"), py::arg("src"), py::arg("count"), NoGil());
  k.def(
      "sum_encoded",
      [](std::string_view codec, uintptr_t dst, const std::vector<uintptr_t>& srcs, size_t count, double scale,
         uintptr_t error) {
        return kernels::sum_encoded(elementwise(codec), to_pointer(dst), to_const_pointers(srcs), count, scale,
                                    static_cast<float*>(to_pointer(error)));
      },
      py::arg("codec"), py::arg("dst"), py::arg("srcs"), py::arg("count"), py::arg("scale") = 1.0, py::arg("error") = 0,
      NoGil());
}

}  // namespace

void bind_kernels(py::module_& m) {
  py::module_ k = m.def_submodule("kernels", "The CPU kernels, by address.");
  k.def("active_isa", [] { return std::string(kernels::active_isa()); });
  k.def("set_isa", [](const std::string& isa) { return kernels::set_isa(isa); }, py::arg("isa"));
  bind_elements(k);
  bind_top(k);
  bind_codecs(k);
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
