"""pl.GradScaler in every pace: it changes nothing but the step in which a gradient is infinite."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.comm.group import Group
from paceline.errors import UsageError
from support import run_ranks

STEPS = 9
BAD = 4  # the step in which the last rank's loss is infinite

TOGETHER = (
    *("allreduce[update=replicated]", "allreduce[update=sharded]"),
    *("partial:0.5", "partial:0.5[carry=yes]", "partial:0.5[skip_compute=yes,unused=ignore]"),
    *("bitmap", "bitmap[feedback=yes]", "bitmap[momentum=0]"),
)
LOCALLY = (
    *("local:2", "post_local:2[after=3]", "bmuf:2", "diloco:3", "diloco:4[fragments=2,delay=1]"),
    *("easgd:2", "eamsgd:2", "gossip:ring"),
)
THROUGH_SERVERS = ("ps", "ps[wait=layer]", "ps[server_dtype=bf16]", "ps[wire=fp16]", "ssp:0")
LOCALLY_THROUGH_SERVERS = ("local:2", "diloco:3", "easgd:2", "bitmap")


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3))


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    chance = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(8, 6, generator=chance)
    return model(x).square().mean()


def make(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "fused":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def without(group: Group, pace: str, kind: str) -> nn.Module:
    """Train without a scaler, and leave out the bad step by hand."""
    model = model_of()
    model, optimizer = pl.distribute(model, make(kind, model), pace=pace)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, group.rank, step)
        if step != BAD:
            loss.backward()
            optimizer.step()
        elif pace.startswith("bitmap"):  # what is finite of it stays in the momentum
            (loss * float("inf") if group.rank == group.size - 1 else loss).backward()
    return model


def with_scaler(group: Group, pace: str, kind: str) -> tuple[nn.Module, list[float]]:
    """Train with a scaler whose scale changes several times; return it after each step."""
    model = model_of()
    scaler = pl.GradScaler(init_scale=1024.0, growth_interval=2)
    model, optimizer = pl.distribute(model, make(kind, model), pace=pace)
    scales = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, group.rank, step)
        if step == BAD and group.rank == group.size - 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if step % 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return model, scales


def compare(group: Group, paces: tuple[str, ...]) -> None:
    for pace in paces:
        for kind in ("plain", "fused"):
            print(pace, kind, flush=True)
            expected = without(group, pace, kind)
            found, scales = with_scaler(group, pace, kind)
            # Up every second step, and down in the bad one alone: on all ranks.
            assert scales == [1024, 2048, 2048, 4096, 2048, 2048, 4096, 4096, 8192], (pace, scales)
            for name, value in found.state_dict().items():
                assert torch.equal(value, expected.state_dict()[name]), (pace, kind, name)


def test_workers_leave_out_the_same_step_in_lockstep() -> None:
    run_ranks(3, compare, TOGETHER, env={"PACELINE_TIMEOUT_S": "50"})


def test_workers_leave_out_the_same_step_with_local_steps() -> None:
    run_ranks(3, compare, LOCALLY, env={"PACELINE_TIMEOUT_S": "50"})


def test_workers_leave_out_the_same_step_through_servers() -> None:
    run_ranks(2, compare, THROUGH_SERVERS, servers=2, hosts=[0, 1, 0, 1])


def test_workers_leave_out_the_same_step_locally_with_servers() -> None:
    run_ranks(2, compare, LOCALLY_THROUGH_SERVERS, servers=1)


# -- where workers have no steps in common --------------------------------------------------------


def run_freely(group: Group, pace: str, kind: str, scaler: torch.amp.GradScaler) -> float:
    """Let one rank find infinite gradients in most steps; all meet in the end. Return the scale."""
    model = model_of()
    before = [param.clone() for param in model.parameters()]
    model, optimizer = pl.distribute(model, make(kind, model), pace=pace)
    is_bad = group.rank == group.size - 1
    for step in range(10):
        optimizer.zero_grad()
        loss = loss_of(model, group.rank, step)
        if is_bad and 2 <= step < 8:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    # Whoever has left out steps without counting them is waited for by those who wait here.
    group.barrier()
    model.pull()
    group.barrier()
    for param, old in zip(model.parameters(), before, strict=True):
        assert torch.isfinite(param).all(), pace
        assert not torch.equal(param, old), pace
    if "easgd" not in pace:  # there each has a model of its own
        pl.check_consistency(model)
    return scaler.get_scale()


def freely(group: Group, paces: tuple[str, ...]) -> None:
    for pace in paces:
        for kind in ("plain", "fused"):
            print(pace, kind, flush=True)
            scale = run_freely(group, pace, kind, pl.GradScaler(init_scale=1024.0))
            # With backups a worker may be late in every round, and sees the others' means only.
            if not pace.startswith("backup"):
                assert scale == (16.0 if group.rank == group.size - 1 else 1024.0), (pace, scale)


def with_torchs_own(group: Group, paces: tuple[str, ...]) -> None:
    for pace in paces:
        for kind in ("plain", "fused"):
            print(pace, kind, flush=True)
            scale = run_freely(group, pace, kind, torch.amp.GradScaler("cpu", init_scale=1024.0))
            assert scale == (16.0 if group.rank == group.size - 1 else 1024.0), (pace, scale)


FREE = ("async", "ssp:1", "ssp:2[unit=version]", "async[push=delta]", "easgd:2[mode=async]")


def test_an_update_that_is_left_out_counts_where_nobody_waits() -> None:
    run_ranks(3, freely, (*FREE, "backup:1"), servers=1, env={"PACELINE_TIMEOUT_S": "50"})


def test_an_update_that_is_left_out_counts_in_shared_memory() -> None:
    run_ranks(3, freely, ("hogwild[agree=3]",), env={"PACELINE_TIMEOUT_S": "50"})


def test_torchs_own_scaler_where_nobody_waits() -> None:
    run_ranks(2, with_torchs_own, FREE[:-1], servers=1, env={"PACELINE_TIMEOUT_S": "50"})


# -- torch's own scaler ---------------------------------------------------------------------------


def compare_torchs_own(group: Group) -> None:
    """Through servers in lockstep it does what ours does, also with an optimizer that is fused."""
    for kind in ("plain", "fused"):
        ours, scales = with_scaler(group, "ps", kind)
        model = model_of()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        model, optimizer = pl.distribute(model, make(kind, model), pace="ps")
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = loss_of(model, group.rank, step)
            if step == BAD and group.rank == 0:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            if step % 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == scales[step]
        for found, expected in zip(model.parameters(), ours.parameters(), strict=True):
            assert torch.equal(found, expected), kind


def refused(group: Group, paces: tuple[str, ...]) -> None:
    for pace in paces:
        model = model_of()
        scaler = torch.amp.GradScaler("cpu")
        model, optimizer = pl.distribute(model, make("plain", model), pace=pace)
        scaler.scale(loss_of(model, group.rank, 0)).backward()
        with pytest.raises(UsageError, match=r"pl\.GradScaler"):
            scaler.step(optimizer)


def compare_and_refuse(group: Group) -> None:
    compare_torchs_own(group)
    refused(group, ("backup:1", "ps[wire=fp16]", "local:2"))


def test_torchs_own_scaler_through_servers() -> None:
    run_ranks(2, compare_and_refuse, servers=1)


def refuse_and_let_go(group: Group) -> None:
    refused(group, ("local:2", "gossip", "partial:0.5", "bitmap"))
    # Behind a change of the pace the optimizer is torch's again.
    model = model_of()
    model, optimizer = pl.distribute(model, make("plain", model), pace="local:2@0, allreduce@2")
    for step in range(2):
        loss_of(model, group.rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, group.rank, 2)).backward()
    scaler.step(optimizer)
    scaler.update()
    pl.check_consistency(model)


def test_torchs_own_scaler_is_refused_where_it_would_be_wrong() -> None:
    run_ranks(2, refuse_and_let_go)


# -- what a script may do -------------------------------------------------------------------------


def ways_to_use_it(group: Group) -> None:
    scaler = pl.GradScaler(init_scale=4096.0)
    # Gradients add up, with and without exchange, and are the same as without a scale.
    for silent in (True, False):
        grads = []
        for scale in (lambda loss: loss, scaler.scale):
            model = model_of()
            model, _ = pl.distribute(model, make("plain", model))
            for step in range(3):
                if silent and step < 2:
                    with model.no_sync():
                        scale(loss_of(model, group.rank, step)).backward()
                else:
                    scale(loss_of(model, group.rank, step)).backward()
            grads.append([param.grad.clone() for param in model.parameters()])
        for plain, ours in zip(*grads, strict=True):
            assert torch.equal(plain, ours), silent

    # A penalty on gradients, as torch's documentation has it.
    norms = []
    for uses_scale in (False, True):
        model = model_of()
        model, optimizer = pl.distribute(model, make("plain", model))
        loss = loss_of(model, group.rank, 0)
        factor = scaler.get_scale() if uses_scale else 1.0
        scaled = scaler.scale(loss) if uses_scale else loss
        inner = torch.autograd.grad(scaled, list(model.parameters()), create_graph=True)
        loss = loss + sum((grad / factor).square().sum() for grad in inner)
        (scaler.scale(loss) if uses_scale else loss).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    assert torch.equal(*norms)

    # A pass that broke off leaves nothing behind.
    model = model_of()
    model, optimizer = pl.distribute(model, make("plain", model))
    loss = loss_of(model, group.rank, 0)
    broken = model(torch.ones(1, 6)).sum()
    broken.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        scaler.scale(broken).backward()
    loss_of(model, group.rank, 0).backward()
    plain = model_of()
    loss_of(plain, group.rank, 0).backward()
    expected = plain[0].weight.grad.clone()
    group.all_reduce(expected, "mean")
    torch.testing.assert_close(model[0].weight.grad, expected)

    # Models that are not distributed, a disabled scaler, several losses, two steps without update.
    alone = model_of()
    optimizer = make("plain", alone)
    scaler.scale(loss_of(alone, group.rank, 0)).backward()
    assert alone[0].weight.grad.abs().max() > 10 * expected.abs().max()
    scaler.unscale_(optimizer)
    torch.testing.assert_close(alone[0].weight.grad, plain[0].weight.grad)
    off = pl.GradScaler(enabled=False)
    one = torch.ones(1)
    assert off.scale(one) is one
    assert [float(x) for x in scaler.scale([one, one])] == [4096.0, 4096.0]
    model = model_of()
    model, optimizer = pl.distribute(model, make("plain", model))
    scaler.scale(loss_of(model, group.rank, 0)).backward()
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.step(optimizer)
    assert set(scaler.state_dict()) == set(torch.amp.GradScaler("cpu").state_dict())


def test_what_a_script_may_do() -> None:
    run_ranks(2, ways_to_use_it)


def change_pace(group: Group) -> None:
    """The scale is taken off once, also behind a change of the pace."""
    pace = "allreduce@0, local:2@2, partial:1@6"
    expected = without(group, pace, "plain")
    found, _ = with_scaler(group, pace, "plain")
    for mine, theirs in zip(found.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_changes_of_the_pace() -> None:
    run_ranks(2, change_pace)
