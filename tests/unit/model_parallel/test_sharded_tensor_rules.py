"""Operations on pieces: put together, they must be the operation on the whole.

Each process of an axis is played in turn, with its own piece. Where an operation has no rule, it
must be seen as such, and not compute something else.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.model_parallel.sharding.layout import Slice
from paceline.model_parallel.tensor.axis import SimulatedAxis
from paceline.model_parallel.tensor.parallelize import parallelize  # registers the rules
from paceline.model_parallel.tensor.sharded_tensor import ShardedTensor

assert parallelize is not None
B, T, H, D = 2, 3, 4, 6  # batch, length, heads, size of a head


class Watching(SimulatedAxis):
    def __init__(self, count: int, index: int) -> None:
        super().__init__(count, index)
        self.gathered: list[str] = []

    def on_gather(self, origins, why):
        self.gathered.append(why)


def cut(whole: Tensor, dim: int, axis: SimulatedAxis, blocks: int = 1) -> ShardedTensor:
    return ShardedTensor(axis.slice(dim, blocks).of(whole), dim, axis, frozenset(["m"]), blocks)


def check(operation, *operands, count: int = 2) -> None:
    """Operands are (whole, dim, blocks), or tensors that all hold whole."""
    wholes = [o[0] if isinstance(o, tuple) else o for o in operands]
    expected = operation(*wholes)
    several = isinstance(expected, (tuple, list))
    results = [torch.full_like(e, 99) for e in (expected if several else [expected])]
    for index in range(count):
        axis = Watching(count, index)
        pieces = [cut(o[0], o[1], axis, o[2]) if isinstance(o, tuple) else o for o in operands]
        found = operation(*pieces)
        assert axis.gathered == []
        for result, one in zip(results, found if several else [found], strict=True):
            assert isinstance(one, ShardedTensor)
            assert one.shape == result.shape
            Slice(one.shard_dim, index, count, one.blocks).put(result, one.local)
    for result, one in zip(results, expected if several else [expected], strict=True):
        torch.testing.assert_close(result, one)


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


QKV, FEATURES = numbers(B, T, 3 * H * D), numbers(B, T, H * D)
HEADS = numbers(B, H, T, D)

CASES = {
    "gelu": lambda: check(F.gelu, (FEATURES, 2, 1)),
    "gate": lambda: check(lambda a, b: F.silu(a) * b, (FEATURES, 2, 1), (FEATURES + 1, 2, 1)),
    "scale": lambda: check(lambda a: 2 / (1 + a**2), (FEATURES, 2, 1)),
    "vector": lambda: check(lambda a, b: a + b, (FEATURES, 2, 1), numbers(H * D)),
    "in place": lambda: check(lambda a: a.clone().mul_(3).add_(1), (FEATURES, 2, 1)),
    "split": lambda: check(lambda a: a.split(H * D, dim=2), (QKV, 2, 3)),
    "chunk": lambda: check(lambda a: a.chunk(3, -1), (QKV, 2, 3)),
    "slices": lambda: check(lambda a: (a[..., : H * D], a[..., H * D :]), (QKV, 2, 3)),
    "view of three": lambda: check(
        lambda a: a.view(B, T, 3, H, -1).permute(2, 0, 3, 1, 4).unbind(0), (QKV, 2, 3)
    ),
    "heads": lambda: check(lambda a: a.view(B, T, H, D).transpose(1, 2), (FEATURES, 2, 1)),
    "heads and back": lambda: check(
        lambda a: a.unflatten(-1, (H, D)).transpose(1, 2).transpose(2, 1).flatten(2),
        (FEATURES, 2, 1),
    ),
    "heads in the batch": lambda: check(
        lambda a: a.reshape(B * H, T, D).view(B, H, T, D), (HEADS, 1, 1)
    ),
    "bmm": lambda: check(
        lambda a: torch.bmm(a.reshape(B * H, T, D), a.reshape(B * H, T, D).mT), (HEADS, 1, 1)
    ),
    "tokens": lambda: check(lambda a: a.view(B * T, -1), (FEATURES, 2, 1)),
    "last token": lambda: check(lambda a: a[:, -1], (FEATURES, 2, 1)),
    "all but one": lambda: check(lambda a: a[..., :-1, :], (FEATURES, 2, 1)),
    "new dim": lambda: check(lambda a: a[:, :, None], (HEADS, 1, 1)),
    "mask of tokens": lambda: check(lambda a: a[torch.ones(B, T) > 0], (FEATURES, 2, 1)),
    "scores": lambda: check(
        lambda a, m: (a @ a.transpose(-2, -1)).masked_fill(m, -9.0).softmax(-1) @ a,
        (HEADS, 1, 1),
        torch.ones(T, T).triu(1) > 0,
    ),
    "attention": lambda: check(
        lambda a, m: F.scaled_dot_product_attention(a, a, a, attn_mask=m),
        (HEADS, 1, 1),
        numbers(B, H, T, T),
    ),
    "einsum": lambda: check(
        lambda a, w: torch.einsum("bhtd,hde->bthe", a, w), (HEADS, 1, 1), numbers(H, D, 2)
    ),
    "norm of heads": lambda: check(lambda a: F.layer_norm(a, (D,)), (HEADS, 1, 1)),
    "mean over length": lambda: check(lambda a: a.mean(dim=2), (HEADS, 1, 1)),
    "sum with keepdim": lambda: check(lambda a: a.sum(0, keepdim=True), (HEADS, 1, 1)),
    "repeated heads": lambda: check(lambda a: a.repeat_interleave(3, dim=1), (HEADS, 1, 1)),
    "expanded heads": lambda: check(
        lambda a: a[:, :, None].expand(B, H, 2, T, D).reshape(B, 2 * H, T, D), (HEADS, 1, 1)
    ),
    "rotated": lambda: check(lambda a: torch.cat((-a[..., 3:], a[..., :3]), dim=-1), (HEADS, 1, 1)),
    "stacked": lambda: check(lambda a: torch.stack((a, a), dim=1), (HEADS, 1, 1)),
    "joined": lambda: check(lambda a: torch.cat((a, a), dim=1).chunk(2, 1), (HEADS, 1, 1)),
    "complex": lambda: check(
        lambda a: torch.view_as_real(torch.view_as_complex(a.reshape(B, H, T, -1, 2)) * 1j),
        (HEADS, 1, 1),
    ),
    "glu": lambda: check(F.glu, (numbers(B, 16), 1, 2)),
    "pooled": lambda: check(
        lambda a: F.adaptive_avg_pool2d(F.max_pool2d(a, 2), 1).flatten(1),
        (numbers(2, 4, 8, 8), 1, 1),
    ),
    "padded": lambda: check(lambda a: F.pad(a, (1, 1, 2, 0)), (numbers(2, 4, 8, 8), 1, 1)),
    "size": lambda: check(lambda a: a.view(*a.size()[:-1], H, a.shape[-1] // H), (FEATURES, 2, 1)),
}


@pytest.mark.parametrize("name", CASES)
def test_pieces_together_are_the_whole(name):
    CASES[name]()


REFUSED = {
    "softmax over features": (lambda a: a.softmax(-1), (FEATURES, 2, 1), "across its shards"),
    "norm over features": (lambda a: F.layer_norm(a, (H * D,)), (FEATURES, 2, 1), "layer_norm"),
    "q, k and v as one block": (lambda a: a.split(H * D, 2), (QKV, 2, 1), "across its shards"),
    "three heads": (lambda a: a.view(B, T, 3, -1), (FEATURES, 2, 1), "cannot be split into 2"),
    "product": (lambda a: a @ numbers(H * D, 5), (FEATURES, 2, 1), "sums over its shards"),
    "residual": (lambda a: a + FEATURES, (FEATURES, 2, 1), "full tensor of the same shape"),
    "sum of all": (lambda a: a.sum(), (FEATURES, 2, 1), "across its shards"),
    "argmax": (lambda a: a.argmax(-1), (FEATURES, 2, 1), "argmax needs all of it"),
    "one feature": (lambda a: a[..., 0], (FEATURES, 2, 1), "indexed across"),
    "gather": (lambda a: a.gather(2, torch.zeros(B, T, 1).long()), (FEATURES, 2, 1), "gather"),
    "written to a whole": (lambda a: torch.zeros(B, T, H * D).add_(a), (FEATURES, 2, 1), "full"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_the_whole_gathers_it(name):
    operation, (whole, dim, blocks), words = REFUSED[name]
    axis = Watching(2, 0)
    result = operation(cut(whole, dim, axis, blocks))
    assert not isinstance(result, ShardedTensor)
    assert len(axis.gathered) == 1 and words in axis.gathered[0]
