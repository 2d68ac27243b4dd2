"""The group of the device's own backend: it is left only after what is in flight."""

from __future__ import annotations

import torch
from torch.distributed import FileStore

from paceline.comm.device_group import DeviceGroup
from support.devices import run_on_device


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
