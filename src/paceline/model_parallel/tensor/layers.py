"""Sharded layers: what a linear layer, convolution, embedding, norm or attention does with shards.

A module keeps its parameters' objects and names; its class becomes one of these, so that copies,
hooks and `isinstance(module, nn.Linear)` still work.

    column         rows of the matrix (output features, channels): full -> sharded
    row            columns of the matrix (input features, channels): sharded -> full, one all-reduce
    embedding      rows of the table: masked lookup, one all-reduce
    vocabulary     a column whose result is the model's output: sharded logits for the loss, full
                   without autograd
    channel norm   BatchNorm of sharded channels, with its buffers
    attention      each process has some heads of q, k and v: one all-reduce forward, after the
                   output projection, and one backward (one for each different tensor among query,
                   key and value)
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.model_parallel.tensor.axis import Axis
from paceline.model_parallel.tensor.rules import per_process_rng
from paceline.model_parallel.tensor.sharded_tensor import ShardedTensor

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass
class SharedInput:
    """The input that several columns share: one all-reduce in backward for q, k and v."""

    full: Tensor | None = None
    entered: Tensor | None = None
    with_grad: bool = False

    def __deepcopy__(self, _memo: object) -> SharedInput:
        return SharedInput()

    def enter(self, full: Tensor, axis: Axis, label: str) -> Tensor:
        with_grad = torch.is_grad_enabled()
        if self.full is not full or self.entered is None or self.with_grad != with_grad:
            entered = axis.enter(full, label)
            self.full, self.entered, self.with_grad = full, entered, with_grad
        return self.entered

    def release(self) -> None:
        self.full = self.entered = None


@dataclass
class LayerSharding:
    """How one module is sharded."""

    axis: Axis
    label: str  # the module's name
    blocks: int = 1
    shared_input: SharedInput | None = None  # of columns with the same input
    releases: tuple[SharedInput, ...] = ()  # of a row: the inputs of its columns, which it releases


class _Share(torch.autograd.Function):
    """A bias as every process adds it before the sum: divided by the count, with full gradient."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, count: int) -> Tensor:
        del ctx
        return bias / count

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        del ctx
        return grad, None


def share(bias: Tensor, count: int) -> Tensor:
    """Return what each process adds of a bias before the sum over the axis."""
    shared: Tensor = _Share.apply(bias, count)  # type: ignore[no-untyped-call]
    return shared


def feature_dim(module: nn.Module, tensor: Tensor) -> int:
    """Return the dimension of features or channels: the last, or the one before the image's."""
    if isinstance(module, CONVOLUTIONS):
        return tensor.ndim - 1 - len(module.kernel_size)
    return tensor.ndim - 1


def apply_weight(module: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply or convolve with these parameters instead of the module's."""
    if isinstance(module, CONVOLUTIONS):
        convolved: Tensor = module._conv_forward(x, weight, bias)
        return convolved
    return F.linear(x, weight, bias)


def column(
    module: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None, sharding: LayerSharding
) -> ShardedTensor:
    """Return sharded features of a full tensor."""
    if isinstance(x, ShardedTensor):
        x = x.full_tensor()
    if sharding.shared_input is None:
        x = sharding.axis.enter(x, sharding.label)
    else:
        x = sharding.shared_input.enter(x, sharding.axis, sharding.label)
    local = apply_weight(module, x, weight, bias)
    dim = feature_dim(module, local)
    return ShardedTensor(local, dim, sharding.axis, frozenset([sharding.label]), sharding.blocks)


def row(
    module: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None, sharding: LayerSharding
) -> Tensor:
    """Return full features of a sharded tensor (or of the local shard of a full one)."""
    axis = sharding.axis
    dim = feature_dim(module, x)
    if isinstance(x, ShardedTensor) and (x.shard_dim, x.blocks) == (dim, sharding.blocks):
        x = x.local
    else:
        full = x.full_tensor() if isinstance(x, ShardedTensor) else x
        x = axis.shard(full, dim, sharding.blocks, sharding.label)
    for shared_input in sharding.releases:
        shared_input.release()
    shared = None if bias is None else share(bias, axis.count)
    return axis.leave(apply_weight(module, x, weight, shared), sharding.label)


def lookup(module: nn.Embedding, index: Tensor, weight: Tensor, sharding: LayerSharding) -> Tensor:
    """Look up the local rows, zero elsewhere, and sum over the axis."""
    axis, size = sharding.axis, len(weight)
    ours = index - axis.index * size
    is_elsewhere = (ours < 0) | (ours >= size)
    padding = module.padding_idx
    if padding is not None:
        padding -= axis.index * size
        padding = padding if 0 <= padding < size else None
    local = F.embedding(ours.masked_fill(is_elsewhere, 0), weight, padding)
    return axis.leave(local.masked_fill(is_elsewhere[..., None], 0), sharding.label)


class ShardedModule(nn.Module):
    """A module whose class was changed to a sharded one."""

    sharding: LayerSharding


class ColumnLinear(ShardedModule, nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return column(self, input, self.weight, self.bias, self.sharding)


class RowLinear(ShardedModule, nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return row(self, input, self.weight, self.bias, self.sharding)


class VocabularyLinear(ShardedModule, nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        sharded = column(self, input, self.weight, self.bias, self.sharding)
        return sharded if torch.is_grad_enabled() else sharded.full_tensor()


class ShardedEmbedding(ShardedModule, nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return lookup(self, input, self.weight, self.sharding)


class _ShardedBatchNorm(ShardedModule):
    def forward(self, input: Tensor) -> Tensor:
        axis = self.sharding.axis
        if isinstance(input, ShardedTensor) and (input.shard_dim, input.blocks) == (
            1,
            self.sharding.blocks,
        ):
            return input.like(super().forward(input.local), 1)
        full = input.full_tensor() if isinstance(input, ShardedTensor) else input
        local = axis.shard(full, 1, self.sharding.blocks, self.sharding.label)
        origins = frozenset([self.sharding.label])
        normed: Tensor = super().forward(local)
        return ShardedTensor(normed, 1, axis, origins, self.sharding.blocks)


class _ColumnConvolution(ShardedModule):
    weight: Tensor
    bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        return column(self, input, self.weight, self.bias, self.sharding)


class _RowConvolution(ShardedModule):
    weight: Tensor
    bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        return row(self, input, self.weight, self.bias, self.sharding)


def can_shard(module: nn.MultiheadAttention) -> bool:
    """Return whether it uses none of the rare options that are not sharded."""
    return module.bias_k is None and module.bias_v is None and not module.add_zero_attn


class ShardedAttention(ShardedModule, nn.MultiheadAttention):
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        axis, label = self.sharding.axis, self.sharding.label
        is_batched = query.ndim == 3
        full = {id(one): one for one in (query, key, value)}
        entered = {number: axis.enter(one, label) for number, one in full.items()}
        projected = self._project(*(entered[id(one)] for one in (query, key, value)))
        if not is_batched:
            projected = [one[None] for one in projected]
        elif not self.batch_first:
            projected = [one.transpose(0, 1) for one in projected]
        heads = self.num_heads // axis.count
        q, k, v = (one.unflatten(-1, (heads, -1)).transpose(1, 2) for one in projected)
        # The kernel applies this mask itself; torch trusts `is_causal` in the same cases.
        causal = is_causal and attn_mask is not None and key_padding_mask is None
        causal = causal and not need_weights
        mask = None if causal else self._mask(q.dtype, key_padding_mask, attn_mask)
        dropout = self.dropout if self.training else 0.0
        weights = None
        with per_process_rng(axis.index, q.device) if dropout else contextlib.nullcontext():
            if need_weights:
                mixed, weights = _explicit(q, k, v, mask, dropout)
            else:
                mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal)
        mixed = mixed.transpose(1, 2).flatten(2)
        bias = self.out_proj.bias
        shared = None if bias is None else share(bias, axis.count)
        result = axis.leave(F.linear(mixed, self.out_proj.weight, shared), label)
        if not is_batched:
            result = result[0]
        elif not self.batch_first:
            result = result.transpose(0, 1)
        if weights is not None:
            weights = self._shown(weights, average_attn_weights)
            weights = weights if is_batched else weights[0]
        return result, weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        inputs = (query, key, value)
        biases: Any = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        if self.in_proj_weight is None:
            matrices: Any = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        elif query is key and key is value:
            return list(F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1))
        else:
            matrices = self.in_proj_weight.chunk(3)
        return [F.linear(x, w, b) for x, w, b in zip(inputs, matrices, biases, strict=True)]

    def _mask(
        self, dtype: torch.dtype, padding: Tensor | None, mask: Tensor | None
    ) -> Tensor | None:
        """Return what is added to the scores, or None."""
        result = None
        if mask is not None:
            result = _additive(mask, dtype)
            if result.ndim == 3:  # [batch * heads, length, length]
                result = result.unflatten(0, (-1, self.num_heads))
                result = self.sharding.axis.slice(1).of(result)
        if padding is not None:
            hidden = _additive(padding, dtype)[..., None, None, :]
            result = hidden if result is None else result + hidden
        return result

    def _shown(self, weights: Tensor, average: bool) -> Tensor:
        axis, label = self.sharding.axis, self.sharding.label
        if not average:
            return ShardedTensor(weights, 1, axis, frozenset([label])).full_tensor()
        return axis.leave(weights.sum(1) / self.num_heads, label)


def _explicit(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float
) -> tuple[Tensor, Tensor]:
    """Return the attended values, and the weights, which the kernel does not return."""
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
    weights = (scores if mask is None else scores + mask).softmax(-1)
    weights = F.dropout(weights, dropout) if dropout else weights
    return weights @ v, weights


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))


def _joined(base: type[nn.Module], kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"{base.__name__[1:]}Of{kind.__name__}", (base, kind), {})


CLASSES: dict[tuple[type[nn.Module], str], type[nn.Module]] = {
    (nn.Linear, "column"): ColumnLinear,
    (nn.Linear, "row"): RowLinear,
    (nn.Linear, "vocabulary"): VocabularyLinear,
    (nn.Embedding, "embedding"): ShardedEmbedding,
    (nn.MultiheadAttention, "attention"): ShardedAttention,
    **{(kind, "column"): _joined(_ColumnConvolution, kind) for kind in CONVOLUTIONS},
    **{(kind, "row"): _joined(_RowConvolution, kind) for kind in CONVOLUTIONS},
    **{(kind, "norm"): _joined(_ShardedBatchNorm, kind) for kind in BATCH_NORMS},
}
