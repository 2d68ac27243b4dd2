"""nn.MultiheadAttention with its heads cut: each process has some heads of q, k and v.

One all-reduce forward, behind the output projection, and one backward (one for each different
tensor among query, key and value).
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.model_parallel.tensor.layers import CutModule, share
from paceline.model_parallel.tensor.rules import own_randomness
from paceline.model_parallel.tensor.sharded_tensor import CutTensor


def can_cut(module: nn.MultiheadAttention) -> bool:
    """Whether it has none of the rare extras that we do not cut."""
    return module.bias_k is None and module.bias_v is None and not module.add_zero_attn


class CutAttention(CutModule, nn.MultiheadAttention):
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
        axis, label = self.place.axis, self.place.label
        is_batched = query.ndim == 3
        whole = {id(one): one for one in (query, key, value)}
        entered = {number: axis.enter(one, label) for number, one in whole.items()}
        parts = self._project(*(entered[id(one)] for one in (query, key, value)))
        if not is_batched:
            parts = [one[None] for one in parts]
        elif not self.batch_first:
            parts = [one.transpose(0, 1) for one in parts]
        heads = self.num_heads // axis.count
        q, k, v = (one.unflatten(-1, (heads, -1)).transpose(1, 2) for one in parts)
        # The kernel knows this mask; torch trusts `is_causal` in the same cases.
        causal = is_causal and attn_mask is not None and key_padding_mask is None
        causal = causal and not need_weights
        mask = None if causal else self._mask(q.dtype, key_padding_mask, attn_mask)
        dropout = self.dropout if self.training else 0.0
        weights = None
        with own_randomness(axis.index) if dropout else contextlib.nullcontext():
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
                result = self.place.axis.slice(1).of(result)
        if padding is not None:
            hidden = _additive(padding, dtype)[..., None, None, :]
            result = hidden if result is None else result + hidden
        return result

    def _shown(self, weights: Tensor, average: bool) -> Tensor:
        axis, label = self.place.axis, self.place.label
        if not average:
            return CutTensor(weights, 1, axis, frozenset([label])).whole()
        return axis.leave(weights.sum(1) / self.num_heads, label)


def _explicit(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float
) -> tuple[Tensor, Tensor]:
    """Return mixed values and the weights that the kernel does not show."""
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
    weights = (scores if mask is None else scores + mask).softmax(-1)
    weights = F.dropout(weights, dropout) if dropout else weights
    return weights @ v, weights


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))
