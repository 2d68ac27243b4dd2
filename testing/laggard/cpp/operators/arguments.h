// The arguments of an operator call, read once, from which host calls are built: one for the stream,
// and one on zeros that only finds out shapes.
#pragma once

#include "order/launch.h"
#include "memory/tensor_view.h"

namespace laggard {

struct Operand {
  bool defined = false, on_device = false;
  TensorView view;      // if it is on the device
  at::Tensor host;      // else a copy: host operands go by value, as arguments of kernels do
  at::Tensor original;  // dropped before the launch
};

struct Argument {
  enum Kind { VALUE, TENSOR, TENSORS, OPTIONAL_TENSORS, DEVICE, GENERATOR };
  Kind kind = VALUE;
  c10::IValue value;  // only for VALUE
  std::vector<Operand> operands;
  bool written = false;  // from the schema's alias info
  bool is_out = false;   // an out= argument
};

struct Arguments {
  std::vector<Argument> list;
  std::optional<c10::Device> device;
  at::Generator generator;

  Arguments(const c10::FunctionSchema& schema, const torch::jit::Stack& stack, size_t first);

  bool has_empty_output() const;  // an out= tensor that the operator has to resize
  bool takes_generator() const;
  void add_uses(std::vector<Use>& uses) const;
  Cost cost(const std::string& op, const std::vector<Use>& uses) const;  // for simulated time
  // Without owners: what a queued kernel may hold.
  Arguments without_owners() const;
  // Values for the CPU kernel. On zeros, or on the device's memory.
  torch::jit::Stack on_zeros(std::optional<uint64_t> seed) const;
  torch::jit::Stack on_memory(std::optional<uint64_t> seed) const;
  // After a call on memory: put what went to out= tensors there; raise if an output was resized.
  void store_outputs(const torch::jit::Stack& call, const std::string& op) const;

 private:
  Operand read(const at::Tensor& tensor);
  torch::jit::Stack build(bool zeros, std::optional<uint64_t> seed) const;
};

}  // namespace laggard
