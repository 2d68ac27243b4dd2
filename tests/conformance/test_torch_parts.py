"""`cpu:paceline,cuda:...` in one group of torch: the engine is the CPU's part of it."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist

import paceline as pl
from paceline.comm.torch.requested import can_be_a_part
from support import run_processes
from support.environs import job_environs

# No device is needed: gloo stands in for the backend of the other part.
CONFIG = "cpu:paceline,cuda:gloo"

needs_parts = pytest.mark.skipif(
    not can_be_a_part(),
    reason=f"torch {torch.__version__} cannot create a backend in Python; 2.14 and newer can",
)


def values(body):
    with job_environs(2) as environs:
        outcomes = run_processes(body, environs)
    assert all(o.status == 0 and o.error is None for o in outcomes), "\n".join(map(str, outcomes))
    return [o.value for o in outcomes]


@needs_parts
def test_the_engine_serves_the_cpu_in_a_group_of_several_backends():
    def body(rank):
        from torch.nn.parallel import DistributedDataParallel

        import paceline.runtime.torch_plugin

        paceline.runtime.torch_plugin.register()
        dist.init_process_group(CONFIG)
        gc.collect()  # nobody but torch holds our part
        part = dist.group.WORLD._get_backend(torch.device("cpu"))
        total = torch.full((4,), rank + 1.0)
        work = dist.all_reduce(total, async_op=True)
        work.wait()
        gathered = torch.zeros(8)
        dist.all_gather_into_tensor(gathered, total + rank)
        objects: list = [None, None]
        dist.all_gather_object(objects, {"rank": rank})
        message = torch.full((2,), 7.0)
        dist.send(message, 0) if rank else dist.recv(message, 1)
        with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
            dist.all_reduce(message)
            dist.all_reduce(total)
        manager.wait()
        dist.monitored_barrier()
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(3, 2))
        model(torch.ones(1, 3) * (rank + 1)).sum().backward()
        slope = model.module.weight.grad[0, 0].item()
        same = dist.new_group([0, 1])
        dist.all_reduce(total, group=same)
        own = dist.new_group([0, 1], backend="paceline")
        kinds = [type(part).__name__, type(same).__name__, type(own).__name__]
        with pytest.raises(pl.errors.UsageError, match="name the source"):
            dist.recv(message)
        with pytest.raises(pl.errors.CollectiveMismatch):
            dist.all_reduce(torch.ones(3 + rank))
        dist.destroy_process_group()
        return kinds, total.tolist(), gathered.tolist(), objects, message.tolist(), slope

    kinds = ["PacelinePart", "ProcessGroup", "PacelineProcessGroup"]
    gathered, objects = [3.0] * 4 + [4.0] * 4, [{"rank": 0}, {"rank": 1}]
    for found in values(body):
        assert found == (kinds, [12.0] * 4, gathered, objects, [14.0] * 2, 1.5)


def test_one_backend_is_a_process_group_of_ours():
    def body(rank):
        import paceline.runtime.torch_plugin

        paceline.runtime.torch_plugin.register()
        dist.init_process_group("cpu:paceline")
        tensor = torch.full((4,), rank + 1.0)
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        dist.destroy_process_group()
        return work.is_completed(), tensor.tolist()

    assert values(body) == [(True, [3.0] * 4)] * 2
