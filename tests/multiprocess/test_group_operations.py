"""Every collective, wherever its ranks run, against numpy, bit by bit.

Each case starts its ranks once and runs a whole battery, because what is tested are the operations,
not the start.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import paceline as pl
from paceline.comm.group import Group
from support import run_ranks
from support.reference import DTYPES, fold, ops_of, require_same, values

SLOT, CHUNK = 16 << 10, 256 << 10  # where the engine changes its ways on one host

# number of ranks; number of hosts, or the host of each rank
PLACES = {
    "alone": (1, 1),
    "2 on a host": (2, 1),
    "3 on a host": (3, 1),
    "4 on a host": (4, 1),
    "2 hosts": (2, 2),
    "3 hosts": (3, 3),
    "4 hosts": (4, 4),
    "2 hosts with 2": (4, 2),
    "2 hosts, mixed": (4, (0, 1, 0, 1)),
    "2 and 1": (3, (0, 0, 1)),
    "1 and 3": (4, (0, 1, 1, 1)),
}


# Engine memory matters where ranks share a host.
CASES = [(place, "torch") for place in PLACES]
CASES += [(place, "engine") for place in PLACES if "a host" in place or "2 hosts with 2" in place]
everywhere = pytest.mark.parametrize(("place", "memory"), CASES)


def run(place: str, body, *arguments, timeout_s: float = 90.0) -> list:
    world_size, hosts = PLACES[place]
    return run_ranks(world_size, body, *arguments, hosts=hosts, timeout_s=timeout_s)


# -- in the ranks ---------------------------------------------------------------------------------


def placed(memory: str, tensor: torch.Tensor) -> torch.Tensor:
    """Put values into the kind of memory that is being tested."""
    target = (
        pl.empty(tuple(tensor.shape), dtype=tensor.dtype)
        if memory == "engine"
        else torch.empty(tensor.shape, dtype=tensor.dtype)
    )
    return target.copy_(tensor)


def blank(memory: str, count: int, dtype: str) -> torch.Tensor:
    return placed(memory, torch.zeros(count, dtype=DTYPES[dtype]))


def check_reductions(group: Group, memory: str, count: int, dtype: str, op: str) -> None:
    n, me, what = group.size, group.rank, f"{dtype} {op} of {count}"
    inputs = [values(rank, count, dtype, op) for rank in range(n)]
    total, mine = fold(inputs, op), inputs[me]
    require_same(group.all_reduce(placed(memory, mine), op), total, f"all_reduce {what}")

    kept, out = placed(memory, mine), blank(memory, count, dtype)
    assert group.all_reduce(kept, op, out=out) is out
    require_same(out, total, f"all_reduce into out {what}")
    require_same(kept, mine, f"input of all_reduce {what}")

    root = count % n
    tensor = placed(memory, mine)
    result = group.reduce(tensor, root, op)
    assert (result is tensor) == (me == root)
    require_same(tensor, total if me == root else mine, f"reduce {what}")

    whole = [values(rank, count * n, dtype, op, seed=1) for rank in range(n)]
    part = group.reduce_scatter(placed(memory, whole[me]), op)
    require_same(part, fold(whole, op)[me * count : (me + 1) * count], f"reduce_scatter {what}")


def check_moves(group: Group, memory: str, count: int, dtype: str) -> None:
    n, me, what = group.size, group.rank, f"{dtype}[{count}]"
    everybody = [values(rank, count, dtype, seed=2) for rank in range(n)]
    mine = placed(memory, everybody[me])
    for root in range(n):
        tensor = placed(memory, everybody[me])
        assert group.broadcast(tensor, root) is tensor
        require_same(tensor, everybody[root], f"broadcast {what} from {root}")
        gathered = group.gather(mine, root)
        assert (gathered is not None) == (me == root)
        for rank, part in enumerate(gathered or []):
            require_same(part, everybody[rank], f"gather {what} from {rank}")
        tensor = blank(memory, count, dtype)
        parts = [placed(memory, x) for x in everybody] if me == root else None
        group.scatter(tensor, parts, root=root)
        require_same(tensor, everybody[me], f"scatter {what}")
    for rank, part in enumerate(group.all_gather(mine)):
        require_same(part, everybody[rank], f"all_gather {what} from {rank}")
    out = placed(memory, torch.zeros(n, count, dtype=DTYPES[dtype]))
    group.all_gather(mine, out=out)
    require_same(out, torch.stack(everybody), f"all_gather {what} into one tensor")
    sent = [[values(a * n + b, count, dtype, seed=3) for b in range(n)] for a in range(n)]
    received = group.all_to_all([placed(memory, x) for x in sent[me]])
    for rank, part in enumerate(received):
        require_same(part, sent[rank][me], f"all_to_all {what} from {rank}")


def check_uneven(group: Group, memory: str, scale: int) -> None:
    n, me = group.size, group.rank

    def size(a: int, b: int = 0) -> int:  # zero for some pairs
        return (a * 3 + b * 5) % 4 * scale + (a + b) % 2

    def blanks() -> list[torch.Tensor]:
        return [blank(memory, size(rank), "float32") for rank in range(n)]

    own = [values(rank, size(rank), "float32") for rank in range(n)]
    for rank, part in enumerate(group.all_gather(placed(memory, own[me]), out=blanks())):
        require_same(part, own[rank], f"all_gather from {rank}")
    for root in range(n):
        got = group.gather(placed(memory, own[me]), root, out=blanks() if me == root else None)
        for rank, part in enumerate(got or []):
            require_same(part, own[rank], f"gather from {rank}")
        tensor = blank(memory, size(me), "float32")
        group.scatter(tensor, [placed(memory, x) for x in own] if me == root else None, root=root)
        require_same(tensor, own[me], f"scatter from {root}")
    sent = [[values(a * n + b, size(a, b), "int64") for b in range(n)] for a in range(n)]
    received = group.all_to_all(
        [placed(memory, x) for x in sent[me]],
        out=[blank(memory, size(rank, me), "int64") for rank in range(n)],
    )
    for rank, part in enumerate(received):
        require_same(part, sent[rank][me], f"all_to_all from {rank}")
    given = [[values(a * n + b, size(b), "float32") for b in range(n)] for a in range(n)]
    part = group.reduce_scatter([placed(memory, x) for x in given[me]])
    require_same(part, fold([given[a][me] for a in range(n)], "sum"), "reduce_scatter")


def check_strided(group: Group, memory: str, side: int) -> None:
    n, me = group.size, group.rank
    inputs = [values(r, 4 * side * side, "float32").view(2 * side, 2 * side) for r in range(n)]
    total = fold([x.reshape(-1) for x in inputs], "sum").view(2 * side, 2 * side)
    base = placed(memory, inputs[me])
    for cut in (lambda x: x.t(), lambda x: x[::2, 1::2], lambda x: x[:, :side]):
        whole = base.clone()
        view = cut(whole)
        group.all_reduce(view)
        require_same(cut(whole), cut(total), "strided all_reduce")
        cut(whole).copy_(cut(base))
        require_same(whole, inputs[me], "what lies between the strides")
        group.broadcast(view, root=n - 1)
        require_same(cut(whole), cut(inputs[n - 1]), "strided broadcast")
        outs = group.all_gather(cut(base), out=[cut(base.clone()) for _ in range(n)])
        for rank, part in enumerate(outs):
            require_same(part, cut(inputs[rank]), "strided all_gather")
    work = group.all_reduce(base.t(), async_op=True)
    require_same(work.wait(), total.t(), "strided, in the background")
    require_same(base, total, "strided, in the background, in place")


def check_zero_dimensional(group: Group) -> None:
    n, me = group.size, group.rank
    scalar = torch.tensor(float(me + 1))
    assert group.all_reduce(scalar).shape == () and scalar.item() == n * (n + 1) / 2
    assert [x.item() for x in group.all_gather(torch.tensor(me))] == list(range(n))
    assert group.broadcast(torch.tensor(me), root=n - 1).item() == n - 1
    for shape in ((0,), (0, 5), (3, 0, 2)):
        empty = torch.zeros(shape)
        group.all_reduce(empty, "mean")
        group.broadcast(empty)
        assert [tuple(x.shape) for x in group.all_gather(empty)] == [shape] * n
        assert [tuple(x.shape) for x in group.all_to_all([empty] * n)] == [shape] * n


def check_numpy(group: Group, count: int) -> None:
    n, me = group.size, group.rank
    inputs = [values(r, count, "float64") for r in range(n)]
    array = inputs[me].numpy().copy()
    assert group.all_reduce(array) is array
    require_same(array, fold(inputs, "sum"), "all_reduce of an array")
    pairs = np.stack([inputs[me].numpy()] * 2, axis=1)
    group.all_reduce(pairs[:, 0], "max")
    require_same(pairs[:, 0], fold(inputs, "max"), "all_reduce of a strided array")
    require_same(pairs[:, 1], inputs[me], "its neighbour")
    frozen = inputs[me].numpy().copy()
    frozen.flags.writeable = False  # may be read, not written
    for rank, part in enumerate(group.all_gather(frozen)):
        assert isinstance(part, np.ndarray)
        require_same(part, inputs[rank], "all_gather of arrays")
    with pytest.raises(pl.errors.UsageError, match="read-only"):
        group.all_gather(array, out=[frozen] * n)
    mixed = group.all_reduce(inputs[me].numpy(), out=torch.zeros(count, dtype=torch.float64))
    require_same(mixed, fold(inputs, "sum"), "an array into a tensor")


def check_mixed_kinds(group: Group, count: int) -> None:
    """Each rank passes another kind of tensor: the core reads some of them, Python the others."""
    n, me = group.size, group.rank
    inputs = [values(r, count, "float32") for r in range(n)]
    total, mine = fold(inputs, "sum"), inputs[me]
    negative = torch._neg_view(-mine)
    kinds = [placed("engine", mine), mine.numpy().copy(), negative, mine.clone().requires_grad_()]
    for turn in range(len(kinds)):
        tensor = kinds[(me + turn) % len(kinds)]
        again = tensor.copy() if isinstance(tensor, np.ndarray) else tensor.detach().clone()
        group.all_reduce(again)
        require_same(torch.as_tensor(again), total, f"kind {(me + turn) % len(kinds)}")
    group.all_reduce(negative)
    require_same(negative.resolve_neg(), total, "a negative view in place")
    with pytest.raises(pl.errors.UnsupportedTensor, match="would not be an integer"):
        group.all_reduce(torch.ones(3, dtype=torch.int32), "mean")
    with pytest.raises(pl.errors.UsageError, match="unknown reduction"):
        group.all_reduce(mine, "median")


# -- the tests ------------------------------------------------------------------------------------


@everywhere
def test_every_dtype_and_reduction(place: str, memory: str) -> None:
    def battery(group: Group, memory: str) -> None:
        for dtype in dtypes:
            for op in ops_of(dtype):
                for count in (1, 9001):
                    check_reductions(group, memory, count, dtype, op)

    # Every dtype where the ways differ; elsewhere one of each width and kind.
    is_basic = place in ("alone", "2 on a host", "4 on a host", "3 hosts", "2 hosts with 2")
    dtypes = list(DTYPES) if is_basic else ["float32", "bfloat16", "int64", "bool"]
    run(place, battery, memory)


@everywhere
def test_sizes_around_every_edge(place: str, memory: str) -> None:
    def battery(group: Group, memory: str) -> None:
        near = [edge // 4 + d for edge in (SLOT, 2 * SLOT, CHUNK, 4 * CHUNK) for d in (-1, 0, 1)]
        for count in (0, 1, 3, *near, 7 * CHUNK // 4 + 13, 500_003):
            check_reductions(group, memory, count, "float32", "sum")
        for count in (SLOT - 1, SLOT, SLOT + 1, 4 * CHUNK + 1):
            check_reductions(group, memory, count, "uint8", "max")

    run(place, battery, memory)


@everywhere
def test_every_dtype_and_size_is_moved(place: str, memory: str) -> None:
    def battery(group: Group, memory: str) -> None:
        for dtype in DTYPES:
            check_moves(group, memory, 1001, dtype)
        near = [edge // 4 + d for edge in (SLOT, CHUNK) for d in (-1, 0, 1)]
        for count in (0, 1, *near, 300_007):
            check_moves(group, memory, count, "float32")

    run(place, battery, memory)


@everywhere
def test_uneven_parts(place: str, memory: str) -> None:
    def battery(group: Group, memory: str) -> None:
        for scale in (1, 100, SLOT // 4, CHUNK // 4 + 3):
            check_uneven(group, memory, scale)

    run(place, battery, memory)


@pytest.mark.parametrize("place", PLACES)
def test_strided_zero_dimensional_and_numpy(place: str) -> None:
    def battery(group: Group) -> None:
        for memory in ("torch", "engine"):
            for side in (3, 301):
                check_strided(group, memory, side)
        check_zero_dimensional(group)
        for count in (5, 40_000):
            check_numpy(group, count)
            check_mixed_kinds(group, count)

    run(place, battery)


@pytest.mark.parametrize("place", PLACES)
def test_many_operations_in_flight(place: str) -> None:
    def battery(group: Group) -> None:
        n, me = group.size, group.rank
        counts = [(i * 7919) % 30_000 for i in range(60)]
        inputs = [[values(r, c, "float32", seed=i) for r in range(n)] for i, c in enumerate(counts)]
        works = [group.all_reduce(mine[me].clone(), async_op=True) for mine in inputs]
        works += [group.all_gather(torch.tensor([me, i]), async_op=True) for i in range(20)]
        barrier = group.barrier(async_op=True)
        for i in reversed(range(60)):  # in another order than they run
            require_same(works[i].wait(), fold(inputs[i], "sum"), f"operation {i}")
            assert works[i].done() and works[i].error() is None
        for i in range(20):
            assert [part.tolist() for part in works[60 + i].wait()] == [[r, i] for r in range(n)]
        assert barrier.wait() is None
        # Blocking ones between asynchronous ones keep their order.
        first = group.all_reduce(torch.tensor([1.0]), async_op=True)
        group.broadcast(torch.zeros(100_000), root=n - 1)
        assert first.wait().item() == n
        assert first.wait().item() == n  # a second time the same

    run(place, battery)
