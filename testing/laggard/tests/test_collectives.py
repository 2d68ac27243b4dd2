"""The backend "lagcomm": the device's own collectives between two processes, and DDP on them."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import laggard
from laggard.collectives import LaggardGroup
from laggard.pytest_plugin import schedule_named


def check_collectives(device: str, rank: int) -> None:
    x = torch.full((4,), rank + 1.0, device=device)
    dist.all_reduce(x)
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    assert x.tolist() == [6.0] * 4
    y = torch.full((2,), float(rank), device=device)
    dist.broadcast(y, src=1)
    assert y.tolist() == [1.0, 1.0]
    gathered = [torch.empty(2, device=device) for _ in range(2)]
    dist.all_gather(gathered, torch.full((2,), float(rank), device=device))
    assert [t.tolist() for t in gathered] == [[0.0, 0.0], [1.0, 1.0]]
    whole = torch.empty(4, device=device)
    dist.all_gather_single(whole, torch.full((2,), float(rank), device=device))
    assert whole.tolist() == [0.0, 0.0, 1.0, 1.0]
    part = torch.empty(2, device=device)
    dist.reduce_scatter_single(part, torch.arange(4.0, device=device))
    assert part.tolist() == [4.0 * rank, 4.0 * rank + 2]
    dist.reduce_scatter(part, [torch.full((2,), float(i), device=device) for i in range(2)])
    assert part.tolist() == [2.0 * rank] * 2
    check_rooted(device, rank)
    check_coalesced(device, rank)
    if rank == 0:
        dist.send(torch.full((3,), 5.0, device=device), 1)
    else:
        received = torch.empty(3, device=device)
        dist.recv(received, 0)
        assert received.tolist() == [5.0] * 3
    dist.barrier()
    host = torch.full((3,), rank + 1.0)
    dist.all_reduce(host)
    assert host.tolist() == [3.0] * 3


def check_rooted(device: str, rank: int) -> None:
    x = torch.full((2,), rank + 1.0, device=device)
    dist.reduce(x, dst=1)
    assert rank == 0 or x.tolist() == [3.0, 3.0]
    parts = [torch.empty(2, device=device) for _ in range(2)] if rank == 0 else None
    dist.gather(torch.full((2,), float(rank), device=device), parts, dst=0)
    assert parts is None or [t.tolist() for t in parts] == [[0.0, 0.0], [1.0, 1.0]]
    mine = torch.empty(2, device=device)
    shares = [torch.full((2,), 4.0 + i, device=device) for i in range(2)] if rank == 0 else None
    dist.scatter(mine, shares, src=0)
    assert mine.tolist() == [4.0 + rank] * 2


def check_coalesced(device: str, rank: int) -> None:
    """The forms that DTensor and FSDP use, through functional collectives, too."""
    swapped = torch.empty(2, device=device)
    dist.all_to_all_single(swapped, torch.tensor([10.0 * rank, 10.0 * rank + 1], device=device))
    assert swapped.tolist() == [float(rank), 10.0 + rank]
    group = dist.group.WORLD
    tensors = [torch.full((n,), rank + 1.0, device=device) for n in (2, 4)]
    summed = funcol.all_reduce_coalesced(tensors, "sum", group)
    assert [t.tolist() for t in summed] == [[3.0] * 2, [3.0] * 4]
    whole = funcol.all_gather_into_tensor_coalesced(tensors, group)
    assert [t.tolist() for t in whole] == [[1.0] * n + [2.0] * n for n in (2, 4)]
    parts = funcol.reduce_scatter_tensor_coalesced(tensors, "sum", [0, 0], group)
    assert [t.tolist() for t in parts] == [[3.0] * n for n in (1, 2)]


def check_dtensor_and_fsdp(device: str, rank: int) -> None:
    mesh = init_device_mesh("laggard", (2,))
    torch.manual_seed(1)
    full = torch.randn(4, 6)
    sharded = distribute_tensor(full.to(device), mesh, [Shard(0)])
    assert sharded.to_local().shape == (2, 6)
    other = distribute_tensor(full.t().to(device), mesh, [Replicate()])
    torch.testing.assert_close((sharded @ other).full_tensor().cpu(), full @ full.t())
    inner, alone = layers().to(device), layers()
    for layer in (inner[0], inner[2], inner):
        fully_shard(layer, mesh=mesh)
    updates = [torch.optim.SGD(m.parameters(), 0.1) for m in (inner, alone)]
    for step in range(2):
        torch.manual_seed(step)
        batch = torch.randn(8, 8)
        for update in updates:
            update.zero_grad()
        inner(batch[rank * 4 : rank * 4 + 4].to(device)).square().mean().backward()
        alone(batch).square().mean().backward()
        for update in updates:
            update.step()
    found = [p.full_tensor().detach().cpu() for p in inner.parameters()]
    torch.testing.assert_close(found, [p.detach() for p in alone.parameters()])


def check_asynchrony(device: str) -> None:
    laggard.take_synchronizations()
    x = torch.ones(4, device=device)
    dist.all_reduce(x, async_op=True).wait()
    y = x * 2
    assert not laggard.take_synchronizations()
    assert y.tolist() == [4.0] * 4


def check_missing_wait(device: str) -> None:
    x = torch.ones(4, device=device)
    work = dist.all_reduce(x, async_op=True)
    x * 1  # not after the collective
    assert [race.earlier for race in laggard.take_races()] == ["copy host to device"]
    work.wait()
    assert x.tolist() == [2.0] * 4


def check_shutdown(device: str, rank: int, store: str) -> None:
    group = LaggardGroup(dist.FileStore(store, 2), rank, 2, timedelta(seconds=30))
    with laggard.lazy_schedule():
        x = torch.ones(4, device=device)
        group.allreduce([x])
        with pytest.raises(RuntimeError, match="while a collective is in flight"):
            group.shutdown()
        torch.accelerator.synchronize()
        group.shutdown()


def check_failure(device: str) -> None:
    with pytest.raises(RuntimeError, match="an earlier collective failed"):
        # gloo has no sum for it; this call raises if that is known before it returns
        dist.all_reduce(torch.ones(4, dtype=torch.int16, device=device))
        torch.accelerator.synchronize()
        dist.all_reduce(torch.ones(4, device=device))


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def check_ddp(device: str, rank: int) -> None:
    inner, alone = layers().to(device), layers()
    model = DistributedDataParallel(inner)
    updates = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, alone)]
    for step in range(3):
        torch.manual_seed(step)
        batch = torch.randn(8, 8)
        for update in updates:
            update.zero_grad()
        model(batch[rank * 4 : rank * 4 + 4].to(device)).square().mean().backward()
        alone(batch).square().mean().backward()
        for update in updates:
            update.step()
    found = [p.detach().cpu() for p in inner.parameters()]
    torch.testing.assert_close(found, [p.detach() for p in alone.parameters()])


def worker(rank: int, store: str, schedules: list[str]) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.laggard.set_device(rank)
    device = f"laggard:{rank}"
    # No backend is named: the device's own one is chosen from the map of defaults.
    assert dist.Backend.default_device_backend_map["laggard"] == "lagcomm"
    dist.init_process_group("lagcomm", init_method=f"file://{store}", rank=rank, world_size=2)
    for name in schedules:
        with schedule_named(name):
            check_collectives(device, rank)
            check_asynchrony(device)
            check_ddp(device, rank)
            check_dtensor_and_fsdp(device, rank)
            races = laggard.take_races()
            assert not races, races[0].report
            check_missing_wait(device)
    dist.barrier()
    torch.accelerator.synchronize()
    check_shutdown(device, rank, store + "-2")
    check_failure(device)
    dist.destroy_process_group()


@pytest.mark.timeout(120)
def test_two_processes_train_through_the_devices_own_backend(tmp_path: Path):
    mp.spawn(worker, (str(tmp_path / "store"), ["1", "lazy"]), nprocs=2)
