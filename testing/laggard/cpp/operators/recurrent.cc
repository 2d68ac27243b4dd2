// Fused cells of LSTM and GRU: PyTorch calls them on devices, and the CPU has no kernel for them.
// Gates after their activation are the workspace for backward.
#include <tuple>

#include "torch_headers.h"

namespace laggard {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

Tensor plus(const Tensor& gates, const OptionalTensor& bias) { return bias && bias->defined() ? gates + *bias : gates; }

Tensor bias_gradient(const Tensor& gates, bool has_bias) { return has_bias ? gates.sum(0, false) : Tensor(); }
Tensor of_sigmoid(const Tensor& y) { return (1 - y) * y; }
Tensor of_tanh(const Tensor& y) { return 1 - y * y; }

std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& from_input, const Tensor& from_hidden, const Tensor& cx,
                                             const OptionalTensor& input_bias, const OptionalTensor& hidden_bias) {
  const auto gates = (plus(from_input, input_bias) + plus(from_hidden, hidden_bias)).chunk(4, 1);
  const auto in = gates[0].sigmoid(), forget = gates[1].sigmoid(), cell = gates[2].tanh(), out = gates[3].sigmoid();
  const auto cy = forget * cx + in * cell;
  return {out * cy.tanh(), cy, at::cat({in, forget, cell, out}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const OptionalTensor& grad_hy, const OptionalTensor& grad_cy,
                                                      const Tensor& cx, const Tensor& cy, const Tensor& workspace,
                                                      bool has_bias) {
  const auto gates = workspace.chunk(4, 1);
  const auto &in = gates[0], &forget = gates[1], &cell = gates[2], &out = gates[3];
  const auto tanh = cy.tanh();
  const auto dh = grad_hy && grad_hy->defined() ? *grad_hy : at::zeros_like(cx);
  auto dc = dh * out * of_tanh(tanh);
  if (grad_cy && grad_cy->defined()) dc = dc + *grad_cy;
  const auto d_gates = at::cat(
      {dc * cell * of_sigmoid(in), dc * cx * of_sigmoid(forget), dc * in * of_tanh(cell), dh * tanh * of_sigmoid(out)},
      1);
  return {d_gates, dc * forget, bias_gradient(d_gates, has_bias)};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor& from_input, const Tensor& from_hidden, const Tensor& hx,
                                    const OptionalTensor& input_bias, const OptionalTensor& hidden_bias) {
  const auto x = plus(from_input, input_bias).chunk(3, 1), h = plus(from_hidden, hidden_bias).chunk(3, 1);
  const auto reset = (x[0] + h[0]).sigmoid(), update = (x[1] + h[1]).sigmoid(), fresh = (x[2] + reset * h[2]).tanh();
  return {fresh + update * (hx - fresh), at::cat({reset, update, fresh, hx, h[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& grad_hy, const Tensor& workspace,
                                                                     bool has_bias) {
  const auto saved = workspace.chunk(5, 1);
  const auto &reset = saved[0], &update = saved[1], &fresh = saved[2], &hx = saved[3], &hidden = saved[4];
  const auto d_fresh = grad_hy * (1 - update) * of_tanh(fresh);
  const auto d_update = grad_hy * (hx - fresh) * of_sigmoid(update);
  const auto d_reset = d_fresh * hidden * of_sigmoid(reset);
  const auto d_input = at::cat({d_reset, d_update, d_fresh}, 1);
  const auto d_hidden = at::cat({d_reset, d_update, d_fresh * reset}, 1);
  return {d_input, d_hidden, grad_hy * update, bias_gradient(d_input, has_bias), bias_gradient(d_hidden, has_bias)};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
}

}  // namespace laggard
