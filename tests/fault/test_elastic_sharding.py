"""Elastic all-reduce with the sharded update: workers die while they write to what all share."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import paceline as pl
from fault.test_elastic_training import Diary, digest, policy
from paceline.comm.group import Group
from paceline.data_parallel.update import elastic_sharding
from paceline.data_parallel.update.elastic_sharding import ElasticShardedUpdate
from paceline.runtime.job import current
from support import report
from support.elastic import elastic_job, pause_if_held

STEPS = 16
KILLED_IN = 7
VICTIM = 1
SETTINGS: dict[str, dict[str, float]] = {"SGD": {"momentum": 0.9}, "AdamW": {}, "ASGD": {}}


class Trap:
    """Kills this process in the second chunk of a step."""

    def __init__(self, kind: type[torch.optim.Optimizer], where: str) -> None:
        self.is_set, self._calls, self._where = False, 0, where
        own: Callable[..., Any] = kind.step

        def step(optimizer: torch.optim.Optimizer, closure: Any = None) -> Any:
            self._calls += self.is_set
            if self._calls == 2 and where == "torn":
                held = [p for group in optimizer.param_groups for p in group["params"]]
                for tensor in [*held, *(v for p in held for v in optimizer.state[p].values())]:
                    tensor.detach().fill_(1e9)
                os.kill(os.getpid(), signal.SIGKILL)
            result = own(optimizer, closure)
            if self._calls == 2:  # updated, and not marked as done
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        kind.step = step  # type: ignore[method-assign]


def sharing() -> ElasticShardedUpdate | None:
    """Return the update of this worker's training, if it is a sharded one."""
    parts = current().elastic.parts._parts
    return next((part for name, part in parts.items() if name.endswith(" update")), None)


def train(group: Group, name: str, update: str, where: str) -> dict[str, Any]:
    """Train; report a digest after each step."""
    elastic_sharding._CHUNK_ELEMENTS = 256  # several chunks for each worker
    trap = Trap(getattr(torch.optim, name), where)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 33), nn.Linear(33, 1))
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01, **SETTINGS[name])
    model, optimizer = pl.distribute(model, optimizer, bucket_mb=0.001, update=update)
    job, num_shared = current(), 0
    while job.steps_done < STEPS:
        step = job.steps_done + 1
        x = torch.randn(8, 20, generator=torch.Generator().manual_seed(step))
        model(x + pl.rank()).pow(2).mean().backward()
        found = sharing()
        num_shared += found is not None and found.memory is not None
        trap.is_set = bool(where) and pl.rank() == VICTIM and step == KILLED_IN
        optimizer.step()
        optimizer.zero_grad()
        report((job.steps_done, pl.world_size(), digest(model)))
        pause_if_held(job.steps_done)
    state = optimizer.state_dict()["state"]
    with tempfile.TemporaryFile() as file:
        torch.save(state, file)
    flat = [value.reshape(-1) for entries in state.values() for value in entries.values()]
    return {"shared": num_shared, "state": torch.cat(flat).numpy().tobytes().hex()}


@pytest.mark.parametrize(("name", "where"), [("AdamW", "torn"), ("SGD", "updated")])
def test_a_worker_dies_between_chunks_and_its_step_counts(name: str, where: str) -> None:
    """The survivors finish the step with all batches, as it is without a loss, to the bit."""
    with elastic_job(policy(3)) as job:
        job.start(train, name, "replicated", "")
        plain = Diary(job)
        job.ranks.values(60)
        plain.receive_rest()
    with elastic_job(policy(3)) as job:
        job.start(train, name, "auto", where)
        diary = Diary(job)
        outcomes = job.ranks.wait(60)
        ends = [outcome.status for outcome in outcomes]
        assert ends == [0, -signal.SIGKILL, 0], "\n".join(map(str, outcomes))
        diary.receive_rest()
        diary.require_agreement()
        assert sorted(diary.steps[0]) == list(range(1, STEPS + 1))
        for step in range(1, KILLED_IN + 1):
            assert diary.steps[0][step][1] == plain.steps[0][step][1], f"step {step}"
        assert diary.steps[0][KILLED_IN + 1][0] == 2
        values = [o.value for o in outcomes if o.status == 0]
        assert values[0] == values[1]
        apart = 1 + elastic_sharding._STEPS_AFTER_CHANGE  # the first, and those after the loss
        assert values[0]["shared"] == STEPS - apart


def edit(group: Group, update: str) -> list[str]:
    """Train while the script does to parameters, settings and state what scripts do."""
    elastic_sharding._CHUNK_ELEMENTS = 256
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 1))
    model[0].bias.requires_grad = False
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = pl.distribute(model, optimizer, bucket_mb=0.001, update=update)
    digests = []
    for step in range(30):
        if step == 3:
            model[0].bias.requires_grad = True
        x = torch.randn(8, 20, generator=torch.Generator().manual_seed(step)) + pl.rank()
        model(x).pow(2).mean().backward()
        if step == 6:
            optimizer.param_groups[0]["momentum"] = 0.9
        if step == 13:
            saved = optimizer.state_dict()
        if step == 16:
            optimizer.load_state_dict(saved)
        if step == 19:
            for param in model.parameters():
                param.grad = param.grad * 2
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            if step == 22:
                model[0].weight.clamp_(-0.1, 0.1)
            if step == 25:
                model[2].weight.data = model[2].weight.data * 0.5
        digests.append(digest(model))
    return digests


def test_what_scripts_change_is_as_with_the_replicated_update() -> None:
    found = []
    for update in ("replicated", "sharded"):
        with elastic_job(policy(3)) as job:
            job.start(edit, update)
            found += job.ranks.values(60)
    differing = [step for step in range(30) if len({digests[step] for digests in found}) > 1]
    assert not differing, [[digests[step] for digests in found] for step in differing[:2]]
