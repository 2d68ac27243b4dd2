"""Cross-entropy of logits whose classes are sharded: no process has all logits of a sample.

    largest, sum of exponentials, the target's logit      two small all-reduces of one number
                                                          and of two numbers per sample
    backward                                              local: softmax minus one at the target

`F.cross_entropy` of sharded logits calls it: a model's own loss does not change.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.model_parallel.tensor.axis import Axis
from paceline.model_parallel.tensor.rules import Args, Func, Kwargs, rule
from paceline.model_parallel.tensor.sharded_tensor import NoRule, ShardedTensor


class _CrossEntropy(torch.autograd.Function):
    """The loss of each sample; zero where the target is ignored."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, kept: Tensor, smoothing: float, axis: Axis
    ) -> Tensor:
        size = logits.shape[1]
        largest = axis.all_reduce(logits.detach().amax(1), dist.ReduceOp.MAX)
        shifted = logits - largest[:, None]
        ours = target - axis.index * size
        is_here = (ours >= 0) & (ours < size) & kept
        ours = torch.where(is_here, ours, 0)[:, None]
        chosen = torch.where(is_here, shifted.gather(1, ours)[:, 0], 0)
        terms = [chosen, shifted.sum(1)] if smoothing else [chosen]
        exponentials = shifted.exp_() if not smoothing else shifted.exp()
        sums = axis.all_reduce(torch.stack([exponentials.sum(1), *terms]))
        logarithm = sums[0].log()
        loss = logarithm - sums[1]
        num_classes = size * axis.count
        if smoothing:
            loss = (1 - smoothing) * loss + smoothing * (logarithm - sums[2] / num_classes)
        ctx.save_for_backward(exponentials.div_(sums[0][:, None]), ours, is_here, kept)
        ctx.smoothing, ctx.num_classes = smoothing, num_classes
        return loss.masked_fill_(~kept, 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        softmax, ours, is_here, kept = ctx.saved_tensors
        grad = grad * kept
        result = softmax * grad[:, None]
        if ctx.smoothing:
            result -= (ctx.smoothing / ctx.num_classes) * grad[:, None]
        result.scatter_add_(1, ours, (grad * is_here * (ctx.smoothing - 1))[:, None])
        return result, None, None, None, None


@rule("cross_entropy", "cross_entropy_loss")
def _cross_entropy(_func: Func, args: Args, kwargs: Kwargs) -> Any:
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
    named = {**dict(zip((*names, "label_smoothing"), args, strict=False)), **kwargs}
    logits, target = named["input"], named["target"]
    plain = isinstance(logits, ShardedTensor) and not isinstance(target, ShardedTensor)
    if not plain or logits.ndim < 2 or logits.shard_dim != 1 or logits.blocks != 1:
        raise NoRule("cross_entropy of this shape needs all logits")
    if any(named.get(name) is not None for name in ("weight", "size_average", "reduce")):
        raise NoRule("cross_entropy with weights needs all logits")
    if target.ndim != logits.ndim - 1 or target.is_floating_point():
        raise NoRule("cross_entropy with probabilities needs all logits")
    shape, target = target.shape, target.flatten()
    kept = target != named.get("ignore_index", -100)
    axis = logits.axis
    axis.on_loss(logits.origins)
    axis.num_forward[min(logits.origins)] += 2
    local = logits.local.float() if logits.dtype.itemsize < 4 else logits.local
    local = local.movedim(1, -1).reshape(len(target), -1)  # [samples, classes]
    smoothing = named.get("label_smoothing", 0.0)
    losses: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        local, target, kept, smoothing, axis
    )
    reduction = named.get("reduction", "mean")
    if reduction == "none":
        return losses.view(shape)
    return losses.sum() / kept.sum() if reduction == "mean" else losses.sum()
