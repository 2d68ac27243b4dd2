"""Gradients that go to servers through a codec: nothing is lost, all workers see the same, and in
special cases it is as if there were no codec.

The gradient of `(p * c).sum()` is c, and with SGD at a rate of 1 the parameters are what the
servers have applied: so what arrived can be read off them.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.comm.group import Group
from paceline.data_parallel.distribute import _switchers
from paceline.pace.parameter_server import ServerExchange
from support import run_ranks

WORKERS, STEPS = 3, 6
SHAPES = ((130, 70), (7,), (50, 90), (2500,))  # the second one is small
APART = [0, 0, 1, 2, 0]  # the third worker, and the first server, are on hosts of their own

FEEDBACK = (
    "onebit",
    "int8(feedback=yes)",
    "int4(feedback=yes)",
    "bf16(feedback=yes)",
    "topk:0.05",
    "topk:0.05+int8",
    "topk:0.05+fp16",
    "dgc:0.01(momentum=0,warmup=4)",
)
OTHERS = ("fp16", "bf16", "int8", "int4", "topk:0.1(feedback=no)")


class Numbers(nn.Module):
    """Parameters whose gradients are given; None: it has none."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in SHAPES])

    def forward(self, given: list[torch.Tensor | None]) -> torch.Tensor:
        pairs = zip(self.all, given, strict=True)
        return torch.stack([(p * g).sum() for p, g in pairs if g is not None]).sum()


def gradients(rank: int, step: int) -> list[torch.Tensor | None]:
    draws = torch.Generator().manual_seed(100 * rank + step)
    return [torch.randn(shape, generator=draws) for shape in SHAPES]


def some_gradients(rank: int, step: int) -> list[torch.Tensor | None]:
    """The third parameter has a gradient in every other step, and not on all workers."""
    given = gradients(rank, step)
    if step % 2 or rank == 1:
        given[2] = None
    return given


def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def residual_of(model: nn.Module) -> torch.Tensor:
    """Return what waits on this worker, in the order of the parameters."""
    training = _switchers[model].training
    assert isinstance(training.exchange, ServerExchange)
    by_param = {}
    for bucket in training.reducer.buckets:
        waits = training.exchange.left_out(bucket)
        for slot in bucket.slots:
            zeros = torch.zeros_like(slot.param)
            by_param[slot.param] = zeros if waits is None else slot.segment.view(waits)
    return flat([by_param[p] for p in model.parameters()])


def train(
    group: Group, paces: list[str], given: object = gradients
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return by pace what was applied in all steps, and what waits on this worker behind them."""
    found = []
    for pace in paces:
        model = Numbers()
        made = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer = pl.distribute(model, made, pace=pace, bucket_mb=0.05)
        for step in range(STEPS):
            model(given(group.rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        group.barrier()
        model.pull()
        found.append((-flat(list(model.all)), residual_of(model)))
        group.barrier()
    return found


def total(given: object = gradients) -> torch.Tensor:
    """The sum of all gradients of all workers."""
    zeros = [torch.zeros(shape) for shape in SHAPES]
    rows = [given(rank, step) for rank in range(WORKERS) for step in range(STEPS)]
    return sum(
        flat([z if g is None else g for z, g in zip(zeros, row, strict=True)]) for row in rows
    )


@pytest.mark.parametrize("hosts", [1, APART])
def test_all_workers_agree_and_nothing_is_lost(hosts: object) -> None:
    codecs = [*FEEDBACK, *OTHERS]
    paces = [f"ps[compress={codec}]" for codec in codecs]
    by_rank = run_ranks(WORKERS, train, paces, servers=2, hosts=hosts)
    for number, codec in enumerate(codecs):
        applied = [results[number][0] for results in by_rank]
        assert torch.equal(applied[0], applied[1]) and torch.equal(applied[0], applied[2]), codec
        expected = total() / WORKERS
        small = slice(130 * 70, 130 * 70 + 7)
        if "bf16" not in codec and codec != "fp16":  # these take them all
            torch.testing.assert_close(applied[0][small], expected[small], msg=codec)
        if codec in FEEDBACK:
            waits = torch.stack([results[number][1] for results in by_rank]).mean(0)
            torch.testing.assert_close(
                applied[0] + waits, expected, rtol=1e-4, atol=1e-4, msg=codec
            )


@pytest.mark.parametrize("hosts", [1, APART])
def test_free_running_workers_lose_nothing_either(hosts: object) -> None:
    codecs = ("onebit", "topk:0.05", "dgc:0.01(momentum=0,warmup=4)", "int8(feedback=yes)")
    paces = [f"{p}[compress={c}]" for p in ("async", "ssp:1", "ssp:0") for c in codecs]
    by_rank = run_ranks(WORKERS, train, paces, servers=2, hosts=hosts)
    for number, pace in enumerate(paces):
        applied = [results[number][0] for results in by_rank]
        waits = torch.stack([results[number][1] for results in by_rank]).sum(0)
        expected = total()
        if pace.startswith("ssp:0"):
            waits, expected = waits / WORKERS, expected / WORKERS
        assert torch.equal(applied[0], applied[1]) and torch.equal(applied[0], applied[2]), pace
        torch.testing.assert_close(applied[0] + waits, expected, rtol=1e-4, atol=2e-4, msg=pace)


@pytest.mark.parametrize("pace", ["ps", "async"])
def test_what_waits_for_a_parameter_without_gradient_goes_on_waiting(pace: str) -> None:
    codecs = ("onebit", "topk:0.05", "int4(feedback=yes)")
    paces = [f"{pace}[compress={codec}{', unused=ignore' * (pace == 'ps')}]" for codec in codecs]
    by_rank = run_ranks(WORKERS, train, paces, some_gradients, servers=2)
    for number, codec in enumerate(codecs):
        waits = torch.stack([results[number][1] for results in by_rank]).sum(0)
        expected, applied = total(some_gradients), by_rank[0][number][0]
        if pace == "ps":
            waits, expected = waits / WORKERS, expected / WORKERS
        torch.testing.assert_close(applied + waits, expected, rtol=1e-4, atol=2e-4, msg=codec)


def test_what_waits_is_sent_at_the_next_pace() -> None:
    paces = [
        "ps[compress=topk:0.05]@0, ps[compress=none]@4",
        "ps[compress=topk:0.05]@0, allreduce[compress=none]@4",
        "ps[compress=dgc:0.05(momentum=0)]@0, ps[compress=none]@4",
    ]
    for results in run_ranks(WORKERS, train_to_the_end, paces, servers=2):
        for pace, applied in zip(paces, results, strict=True):
            torch.testing.assert_close(applied, total() / WORKERS, rtol=1e-4, atol=1e-4, msg=pace)


def train_to_the_end(group: Group, paces: list[str]) -> list[torch.Tensor]:
    found = []
    for pace in paces:
        model = Numbers()
        made = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer = pl.distribute(model, made, pace=pace, bucket_mb=0.05)
        for step in range(STEPS):
            model(gradients(group.rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(-flat(list(model.all)))
    return found


def test_all_values_are_as_good_as_no_codec() -> None:
    paces = ["ps", "ps[compress=topk:1]", "ps[compress=dgc:1(momentum=0)]"]
    paces += ["ps[compress=topk:1+int8]", "backup:0[compress=topk:1]", "ps[compress=topk:1(min=0)]"]
    for results in run_ranks(WORKERS, train, paces, servers=2):
        (dense, _), *others = results
        for pace, (applied, _) in zip(paces[1:], others, strict=True):
            if "int8" in pace:
                torch.testing.assert_close(applied, dense, rtol=0, atol=0.1, msg=pace)
            else:
                assert torch.equal(applied, dense), pace


def averages(group: Group, paces: list[str]) -> list[list[torch.Tensor]]:
    """Return by pace what this worker sees as its gradients, in every step."""
    found = []
    for pace in paces:
        model = Numbers()
        made = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer = pl.distribute(model, made, pace=pace, bucket_mb=0.05)
        seen = []
        for step in range(STEPS):
            given = gradients(group.rank, step)
            if step == 3 and group.rank == 2:
                given[0][5, 5] = float("nan")
            model(given).backward()
            seen.append(flat([p.grad for p in model.all]))
            optimizer.step()
            optimizer.zero_grad()
        found.append(seen)
        group.barrier()
    return found


@pytest.mark.parametrize("hosts", [1, APART])
def test_all_workers_see_the_averages_that_servers_apply(hosts: object) -> None:
    codecs = ("int8", "bf16", "topk:0.02", "topk:0.02+int8", "topk:0.02(min=0)", "int4", "onebit")
    paces = [f"ps[compress={codec}]" for codec in codecs]
    by_rank = run_ranks(WORKERS, averages, paces, servers=2, hosts=hosts)
    for codec, *seen in zip(codecs, *by_rank, strict=True):
        for mine, *others in zip(*seen, strict=True):
            for other in others:
                torch.testing.assert_close(other, mine, rtol=0, atol=0, equal_nan=True, msg=codec)
        finite = [bool(torch.isfinite(mine).all()) for mine in seen[0]]
        assert finite == [step != 3 for step in range(STEPS)], codec


def clip(group: Group, paces: list[str]) -> list[torch.Tensor]:
    """Let the script change its gradients before every step."""
    found = []
    for pace in paces:
        model = Numbers()
        made = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer = pl.distribute(model, made, pace=pace, bucket_mb=0.05)
        for step in range(STEPS):
            model(gradients(group.rank, step)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            model.all[3].grad = model.all[3].grad.clone() * 0.5
            model.all[0].grad = None if step == 2 else model.all[0].grad
            optimizer.step()
            optimizer.zero_grad()
        group.barrier()
        model.pull()
        found.append(-flat(list(model.all)))
        group.barrier()
    return found


@pytest.mark.parametrize("hosts", [1, [0, 1, 2]])
def test_changed_gradients_are_what_is_sent(hosts: object) -> None:
    paces = [p + c for p in ("ps", "async") for c in ("", "[compress=topk:1]")]
    for dense, same, free, same_free in run_ranks(2, clip, paces, servers=1, hosts=hosts):
        assert torch.equal(dense, same)
        torch.testing.assert_close(free, same_free, rtol=1e-5, atol=1e-5)


def learn(group: Group, paces: list[str]) -> list[tuple[float, float]]:
    """Return by pace the first and the last loss of a regression."""
    found = []
    for pace in paces:
        torch.manual_seed(1)
        target, model = nn.Linear(64, 32), nn.Linear(64, 32)
        made = torch.optim.SGD(model.parameters(), lr=0.03)
        model, optimizer = pl.distribute(model, made, pace=pace)
        draws, losses = torch.Generator().manual_seed(group.rank), []
        for _ in range(150):
            x = torch.randn(32, 64, generator=draws)
            loss = (model(x) - target(x).detach()).square().sum(1).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found.append((losses[0], sum(losses[-10:]) / 10))
        group.barrier()
    return found


def test_they_train() -> None:
    paces = [
        "ps[compress=int8]",
        "ps[compress=onebit, wait=layer]",
        "backup:1[compress=int4]",
        "ssp:2[compress=onebit]",
        "async[compress=topk:0.1]",
        "async[compress=dgc:0.2(momentum=0.5,warmup=20)]",
        "async[compress=topk:0.1, compensate=dc]",
    ]
    for results in run_ranks(2, learn, paces, servers=1, timeout_s=90):
        for pace, (first, last) in zip(paces, results, strict=True):
            assert last < first / 10, (pace, first, last)
