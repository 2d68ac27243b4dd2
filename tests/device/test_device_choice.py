"""`pl.init()` chooses the device of each worker; refusals name ranks and what to do."""

from __future__ import annotations

import torch

from paceline.errors import ConfigError
from support.devices import device_outcomes, run_on_device


def devices_here(world):
    import paceline as pl

    here = torch.accelerator.current_device_index()
    return str(pl.device()), here, str(torch.empty(1, device="laggard").device)


def test_every_worker_has_a_device_of_its_own():
    found = run_on_device(2, devices_here, schedule="lazy")
    assert found == [("laggard:0", 0, "laggard:0"), ("laggard:1", 1, "laggard:1")]


def test_named_devices_may_be_shared_and_the_cpu_may_be_chosen():
    named = {"PACELINE_DEVICES": "laggard:1,1,0"}
    found = run_on_device(3, devices_here, schedule="lazy", env=named)
    assert [name for name, _, _ in found] == ["laggard:1", "laggard:1", "laggard:0"]
    on_cpu = run_on_device(3, devices_here, schedule="lazy", env={"PACELINE_DEVICES": "cpu"})
    assert [name for name, _, _ in on_cpu] == ["cpu"] * 3


def test_more_workers_than_devices_are_refused_on_every_worker():
    outcomes = device_outcomes(3, devices_here, schedule="lazy")
    for outcome in outcomes:
        assert isinstance(outcome.error, ConfigError)
        assert "3 workers on this host for 2 laggard devices" in str(outcome.error)
        assert "--devices laggard:0,1,0 lets workers share one" in str(outcome.error)


def test_workers_that_were_shown_the_same_device_are_refused():
    shown = {"CUDA_VISIBLE_DEVICES": "0"}  # a variable that hides devices from each process
    outcomes = device_outcomes(3, devices_here, schedule="lazy", env=shown)
    for outcome in outcomes:
        assert isinstance(outcome.error, ConfigError)
        assert "ranks 0 and 2 have the same device, laggard:0" in str(outcome.error)
