// Which operators have kernels of their own: memory, copies, views, and what the fallback cannot do.
#include "operators/copy.h"
#include "operators/fallback.h"
#include "order/launch.h"
#include "memory/device_memory.h"
#include "memory/tensor_view.h"

namespace laggard {
namespace {

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

c10::Device device_or_current(std::optional<c10::Device> device) {
  return device && device->has_index() ? *device : c10::Device(kDeviceType, current_device);
}

at::Tensor empty(c10::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_generic(sizes, &device_allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_strided_generic(sizes, strides, &device_allocator(), kKeys, c10::dtype_or_default(dtype));
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef sizes, std::optional<c10::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  if (format && *format != c10::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  const size_t bytes = (self.storage_offset() + self.numel()) * self.element_size();
  if (self.storage().nbytes() < bytes) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
  return self;
}

at::Scalar local_scalar(const at::Tensor& self) {
  const auto view = TensorView::of(self);
  const int stream = current_stream(self.device().index());
  auto value = std::make_shared<at::Scalar>();
  launch({stream, "item", {{view.region(), false}}, [view, value] { *value = view.tensor().item(); }});
  synchronize_stream(stream, "item");
  return *value;
}

void record_stream_of_tensor(at::Tensor& self, c10::Stream stream) {
  record_stream(self.storage().data_ptr(), stream_of(stream));
}

// The CPU's takes no generator, so it would not be reproducible.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& x, double p, std::optional<bool> train) {
  const auto mask_options = x.options().dtype(at::kBool);
  if (p == 0 || (train && !*train)) return {x.clone(), at::ones_like(x, mask_options)};
  auto mask = at::empty_like(x, mask_options).bernoulli_(1 - p);
  return {x.mul(mask).mul_(p == 1 ? 0. : 1 / (1 - p)), mask};
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_stream>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_);
  m.impl("_copy_from", copy_from);
  m.impl("_foreach_copy_", foreach_copy);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("record_stream", record_stream_of_tensor);
  m.impl("native_dropout", native_dropout);
  // These would be taken apart before they reach the fallback.
  m.impl("convolution", torch::CppFunction::makeFromBoxedFunction<&run_on_stream>());
  m.impl("convolution_backward", torch::CppFunction::makeFromBoxedFunction<&run_on_stream>());
  m.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&run_on_stream>());
  // Views touch no memory.
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", static_cast<at::Tensor (*)(const at::Tensor&, at::IntArrayRef)>(at::native::view));
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("set_.source_Storage", static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(at::native::set_));
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("is_set_to", at::native::is_set_to);
}

// copy_ handles these bits itself; without this _copy_from calls resolve_conj, that copy_, and so on for ever.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

}  // namespace laggard
