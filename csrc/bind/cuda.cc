// dcoll._C.cuda: the CUDA kernels by address. In a build without CUDA it holds available(), device_count() and
// unavailable_reason() only, so that callers can ask the same question of any build.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>

#include "bind/arguments.h"
#if DCOLL_CUDA
#include "kernels/cuda.h"
#include "kernels/cuda_status.h"
#endif

namespace py = pybind11;

#if DCOLL_CUDA

using namespace dcoll;
using namespace dcoll::bind;
namespace cuda = kernels::cuda;

namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

void bind_elements(py::module_& c) {
  using namespace py::literals;
  c.def("reduce2", by_address(&cuda::reduce2), "dst"_a, "a"_a, "b"_a, "count"_a, "dtype"_a, "op"_a, "scale"_a = 1.0,
        "stream"_a = 0, NoGil());
  c.def("reduce_n", by_address(&cuda::reduce_n), "dst"_a, "srcs"_a, "count"_a, "dtype"_a, "op"_a, "scale"_a = 1.0,
        "stream"_a = 0, NoGil());
  c.def("reduce_n_to_n", by_address(&cuda::reduce_n_to_n), "dsts"_a, "srcs"_a, "count"_a, "dtype"_a, "op"_a,
        "scale"_a = 1.0, "stream"_a = 0, NoGil());
  c.def("scale", by_address(&cuda::scale), "dst"_a, "src"_a, "count"_a, "dtype"_a, "scale"_a, "stream"_a = 0, NoGil());
  c.def("cast", by_address(&cuda::cast), "dst"_a, "dst_dtype"_a, "src"_a, "src_dtype"_a, "count"_a, "stream"_a = 0,
        NoGil());
  c.def("pack", by_address(&cuda::pack), "flat"_a, "segments"_a, "stream"_a = 0, NoGil());
  c.def("unpack", by_address(&cuda::unpack), "segments"_a, "flat"_a, "stream"_a = 0, NoGil());
}

void encode_top(uintptr_t message, uintptr_t src, size_t count, size_t k, uintptr_t scratch, uintptr_t error,
                uintptr_t velocity, double momentum, uintptr_t sent, uintptr_t stream) {
  cuda::encode_top(to_pointer(message), to_pointer<float>(src), count, k,
                   {to_pointer<float>(error), to_pointer<float>(velocity), static_cast<float>(momentum)},
                   to_pointer(scratch), to_pointer<unsigned>(sent), to_pointer(stream));
}

void sum_top(uintptr_t dst, const std::vector<uintptr_t>& messages, size_t count, size_t k, uintptr_t scratch,
             uintptr_t first_bad, double factor, uintptr_t stream) {
  by_address (&cuda::sum_top)(dst, messages, count, k, factor, scratch, first_bad, stream);
}

// Results that a kernel leaves in the device's memory are passed by address too; 0: not asked for.
void bind_encoded(py::module_& c) {
  using namespace py::literals;
  c.def("encode", by_address(&cuda::encode), "codec"_a, "dst"_a, "src"_a, "count"_a, "error"_a = 0, "beyond"_a = 0,
        "key"_a = py::none(), "stream"_a = 0, NoGil());
  c.def("decode", by_address(&cuda::decode), "codec"_a, "dst"_a, "src"_a, "count"_a, "stream"_a = 0, NoGil());
  c.def("sum_encoded", by_address(&cuda::sum_encoded), "codec"_a, "dst"_a, "srcs"_a, "count"_a, "scale"_a = 1.0,
        "error"_a = 0, "beyond"_a = 0, "key"_a = py::none(), "stream"_a = 0, NoGil());
  c.def("encode_top_scratch", &cuda::encode_top_scratch, "count"_a, "k"_a);
  c.def("sum_top_scratch", &cuda::sum_top_scratch, "count"_a, "messages"_a);
  c.def("encode_top", &encode_top, "message"_a, "src"_a, "count"_a, "k"_a, "scratch"_a, "error"_a = 0, "velocity"_a = 0,
        "momentum"_a = 0.0, "sent"_a = 0, "stream"_a = 0, NoGil());
  c.def("sum_top", &sum_top, "dst"_a, "messages"_a, "count"_a, "k"_a, "scratch"_a, "first_bad"_a, "factor"_a = 1.0,
        "stream"_a = 0, NoGil());
}

}  // namespace

void bind_cuda(py::module_& m) {
  py::module_ c = m.def_submodule("cuda", "The CUDA kernels, by address; they run on the current device.");
  c.def("available", &cuda::available);
  c.def("device_count", &cuda::device_count);
  c.def("unavailable_reason", &cuda::unavailable_reason);
  c.def("device_name", &cuda::device_name, py::arg("device") = 0);
  c.def("runtime_version", &cuda::runtime_version);
  c.def("driver_version", &cuda::driver_version);
  bind_elements(c);
  bind_encoded(c);
}

#else

void bind_cuda(py::module_& m) {
  py::module_ c = m.def_submodule("cuda", "This build has no CUDA kernels.");
  c.def("available", [] { return false; });
  c.def("device_count", [] { return 0; });
  c.def("unavailable_reason", [] { return std::string("dcoll was built without CUDA"); });
}

#endif
