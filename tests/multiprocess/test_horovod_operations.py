"""paceline.horovod.torch: the semantics of Horovod's operations, on one host and between hosts."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.comm.group import Group
from support.ranks import run_ranks

HOSTS = pytest.mark.parametrize("hosts", [1, 2], ids=["one-host", "two-hosts"])


def values(_: Group) -> None:
    """Results of every operation, and of its gradient."""
    import numpy as np
    import torch

    import paceline.horovod.torch as hvd

    hvd.init()
    me, n = hvd.rank(), hvd.size()
    total = n * (n + 1) // 2
    mine = torch.full((5, 2), float(me + 1))
    assert hvd.allreduce(mine).eq(total / n).all() and mine.eq(me + 1).all()
    assert hvd.allreduce(mine, op=hvd.Sum).eq(total).all()
    assert hvd.allreduce(mine, average=False).eq(total).all()
    assert hvd.allreduce(mine, op=hvd.Max).eq(n).all()
    assert hvd.allreduce(mine, op=hvd.Min).eq(1).all()
    assert hvd.allreduce(mine, op=hvd.Product).eq(float(np.prod(range(1, n + 1)))).all()
    assert hvd.allreduce(mine, compression=hvd.Compression.fp16).dtype == torch.float32
    for dtype in (torch.int32, torch.int64, torch.uint8):
        whole = torch.full((3,), me + 1, dtype=dtype)
        assert hvd.allreduce(whole).tolist() == [total // n] * 3
    below = torch.full((3,), -(me + 1))
    assert hvd.allreduce(below).tolist() == [-(total // n)] * 3  # towards zero
    # Factors: in float64 for integers, float32 for float16.
    large = torch.tensor([2**40 + 1])
    assert hvd.allreduce(large, op=hvd.Sum, prescale_factor=0.5).item() == n * 2**39
    half = torch.full((2,), 60000.0, dtype=torch.float16)
    scaled = hvd.allreduce(half, op=hvd.Sum, prescale_factor=1 / n, postscale_factor=0.5)
    assert scaled.tolist() == pytest.approx([30000.0] * 2, rel=2e-3)
    # In place, and asynchronous.
    target = mine.clone()
    assert hvd.allreduce_(target, op=hvd.Sum) is target and target.eq(total).all()
    handle = hvd.allreduce_async_(target, name="again", op=hvd.Sum)
    assert hvd.synchronize(handle) is target and target.eq(total * n).all()
    assert hvd.synchronize(handle) is None
    strided = torch.zeros(4, 6)[:, ::2]
    hvd.allreduce_(strided.add_(1), op=hvd.Sum)
    assert strided.eq(n).all()
    handle = hvd.allreduce_async(mine, op=hvd.Sum)
    while not hvd.poll(handle):
        pass
    assert hvd.synchronize(handle).eq(total).all()
    with pytest.raises(ValueError, match="does not exist"):
        hvd.poll(handle)

    rows = hvd.allgather(torch.full((me + 1, 2), me))
    assert rows.tolist() == [[r, r] for r in range(n) for _ in range(r + 1)]
    none = hvd.allgather(torch.zeros(0 if me else 2, 3))
    assert none.shape == (2, 3)
    assert hvd.broadcast(mine, root_rank=1).eq(2).all() and mine.eq(me + 1).all()
    assert hvd.broadcast_(target.fill_(me), root_rank=n - 1).eq(n - 1).all()
    sent = torch.arange(sum(range(n)), dtype=torch.float32) + 100 * me
    back, received = hvd.alltoall(sent, splits=list(range(n)))
    assert received.tolist() == [me] * n and back.shape[0] == me * n
    assert hvd.alltoall(torch.arange(n) + 10 * me).tolist() == [10 * r + me for r in range(n)]
    uneven = hvd.reducescatter(torch.arange(n + 1.0), op=hvd.Sum)
    assert uneven.tolist() == ([0.0, float(n)] if me == 0 else [me * n + float(n)])
    for grouped in (hvd.grouped_allreduce, hvd.grouped_allreduce_):
        sums = grouped([mine.clone(), below.clone()], op=hvd.Sum)
        assert sums[0].eq(total).all() and sums[1].eq(-total).all()
    gathered = hvd.synchronize(hvd.grouped_allgather_async([mine, below]))
    assert [one.shape[0] for one in gathered] == [5 * n, 3 * n]
    assert len(hvd.grouped_reducescatter([mine, mine], op=hvd.Sum)) == 2
    index = torch.tensor([[me, n]])
    handle = hvd.sparse_allreduce_async(
        torch.sparse_coo_tensor(index, torch.ones(2), (n + 1,)), "sparse", hvd.Sum
    )
    assert hvd.synchronize(handle).to_dense().tolist() == [1.0] * n + [float(n)]

    def gradient(operation: Any, shape: Any = (3,), weight: float = 1.0) -> torch.Tensor:
        tensor = torch.ones(shape, requires_grad=True)
        result = operation(tensor)
        result.backward(torch.full_like(result, weight))
        assert tensor.grad is not None
        return tensor.grad

    assert gradient(hvd.allreduce).eq(1).all()
    assert gradient(lambda t: hvd.allreduce(t, op=hvd.Sum)).eq(n).all()
    both = gradient(lambda t: hvd.allreduce(t, op=hvd.Sum, prescale_factor=0.5))
    assert both.eq(n / 2).all()
    assert gradient(hvd.allgather, (me + 1, 2), me + 1.0).eq(total / n).all()
    assert gradient(lambda t: hvd.broadcast(t, 0)).eq(1.0 if me == 0 else 0.0).all()
    assert gradient(hvd.alltoall, (n,), 2.0).eq(2).all()
    assert gradient(lambda t: hvd.reducescatter(t, op=hvd.Sum), (n,)).eq(n).all()
    assert gradient(lambda t: hvd.reducescatter(t), (n,)).eq(1).all()

    assert hvd.broadcast_object({"a": [me, (1.5, None)], 2: {3}}, root_rank=1) == {
        "a": [1, (1.5, None)],
        2: {3},
    }
    everything = hvd.allgather_object({"rank": me, "array": np.full(me, me)})
    assert [one["rank"] for one in everything] == list(range(n))
    assert [one["array"].tolist() for one in everything] == [[r] * r for r in range(n)]
    assert hvd.broadcast_object(np.float32(0.5) if me == 0 else None) == 0.5
    with pytest.raises(ValueError, match="rank 0: broadcast_object: .*nothing is pickled"):
        hvd.broadcast_object(object() if me == 0 else None)
    with pytest.raises(ValueError, match="rank 0: broadcast_object: a int cannot be sent"):
        hvd.broadcast_object(2**70 if me == 0 else None)
    with pytest.raises(ValueError, match="rank 1: allgather_object"):
        hvd.allgather_object(object() if me == 1 else None)

    hvd.barrier()
    assert hvd.local_size() * hvd.cross_size() >= 1 and hvd.is_initialized()
    assert not hvd.mpi_built() and hvd.nccl_built() == 0 and hvd.gloo_built()


@HOSTS
def test_every_operation_and_its_gradient(hosts: int) -> None:
    run_ranks(3, values, hosts=hosts)


def names(_: Group) -> None:
    """Names match operations in any order; what goes wrong ends one operation only."""
    import time

    import torch

    import paceline.horovod.torch as hvd

    hvd.init()
    me, n = hvd.rank(), hvd.size()
    one = torch.ones(4)
    # Rank 0 starts an operation, and passes a barrier before the others start it.
    handle = hvd.allreduce_async(one, name="early", op=hvd.Sum) if me == 0 else None
    hvd.barrier()
    handle = handle or hvd.allreduce_async(one, name="early", op=hvd.Sum)
    assert hvd.synchronize(handle).eq(n).all()
    # Each rank in an order of its own, with different kinds, waited for in yet another one.
    started = {}
    for number in sorted(range(9), key=lambda k: (k * (me + 2)) % 9):
        if number % 3 == 0:
            started[number] = hvd.allgather_async(torch.full((me + 1,), number), f"n{number}")
        elif number % 3 == 1:
            started[number] = hvd.broadcast_async(one * (me + number), 2, f"n{number}")
        else:
            started[number] = hvd.allreduce_async(one * number, name=f"n{number}")
    for number in sorted(started, reverse=me % 2 == 1):
        found = hvd.synchronize(started[number])
        expected = {0: number, 1: 2 + number, 2: number}[number % 3]
        assert found.eq(expected).all(), (number, found)
    # One rank blocks in one operation while the others, one after the other, start two.
    if me == 0:
        first = hvd.allreduce_async(one, name="x")
        second = hvd.allreduce_async(one, name="y")
        deadline_s = time.monotonic() + 30
        while not (hvd.poll(second) and hvd.poll(first)) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert hvd.poll(first) and hvd.poll(second)
    else:
        hvd.allreduce(one, name="y")
        hvd.allreduce(one, name="x")
    hvd.barrier()

    wrong = [
        (lambda: hvd.allreduce(torch.ones(2 + me), name="shape"), r"'shape'.*\[2\].*\[3\]"),
        (
            lambda: hvd.allreduce(one.double() if me else one, name="dtype"),
            "'dtype'.*float32.*float64",
        ),
        (lambda: hvd.allreduce(one, op=hvd.Sum if me else hvd.Average, name="op"), "mean.*sum"),
        (lambda: hvd.broadcast(one, root_rank=me, name="root"), "root 0.*root 1"),
        (lambda: hvd.allgather(torch.ones(2, 2 + me), name="rows"), "'rows'"),
        (
            lambda: hvd.allgather(one, name="kind") if me else hvd.allreduce(one, name="kind"),
            "'kind'.*all_reduce.*all_gather",
        ),
        (
            lambda: hvd.allreduce(one, op=hvd.Sum, prescale_factor=1.0 + me, name="factor"),
            "other scale factors",
        ),
    ]
    for call, message in wrong:
        with pytest.raises(hvd.HorovodInternalError, match=message) as raised:
            call()
        assert "Only this operation has ended" in str(raised.value)
        assert hvd.allreduce(one, op=hvd.Sum, name="after").eq(n).all()
    # The error comes with `synchronize`; `poll` only says that the operation has ended.
    handle = hvd.allreduce_async(torch.ones(2 + me), name="late")
    while not hvd.poll(handle):
        time.sleep(0.001)
    with pytest.raises(hvd.HorovodInternalError, match="'late'"):
        hvd.synchronize(handle)
    # A grouped call: the other tensors are reduced, the call fails.
    with pytest.raises(hvd.HorovodInternalError, match=r"'several\.1'"):
        hvd.grouped_allreduce([one, torch.ones(1 + me)], name="several")

    if me == 0:
        handle = hvd.allreduce_async(one, name="twice")
        with pytest.raises(ValueError, match="'twice' has been started"):
            hvd.allreduce_async(one, name="twice")
    hvd.barrier()
    hvd.synchronize(handle) if me == 0 else hvd.allreduce(one, name="twice")
    for call, message in [
        (lambda: hvd.allreduce(one, op=hvd.Adasum), "Adasum is not supported"),
        (lambda: hvd.allreduce(one, op=77), "is not a reduction"),
        (lambda: hvd.allreduce(one, average=True, op=hvd.Sum), "both given"),
        (lambda: hvd.broadcast(one, root_rank=n), "root rank 3"),
        (lambda: hvd.alltoall(torch.ones(n + 1)), "cannot be divided evenly"),
        (lambda: hvd.alltoall(one, splits=[9] * n), r"splits \[9, 9, 9\]"),
        (lambda: hvd.allgather(torch.tensor(1.0)), "without dimensions"),
        (lambda: hvd.init(comm=[0, 1]), None),
    ]:
        if message:
            with pytest.raises(ValueError, match=message):
                call()
    assert hvd.allreduce(one, name="last").eq(1).all()


@HOSTS
def test_names_match_in_any_order_and_a_mismatch_ends_one_operation(hosts: int) -> None:
    run_ranks(3, names, hosts=hosts)


def joins(_: Group) -> None:
    """Ranks that have joined contribute zeros; the last one to join is the result."""
    import time

    import torch

    import paceline.horovod.torch as hvd

    hvd.init()
    me, n = hvd.rank(), hvd.size()
    for turn in range(2):
        one = torch.ones(3, dtype=torch.float64)
        before = hvd.allreduce_async(one, name="before the join")
        for step in range(me * 2):  # rank 0 has no steps, rank 1 has two, rank 2 has four
            working = sum(rank * 2 > step for rank in range(n))
            assert hvd.allreduce(one, op=hvd.Sum).eq(working).all()
            assert hvd.allreduce(one, name=f"step {step}").eq(working / n).all()
            big = hvd.allreduce(torch.ones(100_000), op=hvd.Sum, name="large")
            assert big.eq(working).all()
        if me == n - 1:
            with pytest.raises(hvd.HorovodInternalError, match="a rank has joined"):
                hvd.allgather(one)
            with pytest.raises(hvd.HorovodInternalError, match="a rank has joined"):
                hvd.broadcast(one, 0)
            time.sleep(0.1)
        assert hvd.join() == n - 1, turn
        assert hvd.synchronize(before).eq(1).all()
        assert hvd.allreduce(one, op=hvd.Sum).eq(n).all()  # unnamed ones match again


@HOSTS
def test_ranks_that_have_joined_contribute_zeros(hosts: int) -> None:
    run_ranks(3, joins, hosts=hosts)


def sets(_: Group) -> None:
    """Process sets have operations of their own; wrong ones raise on all ranks."""
    import torch

    import paceline.horovod.torch as hvd

    odd = hvd.ProcessSet([3, 1])
    hvd.init(process_sets=[odd])
    me = hvd.rank()
    even = hvd.add_process_set([0, 2])
    mine = even if me % 2 == 0 else odd
    assert hvd.get_process_set_ids_and_ranks() == {0: [0, 1, 2, 3], 1: [1, 3], 2: [0, 2]}
    assert mine.included() and mine.size() == 2 and mine.rank() == me // 2
    other = odd if mine is even else even
    assert other.rank() is None and not other.included()
    tensor = torch.full((3,), float(me))
    assert hvd.allreduce(tensor, process_set=mine, op=hvd.Sum).eq(2 + 2 * (me % 2)).all()
    assert hvd.allgather(tensor[:1], process_set=mine).tolist() == [me % 2, me % 2 + 2]
    assert hvd.broadcast(tensor, 2 + me % 2, process_set=mine).eq(2 + me % 2).all()
    assert hvd.broadcast_object(me, 2 + me % 2, process_set=mine) == 2 + me % 2
    assert hvd.reducescatter(torch.ones(2), op=hvd.Sum, process_set=mine).tolist() == [2.0]
    hvd.barrier(process_set=mine)
    with pytest.raises(ValueError, match="is not in the process set"):
        hvd.allreduce(tensor, process_set=other)
    with pytest.raises(ValueError, match="root rank"):
        hvd.broadcast(tensor, 1 - me % 2, process_set=mine)
    with pytest.raises(ValueError, match="has not been added"):
        hvd.allreduce(tensor, process_set=hvd.ProcessSet([0, 1]))
    with pytest.raises(ValueError, match=r"\[9\] are not ranks of this job"):
        hvd.add_process_set([0, 9])
    with pytest.raises(ValueError, match="are those of"):
        hvd.add_process_set([2, 0])
    with pytest.raises(ValueError, match="rank 0 adds the ranks .*rank 1 adds"):
        hvd.add_process_set([0, 1] if me == 0 else [0, 3])
    with pytest.raises(ValueError, match="pass the ranks as a list"):
        hvd.ProcessSet([0.5])
    with pytest.raises(ValueError, match="named twice"):
        hvd.ProcessSet([1, 1])
    assert not hvd.remove_process_set(hvd.global_process_set)
    assert hvd.remove_process_set(even) and even.process_set_id is None
    if me % 2 == 0:
        with pytest.raises(ValueError, match="has not been added"):
            hvd.allreduce(tensor, process_set=even)
    assert hvd.allreduce(tensor).eq(1.5).all()


def test_process_sets() -> None:
    run_ranks(4, sets)
