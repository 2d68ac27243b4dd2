"""The group of the device's own backend: it is left only after what is in flight."""

from __future__ import annotations

import torch
from torch.distributed import FileStore

from paceline.comm.device_group import DeviceGroup
from support.devices import load_device, run_on_device


def test_a_group_is_left_after_its_collectives(schedule, tmp_path):
    def body(world, path: str) -> list[float]:
        import paceline as pl

        store = FileStore(path, 2)
        group = DeviceGroup("lagcomm", pl.device(), store, (0, 1), world.rank, 30)
        x = torch.full((3000,), world.rank + 1.0, device=pl.device())
        group.all_reduce(x)  # nobody waits for it
        group.close()  # the backend refuses to be shut down under a collective
        group.close()
        return x[:2].tolist()

    path = str(tmp_path / "store")
    assert run_on_device(2, body, path, schedule=schedule) == [[3.0, 3.0]] * 2


def test_a_link_is_tried_before_it_is_used(schedule, tmp_path):
    def body(world, path: str) -> list[float]:
        import paceline as pl

        here, laggard = pl.device(), load_device()
        laggard.take_synchronizations()
        store = FileStore(path, 2)
        link = DeviceGroup("lagcomm", here, store, (0, 1), world.rank, 30, is_link=True)
        waits = laggard.take_synchronizations()
        assert waits and all("_try_link" in wait.stack for wait in waits)
        x = torch.full((3000,), world.rank + 5.0, device=here)
        (link.receive if world.rank else link.send)(x).wait()
        link.close()
        return x[:2].tolist()

    path = str(tmp_path / "store")
    assert run_on_device(2, body, path, schedule=schedule) == [[5.0, 5.0]] * 2
