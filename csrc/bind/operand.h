// Reading the plain tensors: dense, row-major, on the CPU, of torch.Tensor, torch.nn.Parameter or numpy.ndarray itself
// (a subclass may mean anything) and of a dtype the core has. Everything else is left to dcoll/collectives/tensors.py.
//
// Neither torch nor NumPy is linked. Tensors of torch are read through DLPack's C exchange API (torch 2.10 and later),
// or through methods of torch.Tensor; arrays through the buffer protocol. All functions need the interpreter lock.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>

#include "base/types.h"
#include "bind/dlpack.h"
#include "engine/core/dims.h"

namespace dcoll::bind {

struct Operand {
  void* data = nullptr;
  size_t count = 0;  // elements
  DType dtype = DType::kFloat32;
  size_t bytes() const { return count * dtype_bytes(dtype); }
};

// The dimensions of a tensor, where they matter. One with more is not plain.
struct Shape {
  static constexpr int kMostDims = 8;
  int ndim = 0;
  int64_t dims[kMostDims] = {};

  // Elements of a row, which is everything but the first dimension.
  size_t row_elems() const { return elems_from(1); }
  size_t elems() const { return elems_from(0); }
  // What ranks compare: of the whole, or of a row.
  Dims all() const { return Dims(dims, static_cast<size_t>(ndim)); }
  Dims of_row() const { return all().subspan(ndim > 0 ? 1 : 0); }

 private:
  size_t elems_from(int dim) const {
    size_t elems = 1;
    for (; dim < ndim; ++dim) elems *= static_cast<size_t>(dims[dim]);
    return elems;
  }
};

enum class Access { kRead, kWrite };

// False: not a plain tensor, or its library was not registered yet. No Python error is set then.
bool read_operand(PyObject* object, Access access, Operand& operand, Shape* shape = nullptr);

// Whether a result computed from this tensor may have to carry a gradient.
bool requires_grad(PyObject* object);

// A new tensor like a plain one, uninitialised. A new reference; null: a Python error is set.
PyObject* empty_like(PyObject* plain);

// The same with another shape.
PyObject* new_empty(PyObject* plain, const Operand& operand, const Shape& shape);

// Results above this lie in memory of the core, which uses the blocks freed last again (engine/core/memory.h): above
// this malloc() gives every block back, and the page faults of a new one take longer than the call. Below, the
// library's own allocation is cheaper.
inline constexpr size_t kMostOwnBytes = 128 << 10;

// The same in memory of the core. Null without a Python error: this version of torch cannot be handed memory.
PyObject* new_in_core(PyObject* plain, const Operand& operand, const Shape& shape);

// Tells torch's autograd that the core wrote to a plain tensor. False: a Python error is set.
bool mark_written(PyObject* plain);
// The same for a list of them.
bool mark_all_written(PyObject* list);

// What makes tensors of given memory that are like a plain one; null: none can be made.
dlpack::FromManaged maker_of(PyObject* plain);
// What DLPack calls the dtype.
void set_type(dlpack::Tensor& tensor, DType dtype);

}  // namespace dcoll::bind
