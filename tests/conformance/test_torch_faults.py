"""What a torch.distributed program gets to see when something goes wrong."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from paceline.errors import CollectiveMismatch, GenerationChanged, PeerLost, PeerTimeout
from support import receive, report, run_ranks, started

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def train_forever() -> None:
    from torch.nn.parallel import DistributedDataParallel as DDP

    model = DDP(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), bucket_cap_mb=0.001)
    for step in range(1_000_000):
        model(torch.ones(4, 64)).sum().backward()
        if step == 3:
            report("training")


@pytest.mark.parametrize("hosts", [1, 3], ids=["one host", "three hosts"])
def test_rank_killed_in_a_ddp_step_is_named(hosts):
    def body(_):
        dist.init_process_group("paceline")
        try:
            train_forever()
        except RuntimeError as error:  # our own class, or its name in the text of a C++ future
            return f"{type(error).__name__}: {error}"

    with started(3, body, hosts=hosts) as ranks:
        ranks.receive_all()
        ranks.kill(1)
        for outcome in ranks.wait(60, ranks=[0, 2]):
            assert outcome.value is not None, outcome
            assert "rank 1" in outcome.value and "PeerLost" in outcome.value, outcome


def test_lost_rank_ends_blocking_asynchronous_and_future_forms():
    def body(_, form):
        dist.init_process_group("paceline")
        report("ready")
        if dist.get_rank() == 1:
            import time

            time.sleep(60)
        if form == "blocking":
            with pytest.raises(PeerLost, match="rank 1") as caught:
                dist.all_reduce(torch.ones(3))
            assert caught.value.rank == 1
            return
        work = dist.all_reduce(torch.ones(3), async_op=True)
        if form == "future":
            with pytest.raises(RuntimeError, match="rank 1"):
                work.get_future().wait()
            return
        with pytest.raises(PeerLost, match="rank 1"):
            work.wait()
        assert work.is_completed() and not work.is_success()
        assert isinstance(work.exception(), PeerLost)

    for form in ("blocking", "asynchronous", "future"):
        with started(2, body, form) as ranks:
            ranks.receive_all()
            ranks.kill(1)
            (outcome,) = ranks.wait(60, ranks=[0])
            assert outcome.status == 0 and outcome.error is None, outcome


def test_ranks_that_disagree_are_told_so():
    def body(_):
        dist.init_process_group("paceline")
        with pytest.raises(CollectiveMismatch, match=r"float32\[3\].*float32\[4\]"):
            dist.all_reduce(torch.ones(3 + dist.get_rank()))

    run_ranks(2, body)


def test_monitored_barrier_names_the_missing():
    def body(_):
        dist.init_process_group("paceline")
        rank = dist.get_rank()
        dist.monitored_barrier(timeout=timedelta(seconds=50))
        some = timedelta(seconds=3)  # those who do come may be late on a busy machine
        if rank == 0:
            with pytest.raises(PeerTimeout, match="Ranks 1, 3 failed to pass monitoredBarrier"):
                dist.monitored_barrier(timeout=some, wait_all_ranks=True)
        elif rank == 2:
            with pytest.raises(PeerTimeout, match="rank 1, 3 is missing"):
                dist.monitored_barrier(timeout=some, wait_all_ranks=True)
        dist.barrier()  # the group goes on

    run_ranks(4, body)


def test_timeouts_of_a_group_and_of_a_wait():
    def body(_):
        dist.init_process_group("paceline")
        rank = dist.get_rank()
        dist.barrier()  # torch has both come to new_group within its timeout
        hasty = dist.new_group([0, 1], timeout=timedelta(seconds=3))
        if rank == 0:
            with pytest.raises(PeerTimeout, match="timeout after 3 s: rank 0 waits for rank 1"):
                dist.all_reduce(torch.ones(1), group=hasty)
        dist.barrier()
        tensor = torch.ones(1)
        if rank == 0:  # an early wait gives up, the operation goes on
            work = dist.all_reduce(tensor, async_op=True)
            with pytest.raises(PeerTimeout, match="continues"):
                work.wait(timedelta(seconds=0.2))
            report("late")
            assert work.wait() and tensor.item() == 2
        else:
            receive()
            dist.all_reduce(tensor)

    with started(2, body) as ranks:
        assert ranks.receive(0) == "late"
        ranks.send(1, "come")
        ranks.values()


def test_abort_ends_the_others():
    def body(_):
        dist.init_process_group("paceline")
        if dist.get_rank() == 0:
            dist.group.WORLD.abort()
            return
        with pytest.raises(GenerationChanged, match="rank 0 aborted"):
            dist.all_reduce(torch.ones(3))

    run_ranks(2, body)


def test_tensors_that_cannot_be_moved_are_refused_before_anybody_waits():
    from paceline.errors import UnsupportedTensor, UsageError

    def body(_):
        dist.init_process_group("paceline")
        with pytest.raises(UnsupportedTensor, match="meta"):
            dist.all_reduce(torch.ones(3, device="meta"))
        with pytest.raises(UnsupportedTensor, match="mean of bool"):
            dist.all_reduce(torch.ones(3, dtype=torch.bool), dist.ReduceOp.AVG)
        with pytest.raises(UnsupportedTensor, match="band"):
            dist.all_reduce(torch.ones(3), dist.ReduceOp.BAND)
        with pytest.raises(UsageError, match="2 times"):
            dist.group.WORLD.all_gather_single(torch.ones(5), torch.ones(2))
        dist.barrier()

    run_ranks(2, body)
