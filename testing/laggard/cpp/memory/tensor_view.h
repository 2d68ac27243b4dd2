// A tensor as a queued kernel sees it: an address and a shape, but no owner.
//
// A queue that held storages would keep memory alive that the program has freed, and hide the bug
// "freed while another stream still uses it".
#pragma once

#include "order/region.h"
#include "torch_headers.h"

namespace laggard {

struct TensorView {
  char* memory = nullptr;         // where a kernel may touch it
  const char* address = nullptr;  // what the program sees
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype = at::kFloat;
  int64_t numel = 0;
  bool conj = false, neg = false;

  static TensorView of(const at::Tensor& tensor);  // of a device, pinned or plain host tensor

  at::Tensor tensor() const;  // a host tensor over the same memory
  at::Tensor zeros() const;   // a host tensor of the same shape
  Region region() const;
};

}  // namespace laggard
