// Sparse gradients of embeddings: what backward, averaging and plain SGD do with them.
//
// Indices and values are ordinary tensors of the device. To coalesce waits for the device, as on CUDA, because the
// number of entries depends on the data.
#include "torch_headers.h"

namespace laggard {
namespace {

at::Tensor on_device(const at::Tensor& host, const at::Tensor& like) {
  auto made =
      at::_sparse_coo_tensor_unsafe(host._indices().to(like.device()), host._values().to(like.device()), like.sizes());
  return made._coalesced_(true);
}

at::Tensor coalesce(const at::Tensor& self) {
  if (self.is_coalesced()) return self;
  return on_device(at::_sparse_coo_tensor_unsafe(self._indices().cpu(), self._values().cpu(), self.sizes()).coalesce(),
                   self);
}

// dense += alpha * sparse, along the first dimension; or two sparse tensors with all their entries.
at::Tensor& add_(at::Tensor& self, const at::Tensor& other, const at::Scalar& alpha) {
  if (self.is_sparse()) {
    const auto indices = at::cat({self._indices(), other._indices()}, 1);
    const auto values = at::cat({self._values(), other._values().mul(alpha)});
    return self.copy_(at::_sparse_coo_tensor_unsafe(indices, values, self.sizes()));
  }
  TORCH_CHECK(other.sparse_dim() == 1, "laggard adds sparse tensors with one sparse dimension");
  return self.index_add_(0, other._indices().select(0, 0), other._values(), alpha);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
  m.impl("_sparse_coo_tensor_with_dims", at::native::new_with_dims_sparse);
  m.impl("_sparse_coo_tensor_with_dims_and_tensors", at::native::new_with_dims_and_tensor_sparse_symint);
  m.impl("sparse_dim", at::native::sparse_dim_sparse);
  m.impl("dense_dim", at::native::dense_dim_sparse);
  m.impl("_nnz", at::native::_nnz_sparse);
  m.impl("is_coalesced", at::native::is_coalesced_sparse);
  m.impl("_coalesced_", at::native::_coalesced_sparse_);
  m.impl("_indices", at::native::_indices_sparse);
  m.impl("_values", at::native::_values_sparse);
  m.impl("indices", at::native::indices_sparse);
  m.impl("values", at::native::values_sparse);
  m.impl("copy_sparse_to_sparse_", at::native::copy_sparse_);
  m.impl("copy_", at::native::copy_sparse_wrapper_);
  m.impl("clone", at::native::clone_sparse);
  m.impl("_coalesce", coalesce);
  m.impl("add_.Tensor", add_);
}

}  // namespace laggard
