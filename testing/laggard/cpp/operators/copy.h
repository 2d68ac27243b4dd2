// Copies between host and devices. Only pinned host memory is copied asynchronously.
#pragma once

#include "torch_headers.h"

namespace laggard {

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking);
// Fused, as on CUDA: a launch for up to 64 tensors.
void foreach_copy(at::TensorList targets, at::TensorList sources, bool non_blocking);

}  // namespace laggard
