#include "operators/copy.h"

#include "order/launch.h"
#include "memory/pinned_memory.h"
#include "memory/tensor_view.h"

namespace laggard {
namespace {

constexpr size_t kFused = 64;  // tensors that one kernel of CUDA copies

Cost copy_cost(const TensorView& view) {
  return {Cost::COPY, static_cast<double>(view.numel) * static_cast<double>(c10::elementSize(view.dtype)), 0};
}

std::function<void()> copying(TensorView from, TensorView to) {
  return [from = std::move(from), to = std::move(to)] { to.tensor().copy_(from.tensor()); };
}

// Between devices both current streams take part, as in CUDA: the copy starts after both, both wait for it.
void copy_between_devices(const at::Tensor& source, const at::Tensor& target) {
  const auto from = TensorView::of(source), to = TensorView::of(target);
  const int stream = current_stream(source.device().index()), other = current_stream(target.device().index());
  if (stream != other) wait(stream, record(other));
  const bool far = source.device() != target.device();
  Cost cost = copy_cost(from);
  if (!far) cost = {Cost::KERNEL, 2 * cost.bytes, 0};  // a kernel that reads and writes
  launch({stream, "copy device to device", {{from.region(), false}, {to.region(), true}}, copying(from, to), cost});
  if (stream != other) wait(other, record(stream));
}

// From the launch on, no old value may be read: it would hide an early read of an unclosed page.
void poison(const TensorView& view) {
  if (view.region().dense) memset(view.memory, kPoison, view.numel * c10::elementSize(view.dtype));
}

void copy_pinned(const at::Tensor& source, const at::Tensor& target, PinnedBlock* block, bool non_blocking) {
  const bool to_device = source.is_cpu();
  const at::Tensor& host = to_device ? source : target;
  const auto from = TensorView::of(source), to = TensorView::of(target);
  const int stream = current_stream((to_device ? target : source).device().index());
  const Region region = (to_device ? from : to).region();
  {
    std::lock_guard lock(device_lock());
    if (!to_device && !is_in_flight(block, region)) poison(to);
  }
  const char* op = to_device ? "copy host to device" : "copy device to host";
  auto close = [=] { close_pinned_memory(block, region, !to_device, stream); };
  launch({stream,
          op,
          {{from.region(), false}, {to.region(), true}},
          copying(from, to),
          copy_cost(from),
          true,
          {host.storage()},
          close});
  if (!non_blocking) synchronize_stream(stream, "blocking copy");
}

void copy_pageable(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  const auto to = TensorView::of(target);
  if (source.is_cpu()) {  // staged at once: the caller may change its tensor after the call
    const at::Tensor staged = source.clone();
    const int stream = current_stream(target.device().index());
    auto run = copying(TensorView::of(staged), to);
    launch({stream,
            "copy host to device",
            {{to.region(), true}},
            std::move(run),
            copy_cost(to),
            true,
            {staged.storage()}});
    if (!non_blocking) synchronize_stream(stream, "blocking copy");
    return;
  }
  const auto from = TensorView::of(source);
  const int stream = current_stream(source.device().index());
  launch({stream, "copy device to host", {{from.region(), false}}, copying(from, to), copy_cost(from)});
  synchronize_stream(stream, non_blocking ? "copy to memory that is not pinned" : "blocking copy");
}

}  // namespace

at::Tensor copy_from(const at::Tensor& given, const at::Tensor& target, bool non_blocking) {
  at::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto source = given.sizes() == target.sizes() ? given : given.expand(target.sizes());
  if (target.numel() == 0) return target;
  if (source.is_privateuseone() && target.is_privateuseone()) {
    copy_between_devices(source, target);
    return target;
  }
  const at::Tensor& host = source.is_privateuseone() ? target : source;
  TORCH_CHECK(host.is_cpu(), "laggard: copies go to and from the host, not ", host.device());
  if (auto* block = pinned_block_of(host.const_data_ptr())) copy_pinned(source, target, block, non_blocking);
  else copy_pageable(source, target, non_blocking);
  return target;
}

void foreach_copy(at::TensorList targets, at::TensorList sources, bool non_blocking) {
  auto fits = [&](size_t i) {
    const auto &target = targets[i], &source = sources[i];
    return target.device() == targets[0].device() && source.device() == target.device() &&
           source.sizes() == target.sizes();
  };
  at::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  TORCH_CHECK(targets.size() == sources.size() && !targets.empty(), "_foreach_copy_: lists of one length expected");
  const HostSection section;
  const int stream = current_stream(targets[0].device().index());
  for (size_t i = 0; i < targets.size();) {
    std::vector<Use> uses;
    std::vector<std::function<void()>> copies;
    Cost cost{Cost::KERNEL, 0, 0};
    for (; i < targets.size() && copies.size() < kFused && fits(i); ++i) {
      if (targets[i].numel() == 0) continue;
      const auto from = TensorView::of(sources[i]), to = TensorView::of(targets[i]);
      uses.push_back({from.region(), false});
      uses.push_back({to.region(), true});
      cost.bytes += 2 * copy_cost(from).bytes;
      copies.push_back(copying(from, to));
    }
    auto run = [copies = std::move(copies)] {
      for (const auto& copy : copies) copy();
    };
    if (!uses.empty()) launch({stream, "_foreach_copy_", std::move(uses), std::move(run), cost});
    for (; i < targets.size() && !fits(i); ++i) targets[i].copy_(sources[i], non_blocking);
  }
}

}  // namespace laggard
