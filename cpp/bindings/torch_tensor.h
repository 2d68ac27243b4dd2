// The memory of a torch tensor, without a call into Python and without torch's headers.
#pragma once
#include <nanobind/nanobind.h>

#include "paceline/reduce/dtype.h"

namespace paceline {

struct TensorMemory {
  void* data;
  uint64_t count;
  DType dtype;
  int ndim;
  const int64_t* shape;  // belongs to the tensor
};

// Reads the memory of a contiguous CPU tensor that has elements of a dtype of the engine. False for anything else, and
// always if this torch does not export its tensors (`__dlpack_c_exchange_api__`). Under the GIL.
bool read_tensor(PyObject* object, TensorMemory& memory);

// Whether a reduction of such elements needs no further checks.
bool is_defined(ReduceOp op, DType dtype);

void register_torch_tensor(nanobind::module_& m);

}  // namespace paceline
