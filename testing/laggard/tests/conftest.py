"""Tests of the device itself. Each detector finds its bug, and is quiet on correct code."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import laggard

pytest_plugins = ["pytester"]


@pytest.fixture(autouse=True)
def nothing_left_over() -> Iterator[None]:
    """Start each test with empty streams and empty reports."""
    yield
    for index in range(torch.accelerator.device_count()):
        torch.accelerator.synchronize(index)
    laggard.take_races()
    laggard.take_synchronizations()
