#include "operators/arguments.h"

namespace laggard {

Operand Arguments::read(const at::Tensor& tensor) {
  Operand operand;
  if (!tensor.defined()) return operand;
  operand.defined = true;
  operand.original = tensor;
  if (!tensor.is_privateuseone()) {
    operand.host = tensor.clone();
    return operand;
  }
  TORCH_CHECK(!device || *device == tensor.device(), "laggard: tensors of one operator are on ", *device, " and on ",
              tensor.device(), "; move one of them");
  device = tensor.device();
  operand.on_device = true;
  operand.view = TensorView::of(tensor);
  return operand;
}

Arguments::Arguments(const c10::FunctionSchema& schema, const torch::jit::Stack& stack, size_t first) {
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto& declared = schema.arguments()[i];
    const c10::IValue& value = stack[first + i];
    Argument argument;
    argument.written = declared.alias_info() && declared.alias_info()->isWrite();
    argument.is_out = declared.is_out();
    if (value.isTensor()) {
      argument.kind = Argument::TENSOR;
      argument.operands.push_back(read(value.toTensor()));
    } else if (value.isTensorList()) {
      argument.kind = Argument::TENSORS;
      for (const auto& tensor : value.toTensorVector()) argument.operands.push_back(read(tensor));
    } else if (value.isOptionalTensorList()) {
      argument.kind = Argument::OPTIONAL_TENSORS;
      for (const auto& tensor : value.toOptionalTensorVector())
        argument.operands.push_back(tensor ? read(*tensor) : Operand{});
    } else if (value.isDevice()) {
      argument.kind = Argument::DEVICE;
      if (!device) device = value.toDevice();
    } else if (declared.name() == "generator") {
      argument.kind = Argument::GENERATOR;
      if (value.isGenerator()) generator = value.toGenerator();
    } else {
      argument.value = value;
    }
    if (argument.written)
      for (const auto& operand : argument.operands)
        TORCH_CHECK(!operand.defined || operand.on_device, "laggard: ", schema.name(), " would write a host tensor");
    list.push_back(std::move(argument));
  }
  if (!device || !device->has_index()) device = c10::Device(kDeviceType, current_device);
}

bool Arguments::has_empty_output() const {
  return std::any_of(list.begin(), list.end(), [](const Argument& a) {
    return a.written && a.kind == Argument::TENSOR && a.operands[0].defined && a.operands[0].view.numel == 0;
  });
}

bool Arguments::takes_generator() const {
  return std::any_of(list.begin(), list.end(), [](const Argument& a) { return a.kind == Argument::GENERATOR; });
}

void Arguments::add_uses(std::vector<Use>& uses) const {
  for (const auto& argument : list)
    for (const auto& operand : argument.operands)
      if (operand.on_device) uses.push_back({operand.view.region(), argument.written});
}

// Bytes of all that is read or written; operations only of matrix products, which are most of them.
Cost Arguments::cost(const std::string& op, const std::vector<Use>& uses) const {
  Cost cost{Cost::KERNEL, 0, 0};
  for (const auto& use : uses) cost.bytes += static_cast<double>(use.region.end - use.region.begin);
  if (op.find("mm") == std::string::npos) return cost;
  std::vector<const TensorView*> matrices;  // a bias comes first; the output, if it is an argument, last
  for (const auto& argument : list)
    if (argument.kind == Argument::TENSOR && argument.operands[0].on_device && !argument.is_out)
      matrices.push_back(&argument.operands[0].view);
  if (matrices.size() < 2) return cost;
  const auto &left = *matrices[matrices.size() - 2], &right = *matrices.back();
  if (left.sizes.size() >= 2 && right.sizes.size() >= 2)
    cost.flops = 2.0 * static_cast<double>(left.numel) * static_cast<double>(right.sizes.back());
  return cost;
}

Arguments Arguments::without_owners() const {
  Arguments copy = *this;
  for (auto& argument : copy.list)
    for (auto& operand : argument.operands) operand.original = at::Tensor();
  return copy;
}

torch::jit::Stack Arguments::on_zeros(std::optional<uint64_t> seed) const { return build(true, seed); }
torch::jit::Stack Arguments::on_memory(std::optional<uint64_t> seed) const { return build(false, seed); }

torch::jit::Stack Arguments::build(bool zeros, std::optional<uint64_t> seed) const {
  auto tensor_of = [&](const Operand& operand) {
    if (!operand.defined) return at::Tensor();
    if (!operand.on_device) return operand.host;
    return zeros ? operand.view.zeros() : operand.view.tensor();
  };
  torch::jit::Stack stack;
  for (const auto& argument : list) {
    switch (argument.kind) {
      case Argument::VALUE: stack.push_back(argument.value); break;
      case Argument::DEVICE: stack.push_back(c10::IValue(c10::Device(at::kCPU))); break;
      case Argument::GENERATOR:
        stack.push_back(seed ? c10::IValue(at::make_generator<at::CPUGeneratorImpl>(*seed)) : c10::IValue());
        break;
      case Argument::TENSOR: {
        // CPU kernels may resize an out= tensor; memory that is not theirs cannot be, so they get their own.
        const Operand& operand = argument.operands[0];
        const bool own = argument.is_out && operand.defined && !zeros;
        stack.push_back(own ? at::empty_strided(operand.view.sizes, operand.view.strides, operand.view.dtype)
                            : tensor_of(operand));
        break;
      }
      case Argument::TENSORS: {
        c10::List<at::Tensor> tensors;
        for (const auto& operand : argument.operands) tensors.push_back(tensor_of(operand));
        stack.push_back(tensors);
        break;
      }
      case Argument::OPTIONAL_TENSORS: {
        c10::List<std::optional<at::Tensor>> tensors;
        for (const auto& operand : argument.operands)
          tensors.push_back(operand.defined ? std::optional<at::Tensor>(tensor_of(operand)) : std::nullopt);
        stack.push_back(tensors);
        break;
      }
    }
  }
  return stack;
}

void Arguments::store_outputs(const torch::jit::Stack& call, const std::string& op) const {
  for (size_t i = 0; i < list.size(); ++i) {
    const auto& argument = list[i];
    if (!argument.written || argument.kind != Argument::TENSOR || !argument.operands[0].defined) continue;
    const auto& view = argument.operands[0].view;
    const auto& result = call[i].toTensor();
    TORCH_CHECK(result.sizes() == at::IntArrayRef(view.sizes), "laggard: ", op, " resized its output from ",
                at::IntArrayRef(view.sizes), " to ", result.sizes());
    if (view.numel == 0) continue;
    if (argument.is_out) view.tensor().copy_(result);
    else TORCH_CHECK(result.data_ptr() == view.memory, "laggard: ", op, " moved its output");
  }
}

}  // namespace laggard
