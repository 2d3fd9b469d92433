// dcoll._C.cuda: the CUDA kernels by address. In a build without CUDA it holds available(), device_count() and
// unavailable_reason() only, so that callers can ask the same question of any build.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>

#include "bind/kernel_args.h"
#if DCOLL_CUDA
#include "kernels/cuda.h"
#include "kernels/cuda_status.h"
#endif

namespace py = pybind11;

#if DCOLL_CUDA

using namespace dcoll;
using namespace dcoll::bind;

namespace {

void bind_cuda_reduce(py::module_& c) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  c.def(
      "reduce2",
      [](uintptr_t dst, uintptr_t a, uintptr_t b, size_t count, int dtype, int op, double scale, uintptr_t stream) {
        kernels::cuda::reduce2(to_pointer(dst), to_pointer(a), to_pointer(b), count, to_dtype(dtype), to_op(op), scale,
                               to_pointer(stream));
      },
      py::arg("dst"), py::arg("a"), py::arg("b"), py::arg("count"), py::arg("dtype"), py::arg("op"),
      py::arg("scale") = 1.0, py::arg("stream") = 0, NoGil());
  c.def(
      "reduce_n",
      [](uintptr_t dst, const std::vector<uintptr_t>& srcs, size_t count, int dtype, int op, double scale,
         uintptr_t stream) {
        kernels::cuda::reduce_n(to_pointer(dst), to_const_pointers(srcs), count, to_dtype(dtype), to_op(op), scale,
                                to_pointer(stream));
      },
      py::arg("dst"), py::arg("srcs"), py::arg("count"), py::arg("dtype"), py::arg("op"), py::arg("scale") = 1.0,
      py::arg("stream") = 0, NoGil());
  c.def(
      "reduce_n_to_n",
      [](const std::vector<uintptr_t>& dsts, const std::vector<uintptr_t>& srcs, size_t count, int dtype, int op,
         double scale, uintptr_t stream) {
        kernels::cuda::reduce_n_to_n(to_pointers(dsts), to_const_pointers(srcs), count, to_dtype(dtype), to_op(op),
                                     scale, to_pointer(stream));
      },
      py::arg("dsts"), py::arg("srcs"), py::arg("count"), py::arg("dtype"), py::arg("op"), py::arg("scale") = 1.0,
      py::arg("stream") = 0, NoGil());
  c.def(
      "scale",
      [](uintptr_t dst, uintptr_t src, size_t count, int dtype, double scale, uintptr_t stream) {
        kernels::cuda::scale(to_pointer(dst), to_pointer(src), count, to_dtype(dtype), scale, to_pointer(stream));
      },
      py::arg("dst"), py::arg("src"), py::arg("count"), py::arg("dtype"), py::arg("scale"), py::arg("stream") = 0,
      NoGil());
}

void bind_cuda_moves(py::module_& c) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  c.def(
      "cast",
      [](uintptr_t dst, int dst_dtype, uintptr_t src, int src_dtype, size_t count, uintptr_t stream) {
        kernels::cuda::cast(to_pointer(dst), to_dtype(dst_dtype), to_pointer(src), to_dtype(src_dtype), count,
                            to_pointer(stream));
      },
      py::arg("dst"), py::arg("dst_dtype"), py::arg("src"), py::arg("src_dtype"), py::arg("count"),
      py::arg("stream") = 0, NoGil());
  c.def(
      "pack",
      [](uintptr_t flat, const std::vector<SegmentTuple>& segments, uintptr_t stream) {
        kernels::cuda::pack(to_pointer(flat), to_segments(segments), to_pointer(stream));
      },
      py::arg("flat"), py::arg("segments"), py::arg("stream") = 0, NoGil());
  c.def(
      "unpack",
      [](const std::vector<SegmentTuple>& segments, uintptr_t flat, uintptr_t stream) {
        kernels::cuda::unpack(to_segments(segments), to_pointer(flat), to_pointer(stream));
      },
      py::arg("segments"), py::arg("flat"), py::arg("stream") = 0, NoGil());
}

// Results that a kernel leaves in the device's memory are passed by address too; 0: not asked for.
void bind_cuda_codecs(py::module_& c) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  const auto floats = [](uintptr_t at) { return static_cast<float*>(to_pointer(at)); };
  const auto count_at = [](uintptr_t at) { return static_cast<unsigned long long*>(to_pointer(at)); };
  c.def(
      "encode",
      [=](std::string_view codec, uintptr_t dst, uintptr_t src, size_t count, uintptr_t error, uintptr_t beyond,
          uintptr_t stream) {
        kernels::cuda::encode(kernels::encoding_named(codec).codec, to_pointer(dst), floats(src), count, floats(error),
                              count_at(beyond), to_pointer(stream));
      },
      py::arg("codec"), py::arg("dst"), py::arg("src"), py::arg("count"), py::arg("error") = 0, py::arg("beyond") = 0,
      py::arg("stream") = 0, NoGil());
  c.def(
      "decode",
      [=](std::string_view codec, uintptr_t dst, uintptr_t src, size_t count, uintptr_t stream) {
        kernels::cuda::decode(kernels::encoding_named(codec).codec, floats(dst), to_pointer(src), count,
                              to_pointer(stream));
      },
      py::arg("codec"), py::arg("dst"), py::arg("src"), py::arg("count"), py::arg("stream") = 0, NoGil());
  c.def(
      "sum_encoded",
      [=](std::string_view codec, uintptr_t dst, const std::vector<uintptr_t>& srcs, size_t count, double scale,
          uintptr_t error, uintptr_t beyond, uintptr_t stream) {
        kernels::cuda::sum_encoded(kernels::encoding_named(codec).codec, to_pointer(dst), to_const_pointers(srcs),
                                   count, scale, floats(error), count_at(beyond), to_pointer(stream));
      },
      py::arg("codec"), py::arg("dst"), py::arg("srcs"), py::arg("count"), py::arg("scale") = 1.0, py::arg("error") = 0,
      py::arg("beyond") = 0, py::arg("stream") = 0, NoGil());
}

void bind_cuda_top(py::module_& c) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  const auto floats = [](uintptr_t at) { return static_cast<float*>(to_pointer(at)); };
  const auto number_at = [](uintptr_t at) { return static_cast<unsigned*>(to_pointer(at)); };
  c.def("encode_top_scratch", &kernels::cuda::encode_top_scratch, py::arg("count"), py::arg("k"));
  c.def("sum_top_scratch", &kernels::cuda::sum_top_scratch, py::arg("count"), py::arg("messages"));
  c.def(
      "encode_top",
      [=](uintptr_t message, uintptr_t src, size_t count, size_t k, uintptr_t scratch, uintptr_t error,
          uintptr_t velocity, double momentum, uintptr_t sent, uintptr_t stream) {
        kernels::cuda::encode_top(to_pointer(message), floats(src), count, k,
                                  {floats(error), floats(velocity), static_cast<float>(momentum)}, to_pointer(scratch),
                                  number_at(sent), to_pointer(stream));
      },
      py::arg("message"), py::arg("src"), py::arg("count"), py::arg("k"), py::arg("scratch"), py::arg("error") = 0,
      py::arg("velocity") = 0, py::arg("momentum") = 0.0, py::arg("sent") = 0, py::arg("stream") = 0, NoGil());
  c.def(
      "sum_top",
      [=](uintptr_t dst, const std::vector<uintptr_t>& messages, size_t count, size_t k, uintptr_t scratch,
          uintptr_t first_bad, double factor, uintptr_t stream) {
        kernels::cuda::sum_top(floats(dst), to_const_pointers(messages), count, k, factor, to_pointer(scratch),
                               number_at(first_bad), to_pointer(stream));
      },
      py::arg("dst"), py::arg("messages"), py::arg("count"), py::arg("k"), py::arg("scratch"), py::arg("first_bad"),
      py::arg("factor") = 1.0, py::arg("stream") = 0, NoGil());
}

}  // namespace

void bind_cuda(py::module_& m) {
  py::module_ c = m.def_submodule("cuda", "The CUDA kernels, by address; they run on the current device.");
  c.def("available", &kernels::cuda::available);
  c.def("device_count", &kernels::cuda::device_count);
  c.def("unavailable_reason", &kernels::cuda::unavailable_reason);
  c.def("device_name", &kernels::cuda::device_name, py::arg("device") = 0);
  c.def("runtime_version", &kernels::cuda::runtime_version);
  c.def("driver_version", &kernels::cuda::driver_version);
  bind_cuda_reduce(c);
  bind_cuda_moves(c);
  bind_cuda_codecs(c);
  bind_cuda_top(c);
}

#else

void bind_cuda(py::module_& m) {
  py::module_ c = m.def_submodule("cuda", "This build has no CUDA kernels.");
  c.def("available", [] { return false; });
  c.def("device_count", [] { return 0; });
  c.def("unavailable_reason", [] { return std::string("dcoll was built without CUDA"); });
}

#endif
