"""Which device a worker gets, on this machine and by name. The test device has tests of its own."""

from __future__ import annotations

import pytest
import torch

from paceline.comm.devices import (
    CPU,
    accelerator,
    choose_device,
    collective_backend,
    devices_of,
    is_on_device,
    is_started,
    memory_of,
    random_states,
    set_random_states,
)
from paceline.errors import ConfigError
from paceline.runtime.device_request import DeviceRequest, parse_devices


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("auto", DeviceRequest()),
        ("cpu", DeviceRequest("cpu")),
        ("xpu", DeviceRequest("xpu")),
        ("cuda:0,1", DeviceRequest("cuda", (0, 1))),
        ("cuda:3,cuda:3", DeviceRequest("cuda", (3, 3))),
    ],
)
def test_requests(text, parsed):
    assert parse_devices(text) == parsed
    assert parse_devices(str(parsed)) == parsed


@pytest.mark.parametrize(
    "text", ["", "cuda:", "cuda:x", "auto:0", "cpu:1", "0,1", "cuda:0;1", "-1"]
)
def test_anything_else_is_refused(text):
    with pytest.raises(ConfigError, match="expected auto, cpu, a type of device"):
        parse_devices(text)


@pytest.mark.skipif(accelerator() is not None, reason="this machine has an accelerator")
def test_without_an_accelerator_everything_is_on_the_cpu():
    assert choose_device(DeviceRequest(), local_rank=7, num_local=8) == CPU
    assert choose_device(DeviceRequest("cpu"), 0, 1) == CPU
    with pytest.raises(ConfigError, match="no accelerator that this PyTorch can use"):
        choose_device(DeviceRequest("cuda", (0,)), 0, 1)
    assert not is_started()
    assert random_states() == []
    assert not set_random_states([torch.zeros(1)])
    assert memory_of(CPU) is None
    assert collective_backend(CPU) is None


def test_tensors_of_the_cpu_and_without_memory_are_on_no_device():
    tensors = [torch.empty(1), torch.empty(1, device="meta")]
    assert not any(map(is_on_device, tensors))
    assert devices_of(tensors) == []
