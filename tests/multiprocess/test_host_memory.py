"""Memory that all workers of a host share: one tensor, whoever writes."""

from __future__ import annotations

import gc

import pytest
import torch

import paceline as pl
from paceline import errors
from paceline.comm.group import Group
from paceline.comm.object_collectives import all_gather_object
from paceline.comm.shared_memory import allocate, allocate_on_host
from paceline.runtime import job
from support import outcomes_of, run_ranks

FLOAT = torch.float32


def one_tensor(group) -> None:
    engine = job.current().fabric.engine
    shared = allocate_on_host(engine, group, (group.size, 1000), torch.float64).shared
    shared[group.rank] = group.rank + 1
    group.barrier()
    expected = torch.arange(1.0, group.size + 1, dtype=torch.float64)
    assert torch.equal(shared[:, 999], expected)
    assert shared.data_ptr() % 64 == 0

    # Shared memory takes part in collectives like any other tensor.
    total = group.all_reduce(shared[group.rank].clone())
    assert torch.equal(total, torch.full((1000,), float(expected.sum()), dtype=torch.float64))


def outlives_its_owner(group) -> None:
    engine = job.current().fabric.engine
    shared = allocate_on_host(engine, group, (100_000,), torch.float32).shared
    if group.rank == 0:
        shared.fill_(7.0)
    group.barrier()
    if group.rank == 0:
        del shared
        gc.collect()
        for _ in range(3):  # would land in the same pages if they were given away
            pl.empty(100_000).fill_(-1.0)
    group.barrier()
    if group.rank != 0:
        assert torch.equal(shared, torch.full((100_000,), 7.0))
    group.barrier()


def nothing_and_empty(group) -> None:
    engine = job.current().fabric.engine
    empty = allocate_on_host(engine, group, (0, 3), torch.float32)
    assert empty.shared.shape == empty.private.shape == (0, 3)
    assert not empty.is_changed()


def scribbling_stays_private(group) -> None:
    tensor = allocate_on_host(job.current().fabric.engine, group, (3, 5000), torch.float32)
    if group.rank == 0:
        tensor.shared.fill_(1.0)
    group.barrier()
    assert torch.equal(tensor.private, torch.ones(3, 5000)) and not tensor.is_changed()
    group.barrier()

    tensor.private[1, 7] = 10.0 + group.rank
    group.barrier()
    assert tensor.private[1, 7] == 10.0 + group.rank and tensor.shared[1, 7] == 1.0
    assert tensor.is_changed()
    group.barrier()

    if group.rank == 0:
        tensor.shared.fill_(2.0)
    group.barrier()
    assert tensor.private[2, 4999] == 2.0  # a page that nobody wrote to follows
    assert tensor.private[1, 7] == 10.0 + group.rank
    tensor.discard()
    assert torch.equal(tensor.private, torch.full((3, 5000), 2.0)) and not tensor.is_changed()
    group.barrier()


def shows_memory_of_another(group) -> None:
    """Each rank sees pages 1 and 2 of its tensor in a block of the next rank's memory."""
    engine, page = job.current().fabric.engine, 1024
    tensor = allocate_on_host(engine, Group(job.current().fabric, [group.rank]), (3500,), FLOAT)
    tensor.shared.fill_(-1.0)
    block = allocate(engine, (2 * page,), FLOAT, apart=True).fill_(float(group.rank))
    places = all_gather_object(group, (group.rank, *engine.locate(block.data_ptr(), block.nbytes)))
    after = (group.rank + 1) % group.size
    tensor.private[page + 5] = 7.0
    tensor.show(4 * page, 4 * 3 * page, tuple(places[after]))
    expected = torch.full((3500,), -1.0)
    expected[page : 3 * page] = after
    assert torch.equal(tensor.private, expected), "what was written before is dropped"
    assert not tensor.is_changed()
    tensor.private[2 * page] = 8.0
    assert tensor.is_changed(), "here too edits stay private, and are noticed"
    tensor.discard()
    group.barrier()
    block.add_(100.0)
    group.barrier()
    assert tensor.private[2 * page] == after + 100.0, "the view follows its owner"
    group.barrier()
    del block
    gc.collect()
    pl.empty(2 * page).fill_(-2.0)
    group.barrier()
    assert tensor.private[page] == after + 100.0, "freed memory does not change"
    with pytest.raises(errors.UsageError, match="whole pages"):
        tensor.show(4, 4 * page, None)
    with pytest.raises(errors.UsageError, match="no such engine memory"):
        tensor.show(0, 4 * page, (99, 1, 0))
    tensor.show(4 * page, 4 * 2 * page, None)
    assert tensor.private[page] == -1.0 and tensor.private[2 * page] == after + 100.0
    tensor.show(8 * page, 4 * 3500, None)
    assert torch.equal(tensor.private, tensor.shared)
    group.barrier()


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_one_tensor_for_all(num_ranks):
    def body(group):
        one_tensor(group)
        scribbling_stays_private(group)
        outlives_its_owner(group)
        nothing_and_empty(group)
        if group.size > 1:
            shows_memory_of_another(group)

    run_ranks(num_ranks, body)


def test_memory_that_does_not_exist_is_refused():
    def body(group):
        engine = job.current().fabric.engine
        with pytest.raises(errors.UsageError, match="not engine memory"):
            engine.locate(torch.zeros(4).data_ptr(), 16)
        with pytest.raises(errors.UsageError, match="no such engine memory"):
            engine.memory_of_peer(1 - group.rank, 12345, 0, 16)
        with pytest.raises(errors.UsageError, match="no such engine memory"):
            engine.memory_of_peer(77, 1, 0, 16)

    run_ranks(2, body)


def test_too_much_is_refused_on_all_ranks():
    def body(group):
        allocate_on_host(job.current().fabric.engine, group, (1 << 50,), torch.uint8)

    for outcome in outcomes_of(2, body):
        assert isinstance(outcome.error, errors.SharedMemoryError), outcome
