"""A backup is equal to the primary, to the bit: values, optimizer state, versions, in every mode.

Workers update arrays and read everything that the primary has; then it is killed, and they read the
same from the one that takes over. A new copy, filled while they went on, takes over in the end.
"""

from __future__ import annotations

import hashlib
import time
from typing import Any

import numpy as np
import pytest
import torch

import paceline as pl
from paceline.control.membership.policy import Policy
from paceline.ps import messages as m
from paceline.ps.client import session
from paceline.ps.state_wire import landing
from support import receive, report
from support.elastic import elastic_job

SIZE = 90_000
STEPS = 12
MODES: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "ps": ("ps", {}, "Adam", {"lr": 0.01}),
    "ps, not finite": ("ps", {"nonfinite": "quarantine"}, "SGD", {"lr": 0.1, "momentum": 0.9}),
    "ps, bf16": ("ps", {"server_dtype": "bf16"}, "AdamW", {"lr": 0.01}),
    "async": ("async", {}, "SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "async, bf16": ("async", {"server_dtype": "bf16"}, "Adam", {"lr": 0.01}),
    "ssp": ("ssp:2", {}, "Adagrad", {"lr": 0.1}),
    "softsync": ("async", {"softsync": 1, "lr": "staleness"}, "SGD", {"lr": 0.1}),
    "dc": ("async", {"compensate": "dc"}, "SGD", {"lr": 0.1, "momentum": 0.9}),
    "delta": ("async", {"push": "delta"}, "SGD", {"lr": 0.1}),
    "params": ("ssp:1", {"push": "params"}, "SGD", {"lr": 0.1}),
}
FAST = ("ps", "dc")


def everything(client: pl.ps.Client) -> list[Any]:
    """Return what the servers have, in short: values, states, versions."""
    key = session.current().keys["w"].remote
    found: list[Any] = [_digest(client.peek("w").wait()), key.versions()]
    for place in key.array_shards:
        tensors: list[torch.Tensor] = []

        def into(reply: m.Reply, tensors: list[torch.Tensor] = tensors) -> list[torch.Tensor]:
            tensors.extend(landing(reply.entries))
            return tensors

        table = key.table_on(place.link)
        ask = place.link.ask(lambda seq, n=table: m.FetchState(seq, n, 0), into=into)
        entries = ask.wait().entries
        found.append([(e.piece, e.key, e.value, e.dtype, e.shape) for e in entries])
        found.append([_digest(tensor.numpy()) for tensor in tensors])
    return found


def _digest(array: np.ndarray) -> str:
    return hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=8).hexdigest()


def update(group, mode: str) -> list[Any]:
    pace, options, optimizer, settings = MODES[mode]
    client = pl.ps.Client(pace, **options)
    start = np.random.default_rng(0).standard_normal(SIZE).astype(np.float32)
    client.init("w", start, optimizer, **settings)
    random = np.random.default_rng(1 + group.rank)

    def steps(count: int) -> None:
        for number in range(count):
            grad = random.standard_normal(SIZE).astype(np.float32)
            if "finite" in mode and group.rank == 1 and number % 4 == 3:
                grad[7] = np.nan
            with np.errstate(all="ignore"):
                client.push_pull("w", grad).wait()
        group.barrier()  # everybody's updates count, and nobody goes on

    seen = []
    for _ in range(3):
        steps(STEPS)
        for _ in range(2):  # before the primary is killed, and after
            if group.rank == 0:
                report(everything(client))
                receive()
            group.barrier()
    return seen


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "mode", [mode if mode in FAST else pytest.param(mode, marks=pytest.mark.slow) for mode in MODES]
)
def test_whoever_takes_over_has_the_same_bits(mode: str) -> None:
    policy = Policy(
        num_workers=2, num_servers=2, is_elastic=True, replicas=2, num_partitions=1, min_workers=1
    )
    with elastic_job(policy) as job:
        job.start(update, mode)
        for _ in range(3):
            before = job.ranks.receive(0)
            while len(copies := job.operator.status().membership.partitions[0]) < 2:
                time.sleep(0.01)
            primary = job.operator.status().membership.member(copies[0])
            job.ranks.kill(primary.rank)
            job.ranks.send(0, "look again")
            after = job.ranks.receive(0)
            assert after == before
            job.add("server", primary.number)
            job.ranks.send(0, "go on")  # while the new copy is being filled
        outcomes = job.ranks.wait(60, [0, 1])
        assert all(outcome.status == 0 for outcome in outcomes), "\n".join(map(str, outcomes))
