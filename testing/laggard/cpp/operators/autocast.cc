// torch.autocast("laggard"): PyTorch's own lists of operators for lower precision and for float32.
#include "torch_headers.h"

namespace at::autocast {

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LAGGARD_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define LAGGARD_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_LOWER_PRECISION_FP(LAGGARD_LOWER)
  AT_FORALL_FP32(LAGGARD_FP32)
}

}  // namespace at::autocast
