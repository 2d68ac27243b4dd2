"""w workers equal one process: to the bit where the order of adding is fixed, else by rounding.

To the bit:
    one worker            the plain script
    w workers, one host   one process that plays them: gradients added in rank order, divided once
    sharded               replicated, wherever the workers are
    2 workers, DDP        DDP on gloo (it halves before it adds, which is exact)
    every rank            every other rank; every run, the next run

By rounding (float32 adds the gradients of a batch in another order when it is cut; training carries
the difference on): several hosts and batch norm over the global batch against the plain script. In
float64 the same difference is a million times smaller, which shows that it is nothing but rounding.
"""

from __future__ import annotations

import functools
import os
import tempfile

import pytest
import torch
from torch import nn
from workloads import (
    OPTIMIZERS,
    STEPS,
    Result,
    batch_of,
    loss_of,
    make_model,
    part_of,
    state_of,
    train_emulated,
    train_plain,
)

import paceline as pl
from paceline.comm.group import Group
from support import run_ranks
from support.reference import bits

KINDS = ("mlp", "wide", "resnet", "gpt")
UPDATES = ("replicated", "sharded")
_LONG = [(3, 1), (4, 1), (3, 2)]
PLACES = [  # workers, hosts
    *((1, 1), (2, 1), (2, 2), (4, 2)),
    *(pytest.param(*place, marks=pytest.mark.slow) for place in _LONG),
]
# Of losses, relative. float32: 50 steps blow 1e-7 up by some 10 000; AdamW divides small numbers
# by each other and is the worst. float64 starts at 1e-16.
TOLERANCE = {torch.float32: 5e-3, torch.float64: 1e-9}


@pytest.fixture(autouse=True)
def _one_thread():
    """Ranks compute with one thread; how many there are may change the order of adding."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


plain = functools.cache(train_plain)
emulated = functools.cache(train_emulated)


# -- in the ranks ---------------------------------------------------------------------------------


def train(
    group: Group,
    kind: str,
    optimizer_name: str,
    update: str,
    dtype: torch.dtype = torch.float32,
    **options: str,
) -> Result:
    """Train this rank's part; losses are those of this rank alone."""
    model = make_model(kind, dtype)
    if group.rank:  # rank 0's must win
        with torch.no_grad():
            for param in model.parameters():
                param.add_(group.rank)
    optimizer = OPTIMIZERS[optimizer_name](model)
    pl.distribute(model, optimizer, update=update, bucket_mb=0.004, **options)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, part_of(batch_of(kind, step, dtype), group.rank, group.size))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 20 == 0:
            pl.check_consistency(model, optimizer)
    pl.check_consistency(model, optimizer)
    return losses, state_of(model)


def train_all(group: Group, names: list[str]) -> dict[tuple[str, str, str], Result]:
    return {
        (kind, name, update): train(group, kind, name, update)
        for kind in KINDS
        for name in names
        for update in UPDATES
    }


def train_with_ddp(group: Group, kind: str, name: str, directory: str) -> list[float]:
    import torch.distributed as dist

    if not dist.is_initialized():  # left to the end of the process
        store = dist.FileStore(os.path.join(directory, "store"), group.size)
        dist.init_process_group("gloo", store=store, rank=group.rank, world_size=group.size)
    model = nn.parallel.DistributedDataParallel(make_model(kind))
    optimizer = OPTIMIZERS[name](model)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, part_of(batch_of(kind, step), group.rank, group.size))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# -- in the test session --------------------------------------------------------------------------


def require_equal(found: Result, expected: Result, what: object) -> None:
    assert found[0] == expected[0], f"{what}: losses differ"
    for name, value in expected[1].items():
        assert bits(found[1][name]) == bits(value), f"{what}: {name} differs"


def require_close(found: list[float], expected: list[float], tolerance: float, what: object):
    for step, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert abs(a - b) <= tolerance * abs(b), f"{what}: loss of step {step}: {a}, expected {b}"


def mean_losses(of_ranks: list[Result]) -> list[float]:
    return [sum(losses) / len(of_ranks) for losses in zip(*(r[0] for r in of_ranks), strict=True)]


@pytest.mark.parametrize(("world_size", "hosts"), PLACES)
def test_workers_equal_one_process(world_size: int, hosts: int) -> None:
    names = list(OPTIMIZERS) if world_size <= 2 and hosts == 1 else ["momentum", "fused adamw"]
    by_rank = run_ranks(world_size, train_all, names, hosts=hosts, timeout_s=100)
    for key, found in by_rank[0].items():
        kind, name, update = key
        require_equal(found, by_rank[0][kind, name, "replicated"], key)
        for others in by_rank[1:]:
            for tensor, value in found[1].items():
                assert bits(others[key][1][tensor]) == bits(value), (key, tensor)
        if world_size == 1:
            require_equal(found, plain(kind, name), key)
        if hosts == 1 or world_size == 2:  # two summands have one order
            require_equal(found, emulated(kind, name, world_size), key)
        if kind != "resnet":  # whose local statistics are those of smaller batches
            losses = mean_losses([results[key] for results in by_rank])
            require_close(losses, plain(kind, name)[0], TOLERANCE[torch.float32], key)


@pytest.mark.parametrize(
    ("world_size", "hosts"),
    [
        (2, 1),
        pytest.param(3, 1, marks=pytest.mark.slow),
        pytest.param(4, 2, marks=pytest.mark.slow),
    ],
)
def test_global_statistics_equal_one_process(world_size: int, hosts: int) -> None:
    def body(group: Group) -> list[Result]:
        return [
            train(group, "resnet", name, update, dtype, batchnorm="global", buffers=buffers)
            for name, update, dtype, buffers in cases
        ]

    cases = [
        ("momentum", "replicated", torch.float32, "broadcast"),
        ("momentum", "sharded", torch.float64, "local"),  # global statistics are the same anyway
        ("adamw", "sharded", torch.float64, "broadcast"),
    ]
    by_rank = run_ranks(world_size, body, hosts=hosts)
    for number, (name, _, dtype, _) in enumerate(cases):
        losses = mean_losses([results[number] for results in by_rank])
        expected = plain("resnet", name, dtype)
        require_close(losses, expected[0], TOLERANCE[dtype], cases[number])
        if dtype == torch.float64:
            for tensor, value in expected[1].items():
                found = by_rank[0][number][1][tensor]
                torch.testing.assert_close(found, value, rtol=1e-7, atol=1e-9, msg=tensor)


def test_what_separates_workers_from_one_process_is_rounding() -> None:
    def body(group: Group) -> list[Result]:
        return [
            train(group, kind, name, "sharded", torch.float64)
            for kind in ("mlp", "gpt")
            for name in ("momentum", "adamw")
        ]

    by_rank = run_ranks(3, body, hosts=2)
    expected = [
        plain(kind, name, torch.float64)
        for kind in ("mlp", "gpt")
        for name in ("momentum", "adamw")
    ]
    for number, result in enumerate(expected):
        losses = mean_losses([results[number] for results in by_rank])
        require_close(losses, result[0], TOLERANCE[torch.float64], number)
        for tensor, value in result[1].items():
            found = by_rank[0][number][1][tensor]
            torch.testing.assert_close(found, value, rtol=1e-7, atol=1e-9, msg=tensor)


@pytest.mark.parametrize("policy", ["average", "local"])
def test_other_policies_for_buffers(policy: str) -> None:
    """Buffers do not enter the gradients of training mode: parameters are those of broadcast."""

    def body(group: Group) -> tuple[Result, Result]:
        model = make_model("resnet")
        optimizer = OPTIMIZERS["momentum"](model)
        pl.distribute(model, optimizer, update="sharded", buffers=policy)
        for step in range(5):
            optimizer.zero_grad()
            loss_of(model, part_of(batch_of("resnet", step), group.rank, group.size)).backward()
            optimizer.step()
        return state_of(model)

    first, second = run_ranks(2, body)
    expected = emulated("resnet", "momentum", 2, 5)[1]
    for name, value in expected.items():
        is_buffer = "running" in name
        if not is_buffer or policy == "local":
            assert bits(first[name]) == bits(value), name
        assert (bits(first[name]) == bits(second[name])) is (not is_buffer or policy == "average")


@pytest.mark.parametrize("world_size", [2, 3])
def test_losses_equal_ddp(world_size: int) -> None:
    cases = [("mlp", "momentum"), ("resnet", "sgd"), ("gpt", "fused adamw")]

    def body(group: Group, directory: str) -> list[tuple[list[float], list[float]]]:
        return [
            (train_with_ddp(group, *case, directory), train(group, *case, "sharded")[0])
            for case in cases
        ]

    with tempfile.TemporaryDirectory() as directory:
        by_rank = run_ranks(world_size, body, directory)
    for found in by_rank:
        for case, (ddp, ours) in zip(cases, found, strict=True):
            if world_size == 2:
                assert ours == ddp, case
            require_close(ours, ddp, TOLERANCE[torch.float32], case)


@pytest.mark.parametrize("hosts", [1, 2])
def test_the_same_script_twice_gives_the_same_bits(hosts: int) -> None:
    def body(group: Group) -> list[str]:
        digests = []
        for kind in KINDS:
            model = make_model(kind)
            optimizer = OPTIMIZERS["adamw"](model)
            pl.distribute(model, optimizer)
            for step in range(10):
                optimizer.zero_grad()
                loss_of(model, part_of(batch_of(kind, step), group.rank, group.size)).backward()
                optimizer.step()
            digests.append(pl.check_consistency(model, optimizer))
        return digests

    first = run_ranks(3, body, hosts=hosts)
    assert first == run_ranks(3, body, hosts=hosts)
    assert first[0] == first[1] == first[2]
