"""Every function of torch.distributed that gloo has, on our backend, with known results.

Ranks on one host share memory; with `hosts=2` the same calls cross TCP.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from support import run_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.parametrize("hosts", [1, 2], ids=["one host", "two hosts"]),
]


def start() -> tuple[int, int]:
    import warnings

    warnings.simplefilter("ignore")
    dist.init_process_group("paceline")
    return dist.get_rank(), dist.get_world_size()


def test_reductions(hosts):
    def body(_):
        rank, n = start()
        ops = {"SUM": 10, "PRODUCT": 24, "MIN": 1, "MAX": 4, "AVG": 2.5}
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
            for op, expected in ops.items():
                tensor = torch.full((3, 5), rank + 1, dtype=dtype)
                dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
                assert (tensor == expected).all(), (dtype, op, tensor)
        for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
            ints = {"BAND": 0, "BOR": 7, "BXOR": 4, "SUM": 10, "MAX": 4, "AVG": 2}  # towards zero
            for op, expected in ints.items():
                tensor = torch.full((3, 5), rank + 1, dtype=dtype)
                dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
                assert (tensor == expected).all(), (dtype, op, tensor)
        tensor = torch.full((7,), complex(rank, 1), dtype=torch.complex64)
        dist.all_reduce(tensor)
        assert (tensor == complex(6, 4)).all()
        strided = torch.full((4, 4), float(rank)).t()[::2]
        work = dist.all_reduce(strided, async_op=True)
        work.wait()
        assert (strided == 6).all()
        tensor = torch.full((3,), float(rank))
        dist.reduce(tensor, dst=2)
        assert rank != 2 or (tensor == 6).all()
        output = torch.empty(2)
        dist.reduce_scatter(output, [torch.full((2,), float(i + rank)) for i in range(n)])
        assert (output == n * rank + 6).all()
        dist.reduce_scatter_tensor(output, torch.arange(2.0 * n))
        assert output.tolist() == [n * 2.0 * rank, n * (2.0 * rank + 1)]

    run_ranks(4, body, hosts=hosts)


def test_sparse_all_reduce(hosts):
    def body(_):
        rank, n = start()
        places, values = torch.tensor([[0, rank + 1]]), torch.tensor([1.0, float(rank)])
        tensor = torch.sparse_coo_tensor(places, values, (6,), check_invariants=True)
        dist.all_reduce(tensor)
        assert tensor.to_dense().tolist() == [4, 0, 1, 2, 3, 0]
        values = torch.ones(rank + 1, 2)  # hybrid, and of another size on every rank
        tensor = torch.sparse_coo_tensor(torch.arange(rank + 1)[None], values, (4, 2))
        assert dist.all_reduce(tensor, async_op=True).result()[0].to_dense()[:, 0].tolist() == [
            4,
            3,
            2,
            1,
        ]

    run_ranks(4, body, hosts=hosts)


def test_moving(hosts):
    def body(_):
        rank, n = start()
        for dtype in (torch.float32, torch.bool, torch.complex128, torch.float8_e4m3fn):
            tensor = torch.full((3,), rank == 1, dtype=torch.float32).to(dtype)
            dist.broadcast(tensor, src=1)
            assert tensor.to(torch.complex64).eq(1).all(), dtype
        uneven = [torch.empty(i + 1) for i in range(n)]
        dist.all_gather(uneven, torch.full((rank + 1,), float(rank)))
        assert [t.tolist() for t in uneven] == [[float(i)] * (i + 1) for i in range(n)]
        output = torch.empty(2 * n, dtype=torch.int64)
        dist.all_gather_into_tensor(output, torch.tensor([rank, -rank]))
        assert output.tolist() == [v for i in range(n) for v in (i, -i)]
        parts = [torch.empty(2) for _ in range(n)] if rank == 3 else None
        dist.gather(torch.full((2,), float(rank)), parts, dst=3)
        assert parts is None or [p[0].item() for p in parts] == [0, 1, 2, 3]
        output = torch.empty(2)
        given = [torch.full((2,), float(i)) for i in range(n)] if rank == 1 else None
        dist.scatter(output, given, src=1)
        assert (output == rank).all()

    run_ranks(4, body, hosts=hosts)


def test_all_to_all(hosts):
    def body(_):
        rank, n = start()
        received = [torch.empty(rank + 1) for _ in range(n)]
        dist.all_to_all(received, [torch.full((i + 1,), float(rank)) for i in range(n)])
        assert [t.tolist() for t in received] == [[float(i)] * (rank + 1) for i in range(n)]
        output = torch.empty(n, 2)
        dist.all_to_all_single(output, torch.arange(2.0 * n).view(n, 2) + 100 * rank)
        assert output[:, 0].tolist() == [100 * i + 2 * rank for i in range(n)]
        sizes = [i + 1 for i in range(n)]
        output, sent = torch.empty(n * (rank + 1), 3), torch.full((sum(sizes), 3), float(rank))
        dist.all_to_all_single(output, sent, [rank + 1] * n, sizes)
        assert output[:, 0].tolist() == [float(i) for i in range(n) for _ in range(rank + 1)]

    run_ranks(4, body, hosts=hosts)


def test_coalesced(hosts):
    def body(_):
        rank, n = start()
        tensors = [torch.full((size,), float(rank)) for size in (1, 1000, 7)]
        dist.all_reduce_coalesced(tensors)
        assert all((t == 6).all() for t in tensors)
        lists = [[torch.empty(2), torch.empty(3)] for _ in range(n)]
        dist.all_gather_coalesced(
            lists, [torch.full((2,), rank * 1.0), torch.full((3,), rank * 2.0)]
        )
        assert [[a[0].item(), b[0].item()] for a, b in lists] == [[i, 2 * i] for i in range(n)]
        from torch.distributed.distributed_c10d import _coalescing_manager

        with _coalescing_manager(async_ops=True) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor, async_op=True)
        manager.wait()
        assert all((t == 24).all() for t in tensors)
        outputs = [torch.empty(n), torch.empty(2 * n)]
        with _coalescing_manager():
            dist.all_gather_into_tensor(outputs[0], torch.tensor([1.0 * rank]))
            dist.all_gather_into_tensor(outputs[1], torch.tensor([1.0 * rank, 0]))
        assert outputs[0].tolist() == [0, 1, 2, 3] and outputs[1].tolist()[2::2] == [1, 2, 3]
        halves = [torch.empty(1), torch.empty(2)]
        with _coalescing_manager():
            dist.reduce_scatter_tensor(halves[0], torch.ones(n))
            dist.reduce_scatter_tensor(halves[1], torch.ones(2 * n))
        assert halves[0].item() == n and halves[1].tolist() == [n, n]
        with _coalescing_manager(device=torch.device("cpu")):
            dist.all_gather(list(outputs[0].split(1)), torch.tensor([2.0 * rank]))
        assert outputs[0].tolist() == [0, 2, 4, 6]

    run_ranks(4, body, hosts=hosts)


def test_point_to_point(hosts):
    def body(_):
        rank, n = start()
        after, before = (rank + 1) % n, (rank - 1) % n
        tensor = torch.empty(3)
        if rank == 0:
            senders = [dist.recv(tensor) for _ in range(n - 1)]  # from whoever comes first
            assert sorted(senders) == [1, 2, 3]
        else:
            dist.send(torch.full((3,), float(rank)), 0)
        dist.barrier()  # what follows must not be mistaken for one of these
        # Tags tell messages of one sender apart, whatever their order.
        sends = [dist.isend(torch.full((2,), float(tag)), after, tag=tag) for tag in (1, 2)]
        for tag in (2, 1):
            tensor = torch.empty(2)
            work = dist.irecv(tensor, before, tag=tag)
            work.wait()
            assert (tensor == tag).all() and work._source_rank() == before
        for work in sends:
            work.wait()
        to, back = torch.empty(5), torch.empty(5)
        mine = torch.full((5,), float(rank))
        operations = [
            dist.P2POp(dist.isend, mine, after),
            dist.P2POp(dist.irecv, to, before),
            dist.P2POp(dist.isend, mine, before, tag=9),
            dist.P2POp(dist.irecv, back, after, tag=9),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert (to == before).all() and (back == after).all()

    run_ranks(4, body, hosts=hosts)


def test_objects(hosts):
    def body(_):
        rank, n = start()
        things = [None] * n
        dist.all_gather_object(things, {"rank": rank, "text": "x" * rank})
        assert things == [{"rank": i, "text": "x" * i} for i in range(n)]
        things = [{"a": 1}, "b"] if rank == 1 else [None, None]
        dist.broadcast_object_list(things, src=1)
        assert things == [{"a": 1}, "b"]
        gathered = [None] * n if rank == 0 else None
        dist.gather_object(rank * 2, gathered, dst=0)
        assert gathered is None or gathered == [0, 2, 4, 6]
        mine = [None]
        dist.scatter_object_list(mine, [f"for {i}" for i in range(n)] if rank == 2 else None, src=2)
        assert mine == [f"for {rank}"]
        if rank == 0:
            dist.send_object_list(["hello"], dst=1)
        elif rank == 1:
            words = [None]
            assert dist.recv_object_list(words, src=0) == 0 and words == ["hello"]

    run_ranks(4, body, hosts=hosts)


def test_groups(hosts):
    def body(_):
        rank, n = start()
        odd = dist.new_group([1, 3])
        if rank in (1, 3):
            tensor = torch.tensor([float(rank)])
            dist.all_reduce(tensor, group=odd)
            assert tensor.item() == 4 and dist.get_rank(odd) == rank // 2
            dist.broadcast(tensor, src=3, group=odd)
            dist.destroy_process_group(odd)
        pair, _ = dist.new_subgroups(2)
        tensor = torch.tensor([float(rank)])
        dist.all_reduce(tensor, group=pair)
        assert tensor.item() == (1 if rank < 2 else 5)
        part = dist.group.WORLD.split_group([0, 2], group_name="even")
        assert (part is None) == (rank in (1, 3))
        if part is not None:
            tensor = torch.tensor([float(rank)])
            part.allreduce([tensor]).wait()
            assert tensor.item() == 2
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        tensor = torch.tensor([float(rank)])
        dist.all_reduce(tensor, group=mesh.get_group("a"))
        assert tensor.item() == (2 if rank in (0, 2) else 4)

    run_ranks(4, body, hosts=hosts)


def test_works_and_futures(hosts):
    def body(_):
        rank, n = start()
        from datetime import timedelta

        tensor = torch.full((4,), float(rank))
        work = dist.all_reduce(tensor, async_op=True)
        assert work.wait(timedelta(seconds=30)) and work.is_completed() and work.is_success()
        assert work.result()[0] is tensor and work.exception() is None
        assert work.get_future().value()[0].tolist() == [6] * 4
        doubled = (
            dist.all_reduce(tensor, async_op=True).get_future().then(lambda f: f.value()[0] * 2)
        )
        assert doubled.wait().tolist() == [48] * 4

        # A callback may itself communicate and wait, as PowerSGD's does.
        def once_more(future):
            return dist.all_reduce(future.value()[0], async_op=True).get_future().wait()[0]

        future = dist.all_reduce(torch.ones(4), async_op=True).get_future().then(once_more)
        assert future.wait().tolist() == [16] * 4
        futures = [dist.all_reduce(torch.ones(9), async_op=True).get_future() for _ in range(100)]
        assert all(f[0][0] == n for f in torch.futures.wait_all(futures))
        # A future that waits for its peer does not hold up the others.
        if rank == 0:
            late = dist.irecv(torch.empty(1), 1).get_future()
        dist.all_reduce(torch.ones(9), async_op=True).get_future().wait()
        if rank == 1:
            dist.send(torch.ones(1), 0)
        if rank == 0:
            late.wait()

    run_ranks(4, body, hosts=hosts)


def test_profiler_events_last_until_the_operation_has_ended(hosts):
    def body(_):
        rank, n = start()
        with torch.autograd.profiler.profile(record_shapes=True) as profile:
            for sender in range(n):
                if rank == sender:
                    for other in range(n):
                        if other != rank:
                            dist.send(torch.ones(3), other)
                else:
                    dist.recv(torch.empty(3))
            dist.all_reduce(torch.ones(5))
            dist.all_reduce(torch.ones(5), async_op=True).wait()
        events = [e for e in profile.function_events if e.name.startswith("paceline:")]
        names = sorted(event.name.removeprefix("paceline:") for event in events)
        assert names == ["all_reduce"] * 2 + ["recvAnySource"] * 3 + ["send"] * 3
        for event in events:
            # Ended by another thread than the one that began it: at its own end, not at the end of
            # the next operation.
            assert event.is_async and event.count == 1
            assert event.input_shapes == [[5 if event.name.endswith("all_reduce") else 3]]

    run_ranks(4, body, hosts=hosts)
