#include "bind/operand.h"

#include <algorithm>
#include <iterator>
#include <memory>

#include "bind/bind.h"
#include "bind/shared_results.h"

namespace py = pybind11;

namespace dcoll::bind {
namespace {

// What tensors.py registered. Immortal on purpose: tensors are reduced while the interpreter shuts down, too.
struct Torch {
  PyObject* tensor = nullptr;     // the type
  PyObject* parameter = nullptr;  // the type
  PyObject* empty_like = nullptr;
  PyObject* new_empty = nullptr;
  PyObject* written = nullptr;  // takes a tuple or list of tensors
  PyObject* data_ptr = nullptr;
  PyObject* numel = nullptr;
  PyObject* is_contiguous = nullptr;
  PyObject* is_neg = nullptr;
  PyObject* requires_grad = nullptr;              // the descriptor
  PyObject* strided = nullptr;                    // the layout
  PyObject* dtypes[kNumDTypes] = {};              // by code
  const dlpack::ExchangeApi* exchange = nullptr;  // null: the methods
};
struct Numpy {
  PyObject* ndarray = nullptr;  // the type
  PyObject* empty_like = nullptr;
  PyObject* empty = nullptr;
  PyObject* frombuffer = nullptr;
  PyObject* dtypes[kNumDTypes] = {};  // by code; null: there is none
};
Torch torch;
Numpy numpy;

bool is_torch(PyObject* object) {
  auto* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  return type == torch.tensor || type == torch.parameter;
}
bool is_numpy(PyObject* object) { return reinterpret_cast<PyObject*>(Py_TYPE(object)) == numpy.ndarray; }

bool refuse() {
  PyErr_Clear();
  return false;
}

// Whether `function(object)` is True.
bool holds(PyObject* function, PyObject* object) {
  PyObject* answer = PyObject_CallOneArg(function, object);
  if (answer == nullptr) return refuse();
  Py_DECREF(answer);
  return answer == Py_True;
}

struct TypeRow {
  uint8_t code, bits;
  DType dtype;
};
constexpr TypeRow kTypes[] = {
    {dlpack::kFloat, 32, DType::kFloat32}, {dlpack::kBfloat, 16, DType::kBFloat16},
    {dlpack::kFloat, 16, DType::kFloat16}, {dlpack::kFloat, 64, DType::kFloat64},
    {dlpack::kInt, 64, DType::kInt64},     {dlpack::kInt, 32, DType::kInt32},
    {dlpack::kInt, 8, DType::kInt8},       {dlpack::kUInt, 8, DType::kUInt8},
    {dlpack::kBool, 8, DType::kBool},      {dlpack::kInt, 16, DType::kInt16},
    {dlpack::kUInt, 16, DType::kUInt16},   {dlpack::kUInt, 32, DType::kUInt32},
    {dlpack::kUInt, 64, DType::kUInt64},
};

bool find_dtype(uint8_t code, uint8_t bits, DType& dtype) {
  const auto* row =
      std::ranges::find_if(kTypes, [&](const TypeRow& known) { return known.code == code && known.bits == bits; });
  if (row == std::end(kTypes)) return false;
  dtype = row->dtype;
  return true;
}

// Row-major without gaps, as torch sees it: strides of dimensions of size 1 do not matter.
bool count_if_dense(const dlpack::Tensor& tensor, size_t& count) {
  int64_t expected = 1;
  bool dense = true;
  for (int32_t dim = tensor.ndim; dim-- > 0;) {
    const int64_t size = tensor.shape[dim];
    dense &= size == 1 || tensor.strides == nullptr || tensor.strides[dim] == expected;
    expected *= size;
  }
  count = static_cast<size_t>(expected);
  return dense || count == 0;
}

// False: too many dimensions.
template <typename Dim>
bool copy_shape(const Dim* dims, int ndim, Shape* shape) {
  if (shape == nullptr) return true;
  if (ndim > Shape::kMostDims) return false;
  shape->ndim = ndim;
  std::copy_n(dims, ndim, shape->dims);
  return true;
}

// By DLPack. The exchange reports the memory but not torch's negation bit; read_torch asks for that.
bool read_exchanged(PyObject* object, Operand& operand, Shape* shape) {
  dlpack::Tensor tensor;
  if (torch.exchange->tensor_from_object(object, &tensor) != 0) return refuse();
  if (tensor.device_type != dlpack::kCpu || tensor.type_lanes != 1) return false;
  if (!find_dtype(tensor.type_code, tensor.type_bits, operand.dtype)) return false;
  if (!count_if_dense(tensor, operand.count) || !copy_shape(tensor.shape, tensor.ndim, shape)) return false;
  operand.data = static_cast<std::byte*>(tensor.data) + (tensor.data != nullptr ? tensor.byte_offset : 0);
  return true;
}

bool attribute_is(PyObject* object, const char* name, PyObject* wanted) {
  PyObject* value = PyObject_GetAttrString(object, name);
  if (value == nullptr) return refuse();
  Py_DECREF(value);
  return value == wanted;
}

bool read_shape_by_methods(PyObject* object, Shape* shape) {
  if (shape == nullptr) return true;
  const auto sizes = py::reinterpret_steal<py::object>(PyObject_GetAttrString(object, "shape"));
  if (!sizes || !PyTuple_Check(sizes.ptr())) return refuse();
  int64_t dims[Shape::kMostDims];
  const Py_ssize_t ndim = PyTuple_GET_SIZE(sizes.ptr());
  if (ndim > Shape::kMostDims) return false;
  for (Py_ssize_t dim = 0; dim < ndim; ++dim) dims[dim] = PyLong_AsLongLong(PyTuple_GET_ITEM(sizes.ptr(), dim));
  if (PyErr_Occurred() != nullptr) return refuse();
  return copy_shape(dims, static_cast<int>(ndim), shape);
}

// By torch's methods, for versions without the exchange.
bool read_by_methods(PyObject* object, Operand& operand, Shape* shape) {
  if (!attribute_is(object, "is_cpu", Py_True) || !attribute_is(object, "layout", torch.strided)) return false;
  if (!holds(torch.is_contiguous, object)) return false;
  PyObject* dtype = PyObject_GetAttrString(object, "dtype");
  if (dtype == nullptr) return refuse();
  int code = 0;
  while (code < kNumDTypes && torch.dtypes[code] != dtype) ++code;
  Py_DECREF(dtype);
  if (code == kNumDTypes) return false;
  operand.dtype = static_cast<DType>(code);
  size_t values[2];
  PyObject* const functions[2] = {torch.numel, torch.data_ptr};
  for (int i = 0; i < 2; ++i) {
    PyObject* value = PyObject_CallOneArg(functions[i], object);
    if (value == nullptr) return refuse();
    values[i] = PyLong_AsSize_t(value);
    Py_DECREF(value);
    if (PyErr_Occurred() != nullptr) return refuse();
  }
  operand.count = values[0];
  operand.data = reinterpret_cast<void*>(values[1]);
  return read_shape_by_methods(object, shape);
}

bool read_torch(PyObject* object, Operand& operand, Shape* shape) {
  const bool read =
      torch.exchange != nullptr ? read_exchanged(object, operand, shape) : read_by_methods(object, operand, shape);
  if (!read) return false;
  if (operand.count > 0 && operand.data == nullptr) return false;
  // `z.conj().imag` is a view of z's memory whose values are the negatives of what lies there. Its stride is two, so
  // only one with a single element can be dense; and complex numbers are aligned to their size, so an imaginary part
  // never is aligned to twice its own. What is left has to be asked, which costs a small call a tenth of its time. So
  // as_strided() of such a view, torch._neg_view() and complex numbers read from a misaligned buffer are not noticed.
  const bool may_be_negated =
      operand.count == 1 && reinterpret_cast<uintptr_t>(operand.data) % (2 * dtype_bytes(operand.dtype)) != 0;
  return !may_be_negated || !holds(torch.is_neg, object);
}

struct FormatRow {
  char format;  // of the struct module
  DType dtype;
};
constexpr FormatRow kFormats[] = {
    {'f', DType::kFloat32}, {'d', DType::kFloat64}, {'e', DType::kFloat16}, {'b', DType::kInt8},   {'B', DType::kUInt8},
    {'h', DType::kInt16},   {'H', DType::kUInt16},  {'i', DType::kInt32},   {'I', DType::kUInt32}, {'l', DType::kInt64},
    {'q', DType::kInt64},   {'L', DType::kUInt64},  {'Q', DType::kUInt64},  {'?', DType::kBool},
};

bool find_format(const char* format, DType& dtype) {
  if (format == nullptr || format[0] == '\0' || format[1] != '\0') return false;  // a prefix: foreign byte order
  const auto* row = std::ranges::find(kFormats, format[0], &FormatRow::format);
  if (row == std::end(kFormats)) return false;
  dtype = row->dtype;
  return true;
}

bool read_numpy(PyObject* object, Access access, Operand& operand, Shape* shape) {
  Py_buffer view;
  const int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (access == Access::kWrite ? PyBUF_WRITABLE : 0);
  if (PyObject_GetBuffer(object, &view, flags) != 0) return refuse();
  const bool known =
      find_format(view.format, operand.dtype) && static_cast<size_t>(view.itemsize) == dtype_bytes(operand.dtype);
  operand.data = view.buf;
  if (known) operand.count = static_cast<size_t>(view.len) / dtype_bytes(operand.dtype);
  const bool fits = copy_shape(view.shape, view.ndim, shape);
  // The caller's reference keeps the array, and with it the memory.
  PyBuffer_Release(&view);
  return known && fits;
}

const dlpack::ExchangeApi* find_exchange(const py::object& tensor_type) {
  const py::object capsule = py::getattr(tensor_type, dlpack::kAttribute, py::none());
  if (PyCapsule_IsValid(capsule.ptr(), dlpack::kCapsule) == 0) return nullptr;
  const auto* api = static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), dlpack::kCapsule));
  while (api != nullptr && api->major_version != dlpack::kMajorVersion) api = api->older_version;
  return api != nullptr && api->tensor_from_object != nullptr ? api : nullptr;
}

PyObject* forever(py::object object) { return object.release().ptr(); }

bool use_torch(const py::module_& module, py::object written, bool allow_exchange) {
  const py::object tensor = module.attr("Tensor");
  torch.tensor = forever(tensor);
  torch.parameter = forever(module.attr("nn").attr("Parameter"));
  torch.empty_like = forever(module.attr("empty_like"));
  torch.new_empty = forever(tensor.attr("new_empty"));
  torch.written = forever(std::move(written));
  torch.data_ptr = forever(tensor.attr("data_ptr"));
  torch.numel = forever(tensor.attr("numel"));
  torch.is_contiguous = forever(tensor.attr("is_contiguous"));
  torch.is_neg = forever(tensor.attr("is_neg"));
  torch.requires_grad = forever(tensor.attr("requires_grad"));
  torch.strided = forever(module.attr("strided"));
  for (int code = 0; code < kNumDTypes; ++code) {
    torch.dtypes[code] = forever(module.attr(std::string(dtype_name(static_cast<DType>(code))).c_str()));
  }
  torch.exchange = allow_exchange ? find_exchange(tensor) : nullptr;
  return torch.exchange != nullptr;
}

void use_numpy(const py::module_& module) {
  numpy.ndarray = forever(module.attr("ndarray"));
  numpy.empty_like = forever(module.attr("empty_like"));
  numpy.empty = forever(module.attr("empty"));
  numpy.frombuffer = forever(module.attr("frombuffer"));
  for (int code = 0; code < kNumDTypes; ++code) {
    const std::string name(dtype_name(static_cast<DType>(code)));
    if (name != "bfloat16") numpy.dtypes[code] = forever(module.attr("dtype")(name));
  }
}

}  // namespace

bool read_operand(PyObject* object, Access access, Operand& operand, Shape* shape) {
  if (is_torch(object)) return read_torch(object, operand, shape);
  return is_numpy(object) && read_numpy(object, access, operand, shape);
}

bool requires_grad(PyObject* object) {
  if (!is_torch(object)) return false;
  PyObject* answer = nullptr;
  // Asked before every all-reduce, so without looking the attribute up.
  if (Py_IS_TYPE(torch.requires_grad, &PyGetSetDescr_Type)) {
    const PyGetSetDef* getset = reinterpret_cast<PyGetSetDescrObject*>(torch.requires_grad)->d_getset;
    answer = getset->get(object, getset->closure);
  } else {
    answer = PyObject_GetAttrString(object, "requires_grad");
  }
  if (answer == nullptr) PyErr_Clear();
  Py_XDECREF(answer);
  return answer != Py_False;
}

PyObject* empty_like(PyObject* plain) {
  return PyObject_CallOneArg(is_torch(plain) ? torch.empty_like : numpy.empty_like, plain);
}

namespace {

// Null: a Python error is set.
py::object tuple_of(const Shape& shape) {
  auto dims = py::reinterpret_steal<py::object>(PyTuple_New(shape.ndim));
  for (int dim = 0; dims && dim < shape.ndim; ++dim) {
    PyObject* size = PyLong_FromLongLong(shape.dims[dim]);
    if (size == nullptr) return {};
    PyTuple_SET_ITEM(dims.ptr(), dim, size);
  }
  return dims;
}

PyObject* torch_in_core(DType dtype, const Shape& shape, std::shared_ptr<Memory> memory) {
  if (torch.exchange == nullptr || torch.exchange->managed_to_object == nullptr) return nullptr;
  const Operand operand{.data = memory->data(), .dtype = dtype};
  return SharedResults(std::move(memory), 1).make(torch.exchange->managed_to_object, operand, shape);
}

PyObject* numpy_in_core(DType dtype, const Shape& shape, std::shared_ptr<Memory> memory) {
  const py::object buffer = py::cast(std::move(memory)), dims = tuple_of(shape);
  if (!dims) return nullptr;
  PyObject* const args[] = {buffer.ptr(), numpy.dtypes[static_cast<int>(dtype)]};
  const auto flat = py::reinterpret_steal<py::object>(PyObject_Vectorcall(numpy.frombuffer, args, 2, nullptr));
  return flat ? PyObject_CallMethod(flat.ptr(), "reshape", "O", dims.ptr()) : nullptr;
}

}  // namespace

PyObject* new_in_core(PyObject* plain, const Operand& operand, const Shape& shape) {
  try {
    auto memory = Memory::uninitialized(shape.elems() * dtype_bytes(operand.dtype));
    return is_torch(plain) ? torch_in_core(operand.dtype, shape, std::move(memory))
                           : numpy_in_core(operand.dtype, shape, std::move(memory));
  } catch (...) {
    set_error(std::current_exception());
    return nullptr;
  }
}

PyObject* new_empty(PyObject* plain, const Operand& operand, const Shape& shape) {
  const py::object dims = tuple_of(shape);
  if (!dims) return nullptr;
  if (is_torch(plain)) {
    PyObject* const args[] = {plain, dims.ptr()};
    return PyObject_Vectorcall(torch.new_empty, args, 2, nullptr);
  }
  PyObject* const args[] = {dims.ptr(), numpy.dtypes[static_cast<int>(operand.dtype)]};
  return PyObject_Vectorcall(numpy.empty, args, 2, nullptr);
}

bool mark_written(PyObject* plain) {
  if (!is_torch(plain)) return true;
  PyObject* tensors = PyTuple_Pack(1, plain);
  if (tensors == nullptr) return false;
  PyObject* none = PyObject_CallOneArg(torch.written, tensors);
  Py_DECREF(tensors);
  Py_XDECREF(none);
  return none != nullptr;
}

bool mark_all_written(PyObject* list) {
  auto tensors = py::reinterpret_borrow<py::object>(list);
  bool only_torch = true;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) only_torch &= is_torch(PyList_GET_ITEM(list, i));
  if (!only_torch) {
    tensors = py::reinterpret_steal<py::object>(PyList_New(0));
    if (!tensors) return false;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
      PyObject* tensor = PyList_GET_ITEM(list, i);
      if (is_torch(tensor) && PyList_Append(tensors.ptr(), tensor) != 0) return false;
    }
  }
  if (PyList_GET_SIZE(tensors.ptr()) == 0) return true;
  PyObject* none = PyObject_CallOneArg(torch.written, tensors.ptr());
  Py_XDECREF(none);
  return none != nullptr;
}

dlpack::FromManaged maker_of(PyObject* plain) {
  return is_torch(plain) && torch.exchange != nullptr ? torch.exchange->managed_to_object : nullptr;
}

void set_type(dlpack::Tensor& tensor, DType dtype) {
  for (const TypeRow& row : kTypes) {
    if (row.dtype != dtype) continue;
    tensor.type_code = row.code;
    tensor.type_bits = row.bits;
    tensor.type_lanes = 1;
  }
}

void bind_operand(py::module_& m) {
  m.def("use_torch", &use_torch, py::arg("torch"), py::arg("written"), py::arg("allow_exchange") = true);
  m.def("use_numpy", &use_numpy, py::arg("numpy"));
}

}  // namespace dcoll::bind
