"""What workers agree on through a codec: the same on all, nothing lost, and in special cases exact.

The gradient of `(p * c).sum()` is c, so that what each worker sends is known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.comm.group import Group
from paceline.compress.codec import Codec
from paceline.compress.kernels import Draw
from paceline.compress.registry import register
from paceline.data_parallel.distribute import _switchers
from paceline.pace.compressed import CompressedAllReduce
from paceline.pace.hierarchical import HostFirst
from paceline.runtime.job import current
from support import run_ranks
from support.on_device import on_host

WORKERS, STEPS = 3, 6
SHAPES = ((130, 70), (7,), (50, 90), (2500,))  # the second one is small

FEEDBACK = (
    "onebit",
    "int8(feedback=yes)",
    "int4(feedback=yes)",
    "int8(scales=shared,feedback=yes)",
    "bf16(feedback=yes)",
    "topk:0.05",
    "topk:0.05+int8",
    "topk:0.05+fp16",
    "randomk:0.1",
    "powersgd:2",
    "dgc:0.01(momentum=0,warmup=0)",
)
OTHERS = ("fp16", "bf16", "int8", "int4", "int8(scales=shared)", "topk:0.1(feedback=no)")


class Numbers(nn.Module):
    """Parameters whose gradients are given."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in SHAPES])

    def forward(self, given: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([(p * g).sum() for p, g in zip(self.all, given, strict=True)]).sum()


def gradients(rank: int, step: int) -> list[torch.Tensor]:
    draws = torch.Generator().manual_seed(100 * rank + step)
    return [torch.randn(shape, generator=draws) for shape in SHAPES]


def flat(tensors: Any) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def agree(
    given: Callable[[int, int], list[torch.Tensor]] = gradients,
    scaler: pl.GradScaler | None = None,
    **options: Any,
) -> tuple[Numbers, list[torch.Tensor]]:
    """Exchange gradients in some steps; return the model, and what was agreed on in each."""
    model = Numbers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    pl.distribute(model, optimizer, **options)
    averages = []
    for step in range(STEPS):
        loss = model(given(pl.rank(), step))
        (loss if scaler is None else scaler.scale(loss)).backward()
        averages.append(flat(p.grad for p in model.all))
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    return model, averages


def exchange_all(group: Group, codecs: list[str]) -> list[tuple[list[torch.Tensor], torch.Tensor]]:
    """Return by codec the averages of all steps, and the residual of this worker behind them."""
    del group
    found = []
    for codec in codecs:
        model, averages = agree(compress=codec, bucket_mb=0.012)
        found.append((averages, residual_of(model)))
    return found


def residual_of(model: nn.Module) -> torch.Tensor:
    """Return what waits on this worker, in the order of the parameters."""
    training = _switchers[model].training
    exchange = training.exchange
    assert isinstance(on_host(exchange), CompressedAllReduce | HostFirst)
    by_param = {}
    for bucket in training.reducer.buckets:
        waits = exchange.left_out(bucket)
        for slot in bucket.slots:
            left = torch.zeros_like(slot.param) if waits is None else slot.segment.view(waits)
            by_param[slot.param] = left
    return flat(by_param[p] for p in model.parameters())


def means() -> list[torch.Tensor]:
    return [
        torch.stack([flat(gradients(rank, step)) for rank in range(WORKERS)]).mean(0)
        for step in range(STEPS)
    ]


@pytest.mark.parametrize("hosts", [1, 2, 3])
def test_all_workers_agree_and_nothing_is_lost(hosts: int) -> None:
    codecs = [*FEEDBACK, *OTHERS]
    by_rank = run_ranks(WORKERS, exchange_all, codecs, hosts=hosts)
    for number, codec in enumerate(codecs):
        averages = [results[number][0] for results in by_rank]
        for other in averages[1:]:
            for mine, theirs in zip(averages[0], other, strict=True):
                assert torch.equal(mine, theirs), codec
        small = slice(130 * 70, 130 * 70 + 7)
        for mine, expected in zip(averages[0], means(), strict=True):
            if "bf16" not in codec and codec != "fp16":  # these take them all
                torch.testing.assert_close(mine[small], expected[small], msg=codec)
        if codec in FEEDBACK:
            waits = torch.stack([results[number][1] for results in by_rank]).mean(0)
            total = torch.stack(averages[0]).sum(0) + waits
            torch.testing.assert_close(
                total, torch.stack(means()).sum(0), rtol=1e-4, atol=1e-4, msg=codec
            )


def test_special_cases_are_dense() -> None:
    codecs = [
        "none",
        "topk:1",
        "randomk:1",
        "powersgd:90(rate=0.01)",
        "topk:1+int8",
        "dgc:1(momentum=0)",
    ]
    (first, *_) = run_ranks(WORKERS, exchange_all_but_residuals, codecs)
    dense, *others = first
    for codec, averages in zip(codecs[1:], others, strict=True):
        atol = 0.1 if "int8" in codec else 2e-5
        for mine, expected in zip(averages, dense, strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-4, atol=atol, msg=codec)


def exchange_all_but_residuals(group: Group, codecs: list[str]) -> list[list[torch.Tensor]]:
    del group
    return [agree(compress=codec)[1] for codec in codecs]


def send_once(group: Group) -> tuple[str, int]:
    """Return the way that was taken, and the bytes that went over the network."""
    del group
    model = Numbers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    pl.distribute(model, optimizer, compress="int8", buffers="local", unused="ignore")
    engine = current().fabric.engine
    before = engine.bytes_sent()[1]
    model(gradients(pl.rank(), 0)).backward()
    sent = engine.bytes_sent()[1] - before
    return type(on_host(_switchers[model].training.exchange)).__name__, sent


def test_a_host_sends_what_one_worker_would() -> None:
    alone = run_ranks(2, send_once, hosts=2)
    several = run_ranks(4, send_once, hosts=2)
    assert {way for way, _ in alone} == {"CompressedAllReduce"}
    assert {way for way, _ in several} == {"HostFirst"}
    # The roll call, some words, is of all workers.
    assert sum(sent for _, sent in several) < 1.1 * sum(sent for _, sent in alone)


class Bytes(Codec):
    """A codec from outside: 127 steps of the largest size."""

    def num_bytes(self, count: int) -> int:
        return 4 + count

    def compress(self, values: torch.Tensor, payload: torch.Tensor, draw: Draw) -> None:
        del draw
        scale = values.abs().max() / 127
        payload[:4].view(torch.float32).fill_(float(scale))
        payload[4:].view(torch.int8).copy_((values / scale).round())

    def decode(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(payload[4:].view(torch.int8)).mul_(payload[:4].view(torch.float32))


def exchange_with_own(group: Group) -> list[tuple[list[torch.Tensor], torch.Tensor]]:
    register("bytes_of_mine", Bytes)
    return exchange_all(group, ["bytes_of_mine"])


def test_a_codec_from_outside() -> None:
    by_rank = run_ranks(WORKERS, exchange_with_own)
    waits = torch.stack([results[0][1] for results in by_rank]).mean(0)
    total = torch.stack(by_rank[0][0][0]).sum(0) + waits
    assert float(waits.abs().max()) > 0
    torch.testing.assert_close(total, torch.stack(means()).sum(0), rtol=1e-4, atol=1e-4)


def change_pace(group: Group, paces: list[str], scale: float) -> list[torch.Tensor]:
    """Return by schedule the sum of what was agreed on."""
    del group
    scaler = pl.GradScaler(init_scale=scale) if scale else None
    return [torch.stack(agree(scaler=scaler, pace=pace)[1]).sum(0) for pace in paces]


@pytest.mark.parametrize("scale", [0, 1024])
def test_what_is_left_out_goes_along_when_the_pace_changes(scale: float) -> None:
    paces = [
        "allreduce[compress=topk:0.02]@0, allreduce[compress=none]@3",
        "allreduce[compress=onebit]@0, allreduce[compress=topk:0.1]@2, allreduce[compress=none]@5",
    ]
    for results in run_ranks(WORKERS, change_pace, paces, scale):
        for pace, total in zip(paces, results, strict=True):
            expected = torch.stack(means()).sum(0)
            torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4, msg=pace)


def gradients_with_a_broken_one(rank: int, step: int) -> list[torch.Tensor]:
    given = gradients(rank, step)
    if rank == 1 and step == 1:
        given[0][5, 5] = float("inf")
        given[2][5, 5] = float("nan")
    return given


def show_broken(group: Group, codecs: list[str]) -> list[list[bool]]:
    """Return by codec and step whether all that was agreed on is finite."""
    del group
    found = [agree(gradients_with_a_broken_one, compress=codec)[1] for codec in codecs]
    return [[bool(torch.isfinite(one).all()) for one in averages] for averages in found]


def test_what_is_no_number_is_seen_by_all_and_gone_in_the_next_step() -> None:
    codecs = [*(c for c in FEEDBACK if "randomk" not in c), *OTHERS]
    for results in run_ranks(WORKERS, show_broken, codecs):
        for codec, finite in zip(codecs, results, strict=True):
            assert finite == [step != 1 for step in range(STEPS)], codec
