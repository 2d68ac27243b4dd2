"""Encrypted links give the same numbers as plain ones, and nobody on the way can read them.

The ranks pretend to be on several hosts: TCP over loopback, which PACELINE_ENCRYPT=always encrypts.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.comm.group import Group
from support import run_ranks
from support.body import pack
from support.environs import job_environs
from support.ranks import _unpack_and_join, started_processes


def digest(*tensors: torch.Tensor) -> str:
    data = b"".join(tensor.detach().contiguous().numpy().tobytes() for tensor in tensors)
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def settings(setting: str) -> dict[str, str]:
    return {"PACELINE_ENCRYPT": setting}


def collectives(group: Group) -> list[str]:
    """Reduce, gather, exchange and send messages around the sizes of frames and records."""
    n, me = group.size, group.rank
    found = []
    for count in (1, 15, 2048, 32_768, 65_537, 700_001):
        values = torch.randn(count, generator=torch.Generator().manual_seed(me))
        reduced = values.clone()
        group.all_reduce(reduced)
        gathered = torch.empty(n * count)
        group.all_gather(values, out=gathered)
        received = torch.empty(count)
        work = group.send(values, (me + 1) % n, tag=count, async_op=True)
        group.recv(received, (me - 1) % n, tag=count)
        work.wait()
        found.append(digest(reduced, gathered, received))
    return found


@pytest.mark.parametrize("hosts", [2, (0, 1, 2)])
def test_collectives_and_messages(hosts) -> None:
    num_ranks = 4 if hosts == 2 else 3
    encrypted = run_ranks(num_ranks, collectives, hosts=hosts, env=settings("always"))
    assert encrypted == run_ranks(num_ranks, collectives, hosts=hosts, env=settings("off"))


def train(_: Group, pace: str, mode: str) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    inputs = torch.randn(96, 20)
    data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8)
    batches = pl.shard(data, mode=mode) if mode else pl.shard(data)
    model, optimizer = pl.distribute(model, optimizer, pace=pace)
    for x, y in batches:
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return digest(*model.parameters())


@pytest.mark.parametrize(
    ("pace", "mode", "others", "hosts"),
    [
        ("allreduce", "", {}, (0, 1)),
        ("ps", "", {"servers": 2}, (0, 1, 1, 0)),
        ("allreduce", "pipeline", {"data_workers": (2,)}, (0, 1, 1, 0)),
    ],
    ids=["allreduce", "servers", "data workers"],
)
def test_training(pace, mode, others, hosts) -> None:
    plain, encrypted = (
        run_ranks(2, train, pace, mode, hosts=hosts, env=settings(setting), **others)
        for setting in ("off", "always")
    )
    assert encrypted == plain
    assert len(set(encrypted)) == 1


PATTERN = b"nobody reads this tensor"


def send_pattern(group: Group) -> None:
    text = torch.frombuffer(bytearray(PATTERN * 40), dtype=torch.uint8)
    for tag in range(3):
        if group.rank == 0:
            group.send(text, 1, tag=tag)
        else:
            group.recv(torch.empty_like(text), 0, tag=tag)
    group.broadcast(text, 0)


@contextlib.contextmanager
def captured() -> Iterator[list[bytes]]:
    """Collect every packet on loopback."""
    every_protocol = 3
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(every_protocol)) as tap:
        tap.bind(("lo", every_protocol))
        tap.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 20)
        tap.settimeout(0.1)
        packets: list[bytes] = []
        over = threading.Event()

        def collect() -> None:
            while True:
                try:
                    packets.append(tap.recv(1 << 17))
                except TimeoutError:  # noqa: PERF203  # each turn waits
                    if over.is_set():
                        return

        thread = threading.Thread(target=collect)
        thread.start()
        try:
            yield packets
        finally:
            over.set()
            thread.join()


@pytest.mark.root
@pytest.mark.skipif(os.getuid() != 0, reason="only root can capture packets")
@pytest.mark.parametrize("setting", ["always", "off"])
def test_a_capture_shows_no_plain_text(setting) -> None:
    with captured() as packets:
        run_ranks(2, send_pattern, hosts=2, env=settings(setting))
    assert packets
    assert any(PATTERN in packet for packet in packets) == (setting == "off")


def test_a_rank_that_disagrees_reports_it() -> None:
    def reduce(_: Group) -> None:
        raise AssertionError("the job cannot be formed")

    with job_environs(2, 2, {"PACELINE_JOIN_TIMEOUT_S": "3"}) as environs:
        environs[0].update(settings("always"))  # the coordinator and rank 1 are plain on loopback
        with started_processes([(_unpack_and_join, (pack(reduce), ()))] * 2, environs) as ranks:
            outcomes = ranks.wait(60)
    assert [outcome.status for outcome in outcomes] == [1, 1]
    assert "PACELINE_ENCRYPT" in str(outcomes[0].error), outcomes[0]
