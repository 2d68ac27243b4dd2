#include "memory/tensor_view.h"

#include "memory/device_memory.h"
#include "memory/pinned_memory.h"

namespace laggard {

TensorView TensorView::of(const at::Tensor& tensor) {
  TensorView view;
  view.sizes = tensor.sizes().vec();
  view.strides = tensor.strides().vec();
  view.dtype = tensor.scalar_type();
  view.numel = tensor.numel();
  view.conj = tensor.is_conj();
  view.neg = tensor.is_neg();
  if (view.numel == 0) return view;
  view.address = static_cast<const char*>(tensor.const_data_ptr());
  if (tensor.is_privateuseone()) {
    view.memory = kernel_address(view.address);
  } else if (auto* block = pinned_block_of(view.address)) {
    view.memory = copy_address(block, view.address);
  } else {
    view.memory = const_cast<char*>(view.address);
  }
  return view;
}

at::Tensor TensorView::tensor() const {
  auto options = at::TensorOptions().dtype(dtype);
  auto made = numel == 0 ? at::empty_strided(sizes, strides, options) : at::from_blob(memory, sizes, strides, options);
  if (conj) made = made.conj();
  if (neg) made = at::_neg_view(made);
  return made;
}

at::Tensor TensorView::zeros() const {
  return at::empty_strided(sizes, strides, at::TensorOptions().dtype(dtype)).zero_();
}

Region TensorView::region() const {
  if (numel == 0) return {};
  const auto item = static_cast<int64_t>(c10::elementSize(dtype));
  int64_t span = 1;
  for (size_t i = 0; i < sizes.size(); ++i) span += (sizes[i] - 1) * strides[i];
  Region region{address, address + span * item, span == numel, item, {}, {}};
  if (!region.dense) {
    region.sizes = sizes;
    for (int64_t stride : strides) region.byte_strides.push_back(stride * item);
  }
  return region;
}

}  // namespace laggard
