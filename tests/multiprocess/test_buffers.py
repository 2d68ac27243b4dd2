"""Buffers in step: every policy, every kind of buffer, and scripts that exchange theirs."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from paceline.comm.group import Group
from paceline.data_parallel.model_state.buffers import Buffers
from paceline.errors import CollectiveMismatch, UnsupportedTensor, UsageError
from paceline.runtime import job
from support import outcomes_of, run_ranks


class Odd(nn.Module):
    """Buffers of every kind; rank r holds r + 1 where a number fits."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        one = rank + 1
        whole = torch.full((6,), float(one))
        for name, tensor in {
            "vector": torch.full((5,), float(one)),
            "scalar": torch.tensor(float(one)),
            "empty": torch.empty(0, 3),
            "wide": torch.full((2, 2), float(one), dtype=torch.float64),
            "bfloat": torch.full((3,), float(one), dtype=torch.bfloat16),
            "narrow": torch.full((3,), float(one), dtype=torch.float16),
            "complex": torch.full((2,), complex(one, -one), dtype=torch.complex64),
            "count": torch.tensor(one),
            "small": torch.full((3,), one, dtype=torch.uint8),
            "flag": torch.tensor([rank == 0, True]),
            "image": torch.full((2, 3, 4, 4), float(one)).contiguous(
                memory_format=torch.channels_last
            ),
            "transposed": torch.full((3, 2), float(one)).t(),
            "part": whole[:3],
            "other_part": whole[3:],
            "expanded": torch.full((1, 3), float(one)).expand(4, 3),
        }.items():
            self.register_buffer(name, tensor)
        self.register_buffer("passing", torch.full((2,), float(one)), persistent=False)
        self.register_buffer("absent", None)
        self.inner = nn.BatchNorm1d(2)
        self.inner.running_mean.fill_(one)
        self.inner.num_batches_tracked.fill_(one)
        self.again = nn.Module()
        self.again.register_buffer("shared", self.vector)


INTEGERS = {"count", "small", "flag", "inner.num_batches_tracked"}


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def require_values(model: nn.Module, expected: nn.Module, but: dict[str, torch.Tensor]) -> None:
    expectations = {**values_of(expected), **but}
    found = dict(model.named_buffers())
    assert found.keys() == expectations.keys()
    for name, value in expectations.items():
        assert torch.equal(found[name], value), f"{name}: {found[name]}, expected {value}"


def synchronised(group: Group, model: nn.Module, policy: str) -> Buffers:
    return Buffers(model, group, job.current().fabric.engine, policy)


def step(buffers: Buffers) -> None:
    buffers.start()
    buffers.finish()


# -- in the ranks ---------------------------------------------------------------------------------


def every_policy(group: Group) -> None:
    first, mine = Odd(0), Odd(group.rank)
    for policy in ("broadcast", "average", "local"):
        model = Odd(group.rank)
        objects, strides = dict(model.named_buffers()), {}
        for name, buffer in objects.items():
            strides[name] = buffer.stride()
        buffers = synchronised(group, model, policy)
        step(buffers)
        if policy == "broadcast":
            require_values(model, first, {})
        elif policy == "local":
            require_values(model, mine, {})
        else:
            mean = (group.size + 1) / 2
            averaged = {
                name: torch.full_like(b, complex(mean, -mean) if b.is_complex() else mean)
                for name, b in values_of(first).items()
                if name not in {*INTEGERS, "inner.running_var"}
            }
            require_values(model, first, averaged)
        buffers.broadcast_now()
        if policy == "local":
            require_values(model, first, {})
        for name, buffer in model.named_buffers():
            assert buffer is objects[name] and buffer.stride() == strides[name], name
        assert model.again.shared is model.vector
        assert torch.equal(model.part, model.part._base[:3])
        # The model trains on with what is now a view of the common memory.
        model.inner(torch.randn(4, 2) + group.rank)
        assert not torch.equal(model.inner.running_mean, first.inner.running_mean)
        twin = copy.deepcopy(model)
        twin.inner.load_state_dict(model.inner.state_dict())
        twin.vector.add_(1)
        assert not torch.equal(twin.vector, model.vector)


def exchanged_by_the_script(group: Group) -> None:
    rank = group.rank
    model = Odd(rank)
    buffers = synchronised(group, model, "broadcast")
    buffers.broadcast_now()
    for round in range(3):  # assigned anew before every step
        model.vector = torch.full((5,), float(rank + round))
        model.count = torch.tensor(rank + round)
        step(buffers)
        assert model.vector.tolist() == [round] * 5 and model.count == round
        kept = model.vector
        step(buffers)
        assert model.vector is kept
    # Exchanged with each other: both lie in the other's place.
    model.part = torch.zeros(5)
    step(buffers)
    model.inner.running_mean.fill_(10.0 + rank)
    model.inner.running_var.fill_(20.0 + rank)
    inner = model.inner
    inner.running_mean, inner.running_var = inner.running_var, inner.running_mean
    step(buffers)
    assert inner.running_mean.tolist() == [20.0] * 2
    assert inner.running_var.tolist() == [10.0] * 2
    # Another shape, another dtype, one more, one less.
    model.vector = torch.arange(7.0) + rank
    model.wide = model.wide.float() + rank
    model.register_buffer("late", torch.tensor([1.0 + rank]))
    model.small = None
    step(buffers)
    assert torch.equal(model.vector, torch.arange(7.0))
    assert model.late == 1.0 and model.wide.dtype == torch.float32
    placed = model.inner.running_var.data_ptr()
    model.late.fill_(5.0 + rank)
    step(buffers)
    assert model.late == 5.0 and model.inner.running_var.data_ptr() == placed
    # One that belongs to a graph.
    weight = torch.ones(5, requires_grad=True)
    model.vector = weight * (rank + 1)
    step(buffers)
    assert model.vector.tolist() == [1.0] * 5


def lazily_made(group: Group) -> None:
    model = nn.Sequential(nn.LazyBatchNorm1d())
    buffers = synchronised(group, model, "average")
    step(buffers)
    model(torch.randn(4, 3) + group.rank)
    step(buffers)
    assert (
        len(
            {
                str(told)
                for told in map(torch.Tensor.tolist, group.all_gather(model[0].running_mean))
            }
        )
        == 1
    )


def interrupted(group: Group) -> None:
    model = Odd(group.rank)
    buffers = synchronised(group, model, "broadcast")
    buffers.start()
    buffers.start()  # the optimizer failed in between
    buffers.finish()
    buffers.finish()
    require_values(model, Odd(0), {})


def refusals(group: Group) -> None:
    with pytest.raises(UsageError, match="buffers='sum': choose one of broadcast, average, local"):
        synchronised(group, Odd(0), "sum")
    model = nn.Sequential(nn.Identity())
    model[0].register_buffer("table", torch.eye(2).to_sparse())
    with pytest.raises(UnsupportedTensor, match=r"buffer 0\.table is torch.float32 on cpu"):
        synchronised(group, model, "local").broadcast_now()
    model[0].table = torch.ones(3).to(torch.float8_e4m3fn)
    with pytest.raises(UnsupportedTensor, match="no mean of that; use buffers='broadcast'"):
        synchronised(group, model, "average").start()
    model[0].table = (torch.ones(3) * (1 + group.rank)).to(torch.float8_e4m3fn)
    step(synchronised(group, model, "broadcast"))
    assert model[0].table.float().tolist() == [1.0] * 3


# -- in the test session --------------------------------------------------------------------------


@pytest.mark.parametrize(("world_size", "hosts"), [(1, 1), (2, 1), (3, 1), (2, 2)])
def test_every_policy_and_kind_of_buffer(world_size, hosts):
    run_ranks(world_size, every_policy, hosts=hosts)


def test_buffers_that_the_script_exchanges():
    def body(group):
        exchanged_by_the_script(group)
        lazily_made(group)
        interrupted(group)
        refusals(group)

    run_ranks(2, body)


def test_without_buffers_nothing_is_communicated():
    def body(group):
        if group.rank == 0:  # alone: any collective would wait for the other
            for policy in ("broadcast", "average", "local"):
                buffers = synchronised(group, nn.Linear(2, 2), policy)
                buffers.broadcast_now()
                step(buffers)
        group.barrier()

    run_ranks(2, body)


def test_a_buffer_on_one_rank_only_is_an_error_on_all():
    def body(group):
        model = nn.Linear(2, 2)
        model.register_buffer("seen", torch.zeros(3))
        if group.rank == 1:
            model.register_buffer("extra", torch.zeros(300))
        step(synchronised(group, model, "broadcast"))

    for outcome in outcomes_of(2, body):
        assert isinstance(outcome.error, CollectiveMismatch), outcome
