#include "torch_tensor.h"

#include <nanobind/stl/vector.h>

#include <cstring>

namespace nb = nanobind;

namespace paceline {
namespace {

// DLPack 1.x, as https://dmlc.github.io/dlpack specifies it; only what is used here.
struct DLTensor {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *shape, *strides;
  uint64_t byte_offset;
};
static_assert(sizeof(DLTensor) == 48);

struct ExchangeApi {
  uint32_t major, minor;
  ExchangeApi* older;
  void *allocate, *managed_from_object, *object_from_managed;
  int (*tensor_from_object)(void* object, DLTensor* out);
  void* current_stream;
};

constexpr uint32_t kMajor = 1;
constexpr int32_t kCpu = 1;
enum Code : uint8_t { kInt = 0, kUint = 1, kFloat = 2, kBfloat = 4, kBool = 6 };

PyTypeObject* tensor_types[2];  // torch's Tensor and Parameter; subclasses may have no memory of their own
int (*read)(void*, DLTensor*) = nullptr;
PyObject *is_neg, *grad_name;  // names of attributes

// The number of 8, 16, 32 or 64 bits in this order.
DType sized(DType of_8_bits, uint8_t bits) {
  const int number = bits == 8 ? 0 : bits == 16 ? 1 : bits == 32 ? 2 : bits == 64 ? 3 : -1;
  return number < 0 ? DType::count_ : DType(int(of_8_bits) + number);
}

DType dtype_of(const DLTensor& t) {
  if (t.lanes != 1) return DType::count_;
  switch (t.code) {
    case kFloat:
      return t.bits == 32   ? DType::float32
             : t.bits == 64 ? DType::float64
             : t.bits == 16 ? DType::float16
                            : DType::count_;
    case kBfloat: return t.bits == 16 ? DType::bfloat16 : DType::count_;
    case kInt: return sized(DType::int8, t.bits);
    case kUint: return sized(DType::uint8, t.bits);
    case kBool: return t.bits == 8 ? DType::boolean : DType::count_;
    default: return DType::count_;
  }
}

// Called once, by the module that imports torch.
bool use_tensor_types(nb::type_object tensor, nb::type_object parameter) {
  tensor_types[0] = reinterpret_cast<PyTypeObject*>(tensor.ptr());
  tensor_types[1] = reinterpret_cast<PyTypeObject*>(parameter.ptr());
  nb::object capsule = nb::getattr(tensor, "__dlpack_c_exchange_api__", nb::none());
  if (!PyCapsule_CheckExact(capsule.ptr())) return false;
  auto* api = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (!api) throw nb::python_error();
  while (api && api->major != kMajor) api = api->older;
  is_neg = PyUnicode_InternFromString("is_neg");
  grad_name = PyUnicode_InternFromString("grad");
  if (api && is_neg && grad_name) read = api->tensor_from_object;
  return read != nullptr;
}

// Copies the gradient of each contiguous parameter to its place. Returns the numbers of those that the caller has to
// copy: what is not a plain tensor of as many elements of that dtype.
std::vector<size_t> copy_gradients(nb::list parameters, const std::vector<uintptr_t>& places,
                                   const std::vector<uint64_t>& counts, int dtype) {
  const size_t n = parameters.size();
  if (places.size() != n || counts.size() != n) throw nb::value_error("copy_gradients: lists of different lengths");
  std::vector<size_t> left;
  for (size_t i = 0; i < n; ++i) {
    nb::object grad = nb::steal(PyObject_GetAttr(PyList_GET_ITEM(parameters.ptr(), Py_ssize_t(i)), grad_name));
    if (!grad.is_valid()) throw nb::python_error();
    TensorMemory memory;
    bool is_plain = read_tensor(grad.ptr(), memory) && memory.count == counts[i] && memory.dtype == DType(dtype);
    if (is_plain) std::memcpy(reinterpret_cast<void*>(places[i]), memory.data, memory.count * size_of(memory.dtype));
    else left.push_back(i);
  }
  return left;
}

}  // namespace

bool read_tensor(PyObject* object, TensorMemory& memory) {
  if (!read || (Py_TYPE(object) != tensor_types[0] && Py_TYPE(object) != tensor_types[1])) return false;
  DLTensor t;
  if (read(object, &t) != 0) {  // sparse, for example
    PyErr_Clear();
    return false;
  }
  if (t.device_type != kCpu || !t.data) return false;
  uint64_t count = 1;
  for (int i = t.ndim; i-- > 0;) {
    if (t.shape[i] != 1 && t.strides && uint64_t(t.strides[i]) != count) return false;
    count *= uint64_t(t.shape[i]);
  }
  memory = {static_cast<char*>(t.data) + t.byte_offset, count, dtype_of(t), t.ndim, t.shape};
  if (count == 0 || memory.dtype == DType::count_) return false;
  nb::object negative = nb::steal(PyObject_VectorcallMethod(is_neg, &object, 1, nullptr));  // its memory lacks the sign
  if (!negative.is_valid()) throw nb::python_error();
  return negative.ptr() == Py_False;
}

bool is_defined(ReduceOp op, DType dtype) {
  switch (op) {
    case ReduceOp::mean: return is_floating(dtype);
    case ReduceOp::bit_and:
    case ReduceOp::bit_or:
    case ReduceOp::bit_xor: return !is_floating(dtype);
    default: return op < ReduceOp::count_;
  }
}

void register_torch_tensor(nb::module_& m) {
  m.def("copy_gradients", &copy_gradients, nb::arg("parameters"), nb::arg("places"), nb::arg("counts"),
        nb::arg("dtype"));
  m.def("use_tensor_types", &use_tensor_types, nb::arg("tensor"), nb::arg("parameter"));
  m.def(
      "reads_tensor",
      [](nb::handle tensor) {
        TensorMemory memory;
        return read_tensor(tensor.ptr(), memory);
      },
      nb::arg("tensor").none());
}

}  // namespace paceline
