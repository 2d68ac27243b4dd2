// Copies between host and devices. Only pinned host memory is copied asynchronously.
#pragma once

#include "torch_headers.h"

namespace laggard {

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking);

}  // namespace laggard
