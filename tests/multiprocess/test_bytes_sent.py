"""The engine counts what a process hands to others: as much as the algorithms say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from run_support import Workbench
from torch import nn

import paceline as pl
from paceline.comm.group import Group
from paceline.runtime import job
from support import run_ranks

WIDTH = 512  # a square layer of 1 MB: large enough that flags and frames hardly count
SIZE = WIDTH * WIDTH * 4
STEPS = 16
NEAR = {"rel": 0.02}


@pytest.fixture
def bench(tmp_path: Path) -> Workbench:
    return Workbench(tmp_path)


def sent() -> tuple[int, int]:
    return job.current().fabric.engine.bytes_sent()


def sent_per_step(group: Group, pace: str) -> tuple[float, float]:
    """Train; return the bytes of a step that this worker sent on its host, and over the network."""
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer = pl.distribute(model, optimizer, pace=pace)
    group.barrier()
    before = sent()
    for _ in range(STEPS):
        model(torch.randn(2, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    local, network = (now - then for now, then in zip(sent(), before, strict=True))
    group.barrier()
    return local / STEPS, network / STEPS


@pytest.mark.parametrize("update", ["replicated", "sharded"])
def test_all_reduce_sends_each_value_twice_but_for_a_slice(update: str) -> None:
    for local, network in run_ranks(4, sent_per_step, f"allreduce[update={update}]"):
        assert local == pytest.approx(2 * 3 / 4 * SIZE, **NEAR)
        assert network == 0


def test_eight_local_steps_send_an_eighth() -> None:
    for local, network in run_ranks(4, sent_per_step, "local:8"):
        assert local == pytest.approx(2 * 3 / 4 * SIZE / 8, **NEAR)
        assert network == 0


def test_between_hosts_all_workers_share_what_crosses_the_network() -> None:
    for _, network in run_ranks(4, sent_per_step, "allreduce", hosts=2):
        assert network == pytest.approx(SIZE / 2, **NEAR), "half of a host's 2 (h - 1) / h"


@pytest.mark.parametrize(("hosts", "place"), [(1, 0), ([0, 0, 1], 1)])
def test_gradients_for_servers_count_wherever_those_are(hosts: object, place: int) -> None:
    found = run_ranks(2, sent_per_step, "ps", servers=1, hosts=hosts)
    for both in found:
        assert both[place] == pytest.approx(SIZE, **NEAR)
        assert both[1 - place] < SIZE / 50


@pytest.mark.parametrize(
    ("pace", "share"),
    [
        ("ps[compress=int8]", (1 + 4 / 256) / 4),
        ("ps[compress=onebit]", (1 / 8 + 8 / 2048) / 4),
        ("async[compress=topk:0.01]", (4 * 0.01 + 0.01 + 1 / 255) / 4),
        ("ssp:1[compress=bf16]", 1 / 2),
    ],
)
@pytest.mark.parametrize(("hosts", "place"), [(1, 0), ([0, 0, 1], 1)])
def test_a_codec_makes_them_fewer(pace: str, share: float, hosts: object, place: int) -> None:
    for both in run_ranks(2, sent_per_step, pace, servers=1, hosts=hosts):
        frames = 2 * 1024  # a push and a commit; between hosts their headers count as well
        assert both[place] == pytest.approx(SIZE * share + frames, rel=0.02, abs=500)


def counted(group: Group) -> None:
    values, n = torch.zeros(100_000), group.size
    many = torch.zeros(n * 1000)
    piece = torch.zeros(1000)
    cases = [
        (lambda: group.broadcast(values, 1), values.nbytes * (n - 1) * (group.rank == 1)),
        (lambda: group.all_gather(piece), piece.nbytes * (n - 1)),
        (lambda: group.reduce_scatter(many), piece.nbytes * (n - 1)),
        (lambda: group.barrier(), 0),
    ]
    for number, (call, expected) in enumerate(cases):
        before = sum(sent())
        call()
        assert sum(sent()) - before == expected, (number, group.rank)
    before = sum(sent())
    if group.rank == 0:
        group.send(values, 1)
    elif group.rank == 1:
        group.recv(torch.zeros(100_000), 0)
    assert sum(sent()) - before == values.nbytes * (group.rank == 0)


def test_every_collective_counts() -> None:
    run_ranks(3, counted)


_SCRIPT = """
    import torch
    import paceline as pl

    pl.init()
    model = torch.nn.Linear(512, 512, bias=False)
    model, optimizer = pl.distribute(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    for _ in range(20):
        model(torch.randn(2, 512)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_the_summary_says_what_travelled(bench: Workbench) -> None:
    done = bench.run("run", "-n", "2", bench.script(_SCRIPT))
    assert done.returncode == 0, done.stderr
    line = r"^paceline: 2 workers sent 2\d(\.\d)?( to 2\d(\.\d)?)? MB each \(1\.05 MB per step\), "
    assert re.search(line + r".* MB in all; waited .* % of the time$", done.stderr, re.M), (
        done.stderr
    )
    assert done.stderr.index("MB per step") < done.stderr.index("2 ranks finished in")
