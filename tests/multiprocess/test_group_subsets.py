"""Groups of any subset of the ranks, several at once, each in its own order."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch

import paceline as pl
from paceline.comm.group import Group
from support import run_ranks

PLACES = {"one host": 1, "a host each": 4, "2 hosts with 2": 2, "mixed": (0, 1, 0, 1)}
everywhere = pytest.mark.parametrize("hosts", PLACES.values(), ids=PLACES.keys())


@everywhere
def test_every_subset_has_ranks_of_its_own(hosts) -> None:
    def battery(world: Group) -> None:
        for size in range(1, 5):
            for ranks in itertools.combinations(range(4), size):
                if world.rank not in ranks:
                    continue
                group = pl.new_group(ranks)
                assert (group.size, group.rank) == (size, ranks.index(world.rank))
                assert group.ranks == ranks
                total = group.all_reduce(torch.full((70_000,), float(world.rank)))
                assert bool((total == sum(ranks)).all())
                gathered = group.all_gather(torch.tensor([world.rank]))
                assert [x.item() for x in gathered] == list(ranks)
                root = group.broadcast(torch.tensor([world.rank]), root=size - 1)
                assert root.item() == ranks[-1]
                group.close()
        world.barrier()

    run_ranks(4, battery, hosts=hosts)


@everywhere
def test_ranks_may_be_in_any_order(hosts) -> None:
    def battery(world: Group) -> None:
        order = (2, 0, 3, 1)
        group = pl.new_group(order)
        assert group.rank == order.index(world.rank)
        gathered = group.all_gather(torch.tensor([world.rank]))
        assert [x.item() for x in gathered] == list(order)
        assert group.broadcast(torch.tensor([world.rank]), root=0).item() == 2
        parts = group.all_to_all([torch.full((9000,), 10 * group.rank + j) for j in range(4)])
        assert [x[0].item() for x in parts] == [10 * i + group.rank for i in range(4)]
        mean = group.all_reduce(torch.full((100_000,), float(world.rank)), "mean")
        assert bool((mean == 1.5).all())

    run_ranks(4, battery, hosts=hosts)


@everywhere
def test_two_groups_are_used_in_different_order(hosts) -> None:
    def battery(world: Group) -> None:
        first, second = pl.new_group(range(4)), pl.new_group(range(4))
        for count in (10, 100_000):
            tensors = [torch.full((count,), 1.0), torch.full((count,), 2.0)]
            pairs = [(first, tensors[0]), (second, tensors[1])]
            if world.rank % 2:
                pairs.reverse()
            works = [group.all_reduce(tensor, async_op=True) for group, tensor in pairs]
            for work in works:
                work.wait()
            assert bool((tensors[0] == 4).all()) and bool((tensors[1] == 8).all())

    run_ranks(4, battery, hosts=hosts)


@everywhere
def test_overlapping_groups_in_threads_of_their_own(hosts) -> None:
    def battery(world: Group) -> None:
        me = world.rank
        neighbours = {pair: pl.new_group(pair) for pair in [(0, 1), (1, 2), (2, 3)] if me in pair}
        wrong: list[object] = []

        def use(group: Group) -> None:
            for i in range(60):
                total = group.all_reduce(torch.full((i * 311 + 1,), float(me)))
                if not bool((total == sum(group.ranks)).all()):
                    wrong.append((group, i))

        threads = [threading.Thread(target=use, args=(g,)) for g in (*neighbours.values(), world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong

    run_ranks(4, battery, hosts=hosts)


def test_wrong_groups_are_refused() -> None:
    def battery(world: Group) -> None:
        for ranks, why in (
            ([], "at least one"),
            ([0, 0], "each rank once"),
            ([0, 1, 2], r"\[2\] are not ranks of this job"),
            ([-1, 0, 1], "not ranks"),
            ([1 - world.rank], f"rank {world.rank} is not in it"),
        ):
            with pytest.raises(pl.errors.UsageError, match=why):
                pl.new_group(ranks)
        closed = pl.new_group([0, 1])
        closed.close()
        with pytest.raises(pl.errors.PacelineError, match="closed"):
            closed.all_reduce(torch.ones(1))
        assert world.all_reduce(torch.ones(1)).item() == 2

    run_ranks(2, battery)


def test_wrong_arguments_are_refused_before_anything_is_sent() -> None:
    def battery(world: Group) -> None:
        one, errors = torch.ones(1), pl.errors
        for call, why in (
            (lambda: world.all_reduce(one, "average"), "unknown reduction 'average'"),
            (lambda: world.reduce(one, root=2), "root 2 is not a rank of this group"),
            (lambda: world.broadcast(one, root=-1), "root -1"),
            (lambda: world.all_reduce(one, out=torch.ones(2)), "`out` is float32"),
            (lambda: world.all_reduce(one, out=torch.ones(1).double()), "`out` is float64"),
            (lambda: world.all_to_all([one] * 3), "3 parts for a group of 2"),
            (lambda: world.reduce_scatter(torch.ones(3)), "cannot be split into 2"),
            (lambda: world.all_reduce(3.0), "expected a torch.Tensor or numpy.ndarray, got float"),
            (lambda: world.all_to_all([one, one.double()]), "in one call"),
            (lambda: world.scatter(one, root=world.rank), "must pass `parts`"),
            (lambda: world.scatter(one, [one, one], root=1 - world.rank), "passed `parts`"),
            (lambda: world.gather(one, 1 - world.rank, out=[one, one]), "passed `out`"),
        ):
            with pytest.raises(errors.UsageError, match=why):
                call()
        assert world.all_reduce(one).item() == 2  # the group is none the worse for it

    run_ranks(2, battery)
