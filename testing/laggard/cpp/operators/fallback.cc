// PyTorch's own at::native::cpu_fallback is synchronous and copies views; this one does neither.
//
// Results need shapes before the kernel runs. They come from a call of the CPU kernel on zeros (the
// probe). Operators whose shape depends on values wait for the stream, as on every device.
#include "operators/fallback.h"

#include "operators/arguments.h"
#include "operators/generator.h"

namespace laggard {
namespace {

using torch::jit::Stack;
using Views = std::vector<std::vector<TensorView>>;  // for each return, the tensors that the kernel fills
constexpr c10::DispatchKeySet kCpu(c10::DispatchKey::CPU);

class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack)
      : op_(op),
        schema_(op.schema()),
        stack_(stack),
        first_(stack->size() - schema_.arguments().size()),
        name_(full_name(schema_)),
        arguments_(schema_, *stack, first_),
        results_(schema_.returns().size()),
        filled_(schema_.returns().size()) {}

  void run() {
    c10::OptionalDeviceGuard guard(*arguments_.device);
    stream_ = current_stream(arguments_.device->index());
    draw_seed();
    const bool needs_shapes = has_new_results() || arguments_.has_empty_output();
    std::optional<Stack> shapes;
    if (!depends_on_values() && needs_shapes) shapes = probe();
    if (depends_on_values() || (needs_shapes && !shapes)) {
      run_and_wait();
    } else {
      if (shapes) allocate_like(*shapes);
      launch_kernel();
    }
    return_aliases();
    stack_->resize(first_);
    for (auto& result : results_) stack_->push_back(std::move(result));
  }

 private:
  static std::string full_name(const c10::FunctionSchema& schema) {
    return schema.name() + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
  }

  // Each random kernel gets a generator of its own, so that numbers do not depend on the schedule.
  void draw_seed() {
    if (!op_.hasTag(at::Tag::nondeterministic_seeded)) return;
    TORCH_CHECK(arguments_.takes_generator(), "laggard: ", name_,
                " is random and takes no generator; give it a kernel");
    seed_ = next_seed(arguments_.generator, arguments_.device->index());
  }

  bool has_new_results() const {
    bool any = false;
    for (const auto& declared : schema_.returns()) {
      if (!declared.alias_info()) any = true;
      else TORCH_CHECK(declared.alias_info()->isWrite(), "laggard: ", name_, " is a view; give it a kernel");
    }
    return any;
  }

  bool depends_on_values() const {
    if (op_.hasTag(at::Tag::dynamic_output_shape) || op_.hasTag(at::Tag::data_dependent_output)) return true;
    return std::any_of(schema_.returns().begin(), schema_.returns().end(), [](const c10::Argument& declared) {
      const auto kind = declared.type()->kind();
      return kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType;
    });
  }

  // Return the results of the CPU kernel on zeros; none if it refuses zeros (multinomial does).
  std::optional<Stack> probe() {
    Stack call = arguments_.on_zeros(seed_), returned = call;
    try {
      op_.redispatchBoxed(kCpu, &returned);
    } catch (const c10::Error&) {
      return std::nullopt;
    }
    for (size_t i = 0; i < arguments_.list.size(); ++i) {
      auto& argument = arguments_.list[i];
      if (!argument.written || argument.kind != Argument::TENSOR || !argument.operands[0].defined) continue;
      auto& operand = argument.operands[0];
      const auto& resized = call[i].toTensor();
      if (resized.sizes() == at::IntArrayRef(operand.view.sizes)) continue;
      operand.original.resize_(resized.sizes());
      operand.view = TensorView::of(operand.original);
    }
    return returned;
  }

  at::Tensor device_tensor_like(const at::Tensor& host) const {
    if (!host.defined()) return {};
    return at::empty_strided(host.sizes(), host.strides(),
                             host.options().device(*arguments_.device).pinned_memory(false));
  }

  void allocate_like(const Stack& returned) {
    auto allocate = [&](const at::Tensor& host, size_t i) {
      auto tensor = device_tensor_like(host);
      filled_[i].push_back(tensor.defined() ? TensorView::of(tensor) : TensorView());
      return tensor;
    };
    for (size_t i = 0; i < results_.size(); ++i) {
      if (schema_.returns()[i].alias_info()) continue;
      if (returned[i].isTensor()) {
        results_[i] = allocate(returned[i].toTensor(), i);
      } else if (returned[i].isTensorList()) {
        c10::List<at::Tensor> tensors;
        for (const auto& host : returned[i].toTensorVector()) tensors.push_back(allocate(host, i));
        results_[i] = tensors;
      } else {
        results_[i] = returned[i];
      }
    }
  }

  static void store(const Stack& returned, const Views& filled) {
    for (size_t i = 0; i < filled.size(); ++i) {
      if (filled[i].empty()) continue;
      const auto tensors =
          returned[i].isTensor() ? std::vector<at::Tensor>{returned[i].toTensor()} : returned[i].toTensorVector();
      for (size_t j = 0; j < tensors.size(); ++j)
        if (tensors[j].defined() && filled[i][j].numel) filled[i][j].tensor().copy_(tensors[j]);
    }
  }

  // A function that runs the CPU kernel on the device's memory and returns its results.
  std::function<Stack()> kernel() const {
    return [op = op_, name = name_, seed = seed_, arguments = arguments_.without_owners()] {
      Stack call = arguments.on_memory(seed), returned = call;
      op.redispatchBoxed(kCpu, &returned);
      arguments.store_outputs(call, name);
      return returned;
    };
  }

  void launch_kernel() {
    std::vector<Use> uses;
    arguments_.add_uses(uses);
    for (const auto& views : filled_)
      for (const auto& view : views) uses.push_back({view.region(), true});
    auto run = [kernel = kernel(), filled = filled_] { store(kernel(), filled); };
    const Cost cost = arguments_.cost(name_, uses);
    launch({stream_, name_, std::move(uses), std::move(run), cost});
  }

  void run_and_wait() {
    std::vector<Use> uses;
    arguments_.add_uses(uses);
    auto returned = std::make_shared<Stack>();
    const Cost cost = arguments_.cost(name_, uses);
    auto run = [kernel = kernel(), returned] { *returned = kernel(); };
    launch({stream_, name_, std::move(uses), std::move(run), cost});
    synchronize_stream(stream_, ("result of " + name_).c_str());
    allocate_like(*returned);
    launch({stream_, name_, {}, [returned, filled = filled_] { store(*returned, filled); }});
  }

  void return_aliases() {
    for (size_t i = 0; i < results_.size(); ++i) {
      const auto* wanted = schema_.returns()[i].alias_info();
      for (size_t j = 0; wanted && j < arguments_.list.size(); ++j) {
        const auto* offered = schema_.arguments()[j].alias_info();
        if (!offered || !(*offered == *wanted)) continue;
        results_[i] = (*stack_)[first_ + j];
        break;
      }
    }
  }

  c10::OperatorHandle op_;
  const c10::FunctionSchema& schema_;
  Stack* stack_;
  size_t first_;
  std::string name_;
  Arguments arguments_;
  std::vector<c10::IValue> results_;
  Views filled_;
  std::optional<uint64_t> seed_;
  int stream_ = 0;
};

}  // namespace

void run_on_stream(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const HostSection section;
  Call(op, stack).run();
}

}  // namespace laggard
