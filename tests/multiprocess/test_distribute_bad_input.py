"""Mistakes in a distributed script: a clear error on all ranks, and nobody waits for ever."""

from __future__ import annotations

import os
import re
import signal
import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from against_one_process import UPDATES, loss, mlp, rows, sgd
from torch import nn

import paceline as pl
from paceline.comm.group import Group
from support import outcomes_of, receive, report, run_processes, run_ranks, started
from support.named_memory import named_memory

SOON = {"PACELINE_TIMEOUT_S": "50"}  # before the test's own limit

# -- in the ranks ---------------------------------------------------------------------------------


def refused(pattern: str, function: Callable[[], object], kind: type = pl.errors.UsageError) -> str:
    with pytest.raises(kind) as found:
        function()
    assert re.search(pattern, str(found.value)), f"{pattern!r} is not in {found.value}"
    return str(found.value)


def distribute(model: nn.Module, **options: object) -> None:
    pl.distribute(model, sgd(model.parameters()), **options)


def differing_models(group: Group) -> None:
    """Every rank gets the same error, whichever of them is different."""
    here = group.rank == group.size - 1

    def name() -> None:
        model = nn.Sequential()
        model.add_module("odd" if here else "even", nn.Linear(2, 2))
        distribute(model)

    def layers() -> None:
        distribute(nn.Sequential(*[nn.Linear(2, 2)] * 1, *([nn.Linear(2, 2)] if here else [])))

    def frozen() -> None:
        model = mlp()
        model[2].weight.requires_grad_(not here)
        distribute(model)

    def settings() -> None:
        model = mlp()
        pl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.2 if here else 0.1))

    def optimizer() -> None:
        model = mlp()
        chosen = torch.optim.AdamW if here else torch.optim.Adam
        pl.distribute(model, chosen(model.parameters()))

    def groups() -> None:
        model = mlp()
        params = list(model.parameters())
        pl.distribute(model, sgd(params[::-1] if here else params))

    kind = pl.errors.InconsistentRanks
    last = group.size - 1
    for pattern, function in {
        rf"rank {last} has .*odd\.weight.*rank 0 has .*even\.weight": name,
        rf"rank {last} has .*1\.weight": layers,
        r"2\.weight float64\[3, 40\].*(frozen|trainable)": frozen,
        r"'lr': 0\.2.*'lr': 0\.1": settings,
        r"optimizer AdamW.*optimizer Adam": optimizer,
        r"group 0 has": groups,
        r"float64\[3, 2\].*float64\[2, 2\]": lambda: distribute(
            nn.Linear(2, 3 if here else 2).double()
        ),
        r"float32\[2, 2\].*float64\[2, 2\]": lambda: distribute(
            nn.Linear(2, 2).to(torch.float32 if here else torch.float64)
        ),
        "update='sharded'.*update='replicated'": lambda: distribute(
            mlp(), update="sharded" if here else "replicated"
        ),
        "buffer .*running_mean": lambda: distribute(
            nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=not here))
        ),
    }.items():
        refused(pattern, function, kind)


def unfit_arguments(group: Group) -> None:
    """Also when only one rank makes the mistake."""
    model, other = mlp(), mlp()
    lazy = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3))
    frozen = mlp().requires_grad_(False)
    mistakes = {
        "0.weight is not initialised yet": lambda: pl.distribute(lazy, sgd(lazy[1].parameters())),
        "nothing to train": lambda: pl.distribute(frozen, sgd(frozen.parameters())),
        r"parameter 0 of the optimizer's group 0 .*not a parameter of this model": lambda: (
            pl.distribute(model, sgd(other.parameters()))
        ),
        "expected a torch.nn.Module, got function": lambda: pl.distribute(loss, None),
        "expected a torch.optim.Optimizer, got": lambda: pl.distribute(model, model.parameters()),
        "update='shard' is unknown": lambda: distribute(model, update="shard"),
        "nonfinite='warn' is unknown; choose one of": lambda: distribute(model, nonfinite="warn"),
        "bucket_mb=0": lambda: distribute(model, bucket_mb=0),
        "bucket_mb='x'": lambda: distribute(model, bucket_mb="x"),
        "did you mean allreduce": lambda: distribute(model, pace="alreduce"),
        "no option 'updat'": lambda: distribute(model, pace="allreduce[updat=sharded]"),
        "a pace is a text": lambda: distribute(model, pace=3),
        "has gaps in its memory": lambda: distribute(_with_gaps()),
        "must be real": lambda: distribute(nn.Linear(2, 2, dtype=torch.complex64)),
    }
    for pattern, function in mistakes.items():
        refused(pattern, function)
        if group.size > 1:  # on the last rank only
            message = refused(
                pattern,
                function if group.rank == group.size - 1 else (lambda: distribute(mlp())),
            )
            assert f"rank {group.size - 1}" in message
    distribute(model)
    refused("distributed already", lambda: distribute(model))
    refused("belongs to another model", lambda: distribute(nn.Sequential(model)))
    optimizer = sgd(other.parameters())
    pl.distribute(other, optimizer)
    third = mlp()
    refused("not a parameter of this model", lambda: pl.distribute(third, optimizer))


def _with_gaps() -> nn.Module:
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(torch.randn(4, 8)[:, :4])
    return model


def wrapped_by_ddp(group: Group) -> None:
    import torch.distributed as dist

    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    model = nn.parallel.DistributedDataParallel(mlp())
    refused("already wrapped in DistributedDataParallel", lambda: distribute(model))


def double_backward(group: Group) -> None:
    for update in UPDATES:
        model = mlp()
        distribute(model, update=update)
        again = partial(loss(model, rows(group)[:2]).backward, create_graph=True)
        refused("create_graph=True.*torch.autograd.grad", again)


def not_finite(group: Group, update: str) -> None:
    culprit = group.size - 1
    for bad in (float("nan"), float("inf"), float("-inf")):
        for policy in ("raise", "skip", "ignore"):
            model = nn.Sequential(
                nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 300), nn.Linear(300, 1)
            )
            optimizer = torch.optim.Adam(model.double().parameters(), weight_decay=0.1)
            pl.distribute(model, optimizer, update=update, nonfinite=policy, bucket_mb=0.01)

            def backward(step: int, model: nn.Module = model, bad: float = bad) -> None:
                hook = None
                if group.rank == culprit and step == 1:
                    hook = model[2].bias.register_hook(lambda grad: grad + bad)
                model.zero_grad()
                try:
                    loss(model, rows(group, seed=step)[:2]).backward()
                finally:
                    if hook is not None:
                        hook.remove()

            backward(0)
            optimizer.step()
            before = {name: value.clone() for name, value in model.state_dict().items()}
            digest = pl.check_consistency(model, optimizer)
            if policy == "raise":
                kind = pl.errors.NonFiniteGradient
                message = refused(rf"step 2\b.*rank {culprit}: 2\.bias", lambda: backward(1), kind)
                assert "0.weight" not in message
            elif policy == "skip":
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    backward(1)
                    optimizer.step()
                found = [str(w.message) for w in caught]
                assert len(found) == (1 if group.rank == 0 else 0), found
                for text in found:
                    assert re.search(rf"step 2\b.*rank {culprit}: 2\.bias", text), text
                for name, value in model.state_dict().items():
                    assert torch.equal(value, before[name]), name
                assert pl.check_consistency(model, optimizer) == digest
            else:
                backward(1)
                assert not torch.isfinite(model[2].bias.grad).any()
            backward(2)  # it can go on
            if policy != "ignore":
                optimizer.step()
                assert all(torch.isfinite(p).all() for p in model.parameters())
                assert pl.check_consistency(model, optimizer) != digest
            group.barrier()


def not_finite_and_sparse(group: Group, update: str) -> None:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2)).double()
    distribute(model, update=update, nonfinite="raise")
    if group.rank == 0:
        model[0].weight.register_hook(lambda grad: grad * float("nan"))
    function = lambda: loss(model, torch.arange(5)).backward()  # noqa: E731
    refused(r"rank 0: 0\.weight", function, pl.errors.NonFiniteGradient)


def overflow_of_the_sum(group: Group, update: str) -> None:
    model = nn.Linear(6, 2, bias=False)
    distribute(model, update=update, nonfinite="raise")
    model.weight.register_hook(lambda grad: torch.full_like(grad, 3e38))
    if group.size > 1:
        function = lambda: loss(model, torch.ones(2, 6)).backward()  # noqa: E731
        refused("no rank alone", function, pl.errors.NonFiniteGradient)


def stray_parameters(group: Group, update: str) -> None:
    model = mlp()
    optimizer = sgd(model.parameters())
    pl.distribute(model, optimizer, update=update)
    model.append(nn.Linear(3, 3).double())
    optimizer.add_param_group({"params": list(model[3].parameters())})
    loss(model, rows(group)[:2]).backward()
    refused("did not have when it was distributed", optimizer.step)


def run_battery(group: Group) -> None:
    for check in (differing_models, unfit_arguments, wrapped_by_ddp, double_backward):
        if check is differing_models and group.size == 1:
            continue
        print(check.__name__, flush=True)
        check(group)
    for check in (not_finite, not_finite_and_sparse, overflow_of_the_sum, stray_parameters):
        for update in UPDATES:
            print(check.__name__, update, flush=True)
            check(group, update)


def train_for_ever(group: Group, update: str, victim: int) -> None:
    model = nn.Sequential(nn.Linear(200, 400), nn.ReLU(), nn.Linear(400, 400), nn.Linear(400, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    pl.distribute(model, optimizer, update=update, bucket_mb=0.1)
    count = 0

    def die(grad: torch.Tensor) -> None:
        if count == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    if group.rank == victim:
        model[0].weight.register_hook(die)  # the last one: other buckets are on their way
    while True:
        count += 1
        optimizer.zero_grad()
        (model(torch.randn(16, 200)) ** 2).mean().backward()
        optimizer.step()
        if count == 4:
            report("training")
            if group.rank == victim:  # until step 4 has ended everywhere
                receive()


# -- in the test session --------------------------------------------------------------------------


@pytest.mark.parametrize(("world_size", "hosts"), [(1, 1), (2, 1), (3, 2)])
def test_mistakes_are_told_on_all_ranks(world_size: int, hosts: int) -> None:
    run_ranks(world_size, run_battery, hosts=hosts, env=SOON)


def test_before_init() -> None:
    def body(_: int) -> None:
        model = mlp()
        refused(r"init\(\) first", lambda: distribute(model), pl.errors.PacelineError)

    [outcome] = run_processes(body, [{**os.environ}])
    assert outcome.error is None and outcome.status == 0, outcome


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("hosts", [1, 2])
def test_a_rank_that_dies_during_backward(update: str, hosts: int) -> None:
    before = named_memory()
    victim = 1
    with started(3, train_for_ever, update, victim, hosts=hosts) as ranks:
        ranks.receive_all()
        ranks.send(victim, "go on")
        outcomes = ranks.wait()
    assert outcomes[victim].status == -signal.SIGKILL
    for outcome in outcomes:
        if outcome.rank != victim:
            assert isinstance(outcome.error, pl.errors.PeerLost), outcome
            assert outcome.error.rank == victim and f"rank {victim}" in str(outcome.error), outcome
            assert outcome.status == 1
    assert named_memory() - before == set()


def test_a_rank_whose_loss_does_not_need_the_model() -> None:
    """It takes no part in the exchange: the others say whom they wait for."""

    def body(group: Group) -> None:
        model = mlp()
        optimizer = sgd(model.parameters())
        pl.distribute(model, optimizer, update="replicated")
        if group.rank == 1:
            torch.ones(1, requires_grad=True).sum().backward()
        else:
            loss(model, rows(group)).backward()
        optimizer.step()
        group.barrier()

    outcomes = outcomes_of(2, body, env={"PACELINE_TIMEOUT_S": "3"})
    assert isinstance(outcomes[0].error, pl.errors.PeerError), outcomes[0]
    assert outcomes[0].error.rank == 1 or "rank 1" in str(outcomes[0].error), outcomes[0]
    assert outcomes[1].error is not None
