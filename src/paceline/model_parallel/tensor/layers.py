"""Cut layers: what a linear layer, convolution, embedding or norm does with its piece.

A module keeps its parameters' objects and names; its class becomes one of these, so that copies,
hooks and `isinstance(module, nn.Linear)` go on to work.

    column         rows of the matrix (output features, channels): whole -> cut
    row            columns of the matrix (input features, channels): cut -> whole, one all-reduce
    embedding      rows of the table: masked lookup, one all-reduce
    vocabulary     a column whose result leaves the model: cut logits for the loss, whole without
                   autograd
    channel norm   BatchNorm of cut channels, with its buffers
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.model_parallel.tensor.axis import Axis
from paceline.model_parallel.tensor.sharded_tensor import CutTensor

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass
class Entrance:
    """Columns of the same tensor enter it once: one all-reduce in backward for q, k and v."""

    whole: Tensor | None = None
    entered: Tensor | None = None
    with_grad: bool = False

    def __deepcopy__(self, _memo: object) -> Entrance:
        return Entrance()

    def enter(self, whole: Tensor, axis: Axis, label: str) -> Tensor:
        with_grad = torch.is_grad_enabled()
        if self.whole is not whole or self.entered is None or self.with_grad != with_grad:
            entered = axis.enter(whole, label)
            self.whole, self.entered, self.with_grad = whole, entered, with_grad
        return self.entered

    def forget(self) -> None:
        self.whole = self.entered = None


@dataclass
class Place:
    """What a cut module knows about the cut."""

    axis: Axis
    label: str  # the module's name
    blocks: int = 1
    entrance: Entrance | None = None  # of columns with the same input
    forgets: tuple[Entrance, ...] = ()  # of a row: its columns are done with them


class _Share(torch.autograd.Function):
    """A bias as every process adds it before the sum: one part each, and the whole gradient."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, count: int) -> Tensor:
        del ctx
        return bias / count

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        del ctx
        return grad, None


def share(bias: Tensor, count: int) -> Tensor:
    """Return what each process adds of a bias."""
    shared: Tensor = _Share.apply(bias, count)  # type: ignore[no-untyped-call]
    return shared


def feature_dim(module: nn.Module, tensor: Tensor) -> int:
    """Return the dimension of features or channels: the last, or that before the image's."""
    if isinstance(module, CONVOLUTIONS):
        return tensor.ndim - 1 - len(module.kernel_size)
    return tensor.ndim - 1


def apply_weight(module: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply or convolve with other parameters than the module's."""
    if isinstance(module, CONVOLUTIONS):
        convolved: Tensor = module._conv_forward(x, weight, bias)
        return convolved
    return F.linear(x, weight, bias)


def column(
    module: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None, place: Place
) -> CutTensor:
    """Return cut features of a whole tensor."""
    if isinstance(x, CutTensor):
        x = x.whole()
    if place.entrance is None:
        x = place.axis.enter(x, place.label)
    else:
        x = place.entrance.enter(x, place.axis, place.label)
    local = apply_weight(module, x, weight, bias)
    dim = feature_dim(module, local)
    return CutTensor(local, dim, place.axis, frozenset([place.label]), place.blocks)


def row(module: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None, place: Place) -> Tensor:
    """Return whole features of a cut tensor (or of our piece of a whole one)."""
    axis = place.axis
    dim = feature_dim(module, x)
    if isinstance(x, CutTensor) and (x.cut_dim, x.blocks) == (dim, place.blocks):
        x = x.local
    else:
        whole = x.whole() if isinstance(x, CutTensor) else x
        x = axis.piece(whole, dim, place.blocks, place.label)
    for entrance in place.forgets:
        entrance.forget()
    shared = None if bias is None else share(bias, axis.count)
    return axis.leave(apply_weight(module, x, weight, shared), place.label)


def lookup(module: nn.Embedding, index: Tensor, weight: Tensor, place: Place) -> Tensor:
    """Look up what is in our rows; zero elsewhere; the sum over the axis is the whole."""
    axis, size = place.axis, len(weight)
    ours = index - axis.index * size
    is_elsewhere = (ours < 0) | (ours >= size)
    padding = module.padding_idx
    if padding is not None:
        padding -= axis.index * size
        padding = padding if 0 <= padding < size else None
    local = F.embedding(ours.masked_fill(is_elsewhere, 0), weight, padding)
    return axis.leave(local.masked_fill(is_elsewhere[..., None], 0), place.label)


class CutModule(nn.Module):
    """A module whose class was changed to a cut one."""

    place: Place


class ColumnLinear(CutModule, nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return column(self, input, self.weight, self.bias, self.place)


class RowLinear(CutModule, nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return row(self, input, self.weight, self.bias, self.place)


class VocabularyLinear(CutModule, nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        cut = column(self, input, self.weight, self.bias, self.place)
        return cut if torch.is_grad_enabled() else cut.whole()


class CutEmbedding(CutModule, nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return lookup(self, input, self.weight, self.place)


class _CutBatchNorm(CutModule):
    def forward(self, input: Tensor) -> Tensor:
        axis = self.place.axis
        if isinstance(input, CutTensor) and (input.cut_dim, input.blocks) == (1, self.place.blocks):
            return input.like(super().forward(input.local), 1)
        whole = input.whole() if isinstance(input, CutTensor) else input
        piece = axis.piece(whole, 1, self.place.blocks, self.place.label)
        origins = frozenset([self.place.label])
        normed: Tensor = super().forward(piece)
        return CutTensor(normed, 1, axis, origins, self.place.blocks)


class _ColumnConvolution(CutModule):
    weight: Tensor
    bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        return column(self, input, self.weight, self.bias, self.place)


class _RowConvolution(CutModule):
    weight: Tensor
    bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        return row(self, input, self.weight, self.bias, self.place)


def _joined(cut: type[nn.Module], kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"{cut.__name__[1:]}Of{kind.__name__}", (cut, kind), {})


CLASSES: dict[tuple[type[nn.Module], str], type[nn.Module]] = {
    (nn.Linear, "column"): ColumnLinear,
    (nn.Linear, "row"): RowLinear,
    (nn.Linear, "vocabulary"): VocabularyLinear,
    (nn.Embedding, "embedding"): CutEmbedding,
    **{(kind, "column"): _joined(_ColumnConvolution, kind) for kind in CONVOLUTIONS},
    **{(kind, "row"): _joined(_RowConvolution, kind) for kind in CONVOLUTIONS},
    **{(kind, "norm"): _joined(_CutBatchNorm, kind) for kind in BATCH_NORMS},
}
