"""Sends and receives: any order of tags, any source, any size, beside collectives."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import paceline as pl
from paceline.comm.group import Group
from support import run_ranks
from support.reference import DTYPES, bits, require_same, values

PLACES = {"one host": 1, "a host each": 4, "2 hosts with 2": 2, "mixed": (0, 1, 0, 1)}
everywhere = pytest.mark.parametrize("hosts", PLACES.values(), ids=PLACES.keys())


@everywhere
def test_every_pair_dtype_and_size(hosts) -> None:
    def battery(group: Group) -> None:
        n, me = group.size, group.rank
        sizes = (0, 1, 4095, 16 * 1024, 65_537, 700_001)
        cases = [(dtype, 33) for dtype in DTYPES] + [("float32", size) for size in sizes]
        for case, (dtype, count) in enumerate(cases):
            for shift in range(1, n):
                to, source = (me + shift) % n, (me - shift) % n
                sent = values(me * n + to, count, dtype, seed=case)
                received = torch.zeros(count, dtype=DTYPES[dtype])
                work = group.send(sent, to, tag=case, async_op=True)
                assert group.recv(received, source, tag=case) == source
                assert work.wait() is None
                expected = values(source * n + me, count, dtype, seed=case)
                require_same(received, expected, f"{dtype}[{count}] from {source}")

    run_ranks(4, battery, hosts=hosts)


@everywhere
def test_tags_may_be_received_in_any_order(hosts) -> None:
    def battery(group: Group) -> None:
        n, me = group.size, group.rank
        tags, to, source = range(40), (me + 1) % n, (me - 1) % n
        sends = [
            group.send(torch.full((tag * 997,), float(me * 100 + tag)), to, tag=tag, async_op=True)
            for tag in tags
        ]
        for tag in reversed(tags):
            tensor = torch.zeros(tag * 997)
            group.recv(tensor, source, tag=tag)
            assert bool((tensor == source * 100 + tag).all())
        for work in sends:
            work.wait()
        # Receives first, then the sends; one tag, so they arrive in the order in which they left.
        tensors = [torch.zeros(5) for _ in range(30)]
        works = [group.recv(tensor, source, tag=7, async_op=True) for tensor in tensors]
        for i in range(30):
            group.send(torch.full((5,), float(i)), to, tag=7)
        assert [work.wait() for work in works] == [source] * 30
        assert [tensor[0].item() for tensor in tensors] == [float(i) for i in range(30)]

    run_ranks(4, battery, hosts=hosts)


@everywhere
def test_any_source(hosts) -> None:
    def battery(group: Group) -> None:
        n, me = group.size, group.rank
        if me == 0:
            senders = []
            for _ in range(10 * (n - 1)):
                tensor = torch.zeros(1000, dtype=torch.int64)
                senders.append(group.recv(tensor, tag=3))
                assert bool((tensor == senders[-1]).all())
                group.send(tensor[:1], senders[-1], tag=4)
            assert sorted(senders) == sorted([*range(1, n)] * 10)
        else:
            for _ in range(10):
                group.send(torch.full((1000,), me), 0, tag=3)
                group.recv(torch.zeros(1, dtype=torch.int64), 0, tag=4)
        group.barrier()

    run_ranks(4, battery, hosts=hosts)


@everywhere
def test_transfers_run_beside_collectives(hosts) -> None:
    def battery(group: Group) -> None:
        n, me = group.size, group.rank
        received = torch.zeros(200_000)
        arriving = group.recv(received, (me - 1) % n, tag=1, async_op=True)
        for i in range(10):
            assert group.all_reduce(torch.ones(3000)).sum().item() == 3000 * n, i
        assert not arriving.done() and arriving.error() is None
        with pytest.raises(pl.errors.PeerTimeout, match="receive of 200000 float32"):
            arriving.wait(0.05)
        group.barrier()
        group.send(torch.full((200_000,), float(me)), (me + 1) % n, tag=1)
        assert arriving.wait() == (me - 1) % n and arriving.done()
        assert bool((received == (me - 1) % n).all())

    run_ranks(4, battery, hosts=hosts)


@everywhere
def test_strided_tensors_and_arrays(hosts) -> None:
    def battery(group: Group) -> None:
        n, me = group.size, group.rank
        matrix = values(me, 100 * 60, "float32").view(100, 60)
        expected = values((me - 1) % n, 100 * 60, "float32").view(100, 60)
        target = torch.zeros(60, 100)
        work = group.send(matrix.t(), (me + 1) % n, async_op=True)
        group.recv(target.t().t(), (me - 1) % n)
        work.wait()
        require_same(target, expected.t().contiguous(), "a transposed matrix")
        array = np.zeros((100, 120), dtype=np.float32)
        work = group.send(matrix.numpy(), (me + 1) % n, async_op=True)
        group.recv(array[:, ::2], (me - 1) % n)
        work.wait()
        assert bits(array[:, ::2]) == bits(expected) and not array[:, 1::2].any()

    run_ranks(4, battery, hosts=hosts)


def test_wrong_arguments_are_refused_at_once() -> None:
    def battery(group: Group) -> None:
        tensor = torch.zeros(1)
        for peer in (group.rank, -1, 2, 17):
            with pytest.raises(pl.errors.UsageError, match=f"rank {peer} is not another rank"):
                group.send(tensor, peer)
            with pytest.raises(pl.errors.UsageError, match=f"rank {peer} is not another rank"):
                group.recv(tensor, peer)
        for tag in (-1, 1 << 63):
            with pytest.raises(pl.errors.UsageError, match=f"tag {tag}"):
                group.send(tensor, 1 - group.rank, tag=tag)
        highest = (1 << 63) - 1
        work = group.send(torch.tensor([5.0]), 1 - group.rank, tag=highest, async_op=True)
        group.recv(tensor, 1 - group.rank, tag=highest)
        work.wait()
        assert tensor.item() == 5.0

    run_ranks(2, battery)
