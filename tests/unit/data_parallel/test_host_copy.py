"""The memory that elastic workers share, in one process that plays all of them in turn."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.comm.group import Group
from paceline.comm.shared_memory import allocate
from paceline.data_parallel.bucket import Bucket, NamedParameter
from paceline.data_parallel.update.chunks import make_chunk, plan_chunks
from paceline.data_parallel.update.host_copy import HostCopy
from paceline.data_parallel.update.ownership import cut_anywhere, cut_at_borders
from paceline.runtime.job import current

NUM_WORKERS = 3
KINDS = {
    "AdamW": {},
    "SGD": {"momentum": 0.9},
    "Adadelta": {},
    "NAdam": {},
    "ASGD": {},
    "Rprop": {},
}


class _Killed(BaseException):
    pass


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    pl.init()
    yield
    pl.shutdown()


def make_model() -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Linear(20, 33), nn.Linear(33, 7), nn.Linear(7, 1)]
    model = nn.Sequential(nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last), *layers)
    model.register_parameter("scale", nn.Parameter(torch.tensor(2.0)))
    return model


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    return getattr(torch.optim, name)(model.parameters(), lr=0.01, **KINDS[name])


def set_gradients(model: nn.Module, step: int) -> None:
    for number, param in enumerate(model.parameters()):
        made = torch.Generator().manual_seed(100 * step + number)
        grad = torch.randn(param.shape, generator=made)
        if param.grad is None:
            param.grad = torch.empty_like(param)
        param.grad.copy_(grad)


class Host:
    """A model in shared memory, and its workers."""

    def __init__(self, name: str, *, splits: bool) -> None:
        self.engine = current().fabric.engine
        self.model = make_model()
        self.optimizer = make_optimizer(name, self.model)
        self.step = self.optimizer.step
        named = [NamedParameter(name, param) for name, param in self.model.named_parameters()]
        kinds = {"allocate": self.allocate, "allocate_params": self.allocate}
        self.buckets = [
            Bucket(i, part, **kinds, allocate_averaged=self.allocate, first_slot=10 * i)
            for i, part in enumerate((named[:4], named[4:]))
        ]
        slots = [slot for bucket in self.buckets for slot in bucket.slots]
        for slot in slots:
            slot.segment.view(slot.bucket.params).copy_(slot.param.detach())
            slot.param.data = slot.shown
            slot.param.grad = slot.averaged
        set_gradients(self.model, 0)
        self.step()  # it makes the state
        cut = cut_anywhere if splits else cut_at_borders
        owned = plan_chunks(slots, cut, NUM_WORKERS, 128, splits=splits)
        assert all(len(chunks) > 1 for chunks in owned) or not splits
        group = Group(current().fabric, [0])
        by_param = {slot.param: slot for slot in slots}
        own = {p: dict(entries) for p, entries in self.optimizer.state.items()}
        values = {p: p.detach().clone() for p in by_param}
        self.first = HostCopy(self.engine, group, self.optimizer, by_param, owned)
        self.workers = [self._play(rank, values, own) for rank in range(NUM_WORKERS)]

    def allocate(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return allocate(self.engine, (count,), dtype).zero_()

    def _play(self, rank: int, values: dict, own: dict) -> HostCopy:
        """Return what worker `rank` has, with its part of the memory filled."""
        worker, first = copy.copy(self.first), self.first
        worker._rank = rank
        worker._chunks = [make_chunk(one, first._shared, first._groups) for one in worker._mine]
        worker._saved = [worker._saves(chunk) for chunk in worker._chunks]
        live = {p: p.data for p in values}
        for param, value in values.items():
            param.data = value
        self.optimizer.state.update(own)
        worker._fill(self.optimizer)
        self.optimizer.state.clear()
        for param, value in live.items():
            param.data = value
        return worker

    def begin_step(self, step: int) -> None:
        set_gradients(self.model, step)
        for worker in self.workers:
            worker.begin_step()

    def require_equal(self, other: nn.Module, state: dict) -> None:
        pairs = zip(self.model.parameters(), other.parameters(), strict=True)
        assert all(torch.equal(mine, theirs) for mine, theirs in pairs)
        for mine, theirs in zip(self.model.parameters(), other.parameters(), strict=True):
            found, expected = self.optimizer.state.get(mine, {}), state.get(theirs, {})
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[key], expected[key]) for key in expected)


def reference(name: str, steps: int) -> tuple[nn.Module, dict]:
    model = make_model()
    optimizer = make_optimizer(name, model)
    for step in range(steps):
        set_gradients(model, step)
        optimizer.step()
    return model, optimizer.state


@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize("name", KINDS)
def test_chunks_of_all_workers_are_a_step(name: str, splits: bool) -> None:
    host = Host(name, splits=splits)
    for step in range(1, 4):
        host.begin_step(step)
        for worker in host.workers:
            worker.run(host.step)
    assert not host.workers[0].is_edited()
    host.workers[1].leave(host.allocate, None, keeps_state=False)
    host.require_equal(*reference(name, 4))


@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize("name", KINDS)
def test_any_survivor_finishes_a_step(name: str, splits: bool) -> None:
    """Worker 0 is done, worker 1 dies in its second chunk, worker 2 has not begun."""
    host = Host(name, splits=splits)
    host.begin_step(1)
    for worker in host.workers:
        worker.run(host.step)
    host.begin_step(2)
    host.workers[0].run(host.step)
    calls = []

    def die_in_the_second() -> None:
        calls.append(1)
        host.step()
        if len(calls) == 2 or len(host.workers[1]._mine) == 1:
            for group in host.optimizer.param_groups:
                for param in group["params"]:
                    held = host.optimizer.state.get(param, {}).values()
                    for tensor in [param.detach(), *held]:
                        tensor.fill_(1e9)
            raise _Killed  # with numbers that are of no step

    assert host.workers[2].has_begun()
    with pytest.raises(_Killed):
        host.workers[1].run(die_in_the_second)
    host.workers[2].leave(host.allocate, host.step, keeps_state=False)
    host.require_equal(*reference(name, 3))
    set_gradients(host.model, 3)
    host.step()
    host.require_equal(*reference(name, 4))
