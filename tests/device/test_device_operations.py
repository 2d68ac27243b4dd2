"""Operations of groups on tensors of a device: the values of the CPU, in the order of the calls."""

from __future__ import annotations

import pytest
import torch

from support.devices import load_device, run_alone_on_device, run_on_device

SIZE = 4000


def run_operations(world, here: torch.device) -> list[torch.Tensor]:
    """In a rank of two: return what all operations give for inputs that are still computed."""
    rank, other = world.rank, 1 - world.rank
    mine = torch.arange(SIZE, dtype=torch.float64).to(here).div(7) * (rank + 1)

    def blank(size: int = SIZE) -> torch.Tensor:
        return torch.full((size,), 9.0, dtype=torch.float64, device=here)

    results = [
        world.all_reduce(mine.clone(), "mean"),
        world.all_reduce(mine, "max", out=blank()),
        world.reduce_scatter(mine + 1),
        world.broadcast(mine.clone(), root=1),
        *world.all_gather(mine + 2),
        *world.all_gather(mine + 2, out=blank(2 * SIZE)),
        *(world.gather(mine, root=0) or []),
        world.scatter(blank(), list((mine.repeat(2) * 2).chunk(2)) if rank else None, root=1),
    ]
    summed = mine.clone()
    world.reduce(summed, 1)
    sent = [mine[: 10 * (to + 1)] + rank for to in range(2)]
    received = world.all_to_all(sent, out=[blank(10 * (rank + 1)) for _ in range(2)])
    echo = blank()
    strided = blank(2 * SIZE)[::2]  # its memory is not contiguous
    work = world.recv(echo, other, async_op=True)
    world.send(mine + 4, other)
    work.wait()
    world.broadcast(strided if rank else mine[:SIZE])
    return [result * 2 for result in [*results, summed, *received, echo, strided]]


def test_every_operation_has_the_values_of_the_cpu(schedule):
    def body(world) -> None:
        import paceline as pl

        found = run_operations(world, pl.device())
        expected = run_operations(world, torch.device("cpu"))
        for number, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert a.device == pl.device()
            assert a.cpu().equal(b), number

    run_on_device(2, body, schedule=schedule)


def test_asynchronous_operations_start_in_the_order_of_the_calls(schedule):
    def body(world) -> None:
        import paceline as pl

        laggard, device, rank = load_device(), pl.device(), world.rank
        world.all_reduce(torch.ones(3, device=device))  # threads and pinned memory are there now
        torch.accelerator.synchronize()
        laggard.take_synchronizations()
        inputs, works = [], []
        for number in range(6):  # of one size: the engine would not notice another order
            here = device if number % 3 else torch.device("cpu")
            inputs.append(torch.full((SIZE,), float(number + rank), device=here) + number)
            works.append(world.all_reduce(inputs[-1], async_op=True))
        waits = [w.stack for w in laggard.take_synchronizations() if "group.py" in w.stack]
        on_host = world.all_reduce(torch.full((SIZE,), 50.0 + rank))  # after all of those
        works[1].wait()
        inputs[1] += 1
        assert not waits, waits
        expected = [float(4 * number + 1) for number in range(6)]
        expected[1] += 1
        assert all(work.wait() is tensor for work, tensor in zip(works, inputs, strict=True))
        assert all(work.done() and work.error() is None for work in works)
        assert [tensor[-1].item() for tensor in inputs] == expected
        assert on_host[-1] == 101

    run_on_device(2, body, schedule=schedule)


def test_a_result_waits_for_what_still_reads_its_target(schedule):
    def body(world) -> tuple[float, float]:
        import paceline as pl

        # Both on a stream of the script's own.
        with torch.Stream(pl.device()):
            target = torch.full((SIZE,), 1.0, device=pl.device())
            read = target * 3 if world.rank else target
            world.broadcast(target if world.rank else target + 6)
            return read[7].item(), (target + 1)[7].item()

    assert run_on_device(2, body, schedule=schedule)[1] == (3.0, 8.0)


def test_memory_is_not_kept(schedule):
    def body(world) -> None:
        import time

        import paceline as pl

        def allocated() -> int:
            return torch.get_device_module(pl.device()).memory_allocated()

        world.all_reduce(torch.ones(10, device=pl.device()))
        before = allocated()
        for _ in range(3):
            large = torch.ones(1 << 20, device=pl.device())
            world.all_reduce(large, async_op=True).wait()
        del large
        torch.accelerator.synchronize()
        deadline_s = time.monotonic() + 20
        while allocated() > before and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert allocated() <= before

    run_on_device(2, body, schedule=schedule)


def test_mistakes_have_the_errors_of_the_cpu(schedule):
    def body(world) -> None:
        import paceline as pl
        from paceline.errors import CollectiveMismatch, UnsupportedTensor

        device = pl.device()
        for values in (torch.ones(3, dtype=torch.complex64), torch.eye(3).to_sparse()):
            with pytest.raises(UnsupportedTensor, match="the engine moves"):
                world.all_reduce(values.to(device) if not values.is_sparse else values)
        work = world.all_reduce(torch.ones(3 + world.rank, device=device), async_op=True)
        with pytest.raises(CollectiveMismatch):
            work.wait()
        assert isinstance(work.error(), CollectiveMismatch)

    run_on_device(2, body, schedule=schedule)


def test_a_queued_operation_tells_whether_it_has_ended():
    def body() -> None:
        import threading

        from paceline.comm.device_route import Errand
        from paceline.comm.device_staging import QueuedOperation
        from paceline.errors import PeerLost

        class Operation:
            def __init__(self) -> None:
                self.ended = threading.Event()

            def done(self) -> bool:
                return self.ended.is_set()

            def wait(self, timeout_s: float | None = None) -> str:
                self.ended.wait(timeout_s)
                return "result"

            def error(self) -> Exception | None:
                return PeerLost("a peer", rank=1)

        operation = Operation()
        errand = Errand(lambda: operation)
        queued = QueuedOperation(errand)
        start = threading.Timer(2, errand.run)
        start.start()
        assert not queued.done() and queued.error() is None and not queued.has_started()
        start.join()
        assert queued.has_started() and not queued.done()
        threading.Timer(0.5, operation.ended.set).start()
        assert queued.wait(60) == "result" and operation.done()
        assert queued.done() and isinstance(queued.error(), PeerLost)

        def fail() -> Operation:
            raise PeerLost("a peer", rank=1)

        errand = Errand(fail)
        failed = QueuedOperation(errand)
        errand.run()
        failed.wait_until_started()
        assert failed.done() and isinstance(failed.error(), PeerLost)
        with pytest.raises(PeerLost):
            failed.wait()

    run_alone_on_device(body, schedule="lazy")


def test_memory_is_kept_for_operations_that_were_dropped(schedule):
    def body(world) -> float:
        import paceline as pl

        other = pl.new_group([0, 1])
        size = 1 << 20  # the engine reads so much when the other worker receives it
        if world.rank == 0:
            world.send(torch.full((size,), 5.0, device=pl.device()), 1, async_op=True)
            for _ in range(3):  # the send has started, and the route has looked at its copies
                world.all_reduce(torch.ones(1, device=pl.device()))
                torch.accelerator.synchronize()
            for _ in range(4):
                torch.full((size,), -1.0).pin_memory()
            other.barrier()
            world.barrier()
            return 5.0
        for _ in range(3):
            world.all_reduce(torch.ones(1, device=pl.device()))
        other.barrier()
        received = torch.zeros(size, device=pl.device())
        world.recv(received, 0)
        world.barrier()
        return received.min().item()

    assert run_on_device(2, body, schedule=schedule) == [5.0, 5.0]
