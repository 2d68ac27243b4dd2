"""Backward in two halves against one backward: the same gradients, to the last bit or rounding.

Where a weight is used several times its gradients are summed in another order: float64, 1e-12.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from paceline.model_parallel.pipeline.stage import PipelineStage, StageTensor


class Model(nn.Module):
    """Several ways through a few weights."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm, self.scale = nn.LayerNorm(6), nn.Parameter(torch.rand(6))
        self.embedding = nn.Embedding(6, 6)

    def forward(self, x: Tensor, skip: Tensor) -> tuple[Tensor, ...]:
        return getattr(self, self.way)(x, skip)

    def layers(self, x: Tensor, skip: Tensor) -> tuple[Tensor, ...]:
        return self.norm(self.second(F.gelu(self.first(x)))) + skip * self.scale, skip

    def weight_twice(self, x: Tensor, skip: Tensor) -> tuple[Tensor, ...]:
        x = self.first(torch.tanh(self.first(x))) * self.scale
        return self.norm(self.first(self.norm(x))) + skip * self.scale, x

    def computed_weight(self, x: Tensor, skip: Tensor) -> tuple[Tensor, ...]:
        weight = self.first.weight @ self.second.weight * self.scale.exp()
        return F.linear(F.linear(x, weight).sin(), weight) + skip, x * 2

    def several_outputs(self, x: Tensor, skip: Tensor) -> tuple[Tensor, ...]:
        a, b, c = self.first(x).chunk(3, -1)
        aside = self.embedding(torch.arange(4))  # depends on no input
        return torch.cat([c, a * b, b], -1).t(), aside * self.scale, skip, self.second(skip)

    def checkpointed(self, x: Tensor, skip: Tensor) -> tuple[Tensor, ...]:
        found = checkpoint(self.layers, x, skip, use_reentrant=False)
        return self.second(found[0]), found[1]

    def unused_input(self, x: Tensor, skip: Tensor) -> tuple[Tensor, ...]:
        return (self.second(self.first(x)),)


WAYS = [
    "layers",
    "weight_twice",
    "computed_weight",
    "several_outputs",
    "checkpointed",
    "unused_input",
]


@pytest.mark.parametrize("needs_grad", [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("way", WAYS)
def test_halves_equal_the_whole(way, needs_grad):
    torch.manual_seed(5)
    module = Model(way).double()
    stage = PipelineStage(module, 1)
    for param in module.parameters():
        param.grad = torch.rand_like(param)
    start = [param.grad.clone() for param in module.parameters()]
    results = []
    for is_split in (False, True):
        for param, grad in zip(module.parameters(), start, strict=True):
            param.grad = grad.clone()
        generator = torch.Generator().manual_seed(1)
        sent = []
        for microbatch in range(2):
            given = [torch.randn(4, 6, generator=generator).double() for _ in range(2)]
            crossing = [StageTensor(t, n) for t, n in zip(given, needs_grad, strict=True)]
            stage.forward(microbatch, crossing)
        for microbatch in range(2):
            outputs = stage.outputs_of(microbatch)
            grads = [torch.randn(o.shape, generator=generator).double() for o in outputs]
            grads[-1] = grads[-1] if len(grads) == 1 else None  # nothing depended on it
            compute = stage.backward_input if is_split else stage.backward
            sent.append(compute(microbatch, grads))
            assert stage.has_weights_left(microbatch) == is_split
        for microbatch in range(2 if is_split else 0):
            stage.backward_weight(microbatch)
        results.append((sent, [param.grad for param in module.parameters()]))
    whole, halves = results
    torch.testing.assert_close(halves, whole, rtol=1e-12, atol=1e-12)


def test_first_half_leaves_the_weights_alone():
    stage = PipelineStage(Model("layers"), 1)
    outputs = stage.forward(
        0, [StageTensor(torch.randn(4, 6), True), StageTensor(torch.randn(4, 6), True)]
    )
    stage.backward_input(0, [torch.ones_like(output) for output in outputs])
    assert all(param.grad is None for param in stage.module.parameters())
    stage.backward_weight(0)
    assert stage.module.first.weight.grad is not None


def test_hooks_on_parameters_see_every_gradient():
    stage, seen = PipelineStage(Model("layers"), 1), []
    stage.module.first.weight.register_post_accumulate_grad_hook(
        lambda p: seen.append(p.grad.sum())
    )
    for microbatch in range(2):
        crossing = [StageTensor(torch.randn(4, 6), True), StageTensor(torch.randn(4, 6), False)]
        outputs = stage.forward(microbatch, crossing)
        stage.backward_input(microbatch, [torch.ones_like(o) for o in outputs if o.requires_grad])
        stage.backward_weight(microbatch)
    assert len(seen) == 2


def test_input_may_be_changed_in_place():
    stage = PipelineStage(Clipping(), 1)
    x = torch.tensor([-1.0, 2.0])
    (y,) = stage.forward(0, [StageTensor(x.clone(), True)])
    assert y.tolist() == [0.0, 2.0]
    (grad,) = stage.backward(0, [torch.ones(2)])
    assert grad is not None and grad.tolist() == [0.0, 1.0]


class Clipping(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (F.relu(x, inplace=True),)
