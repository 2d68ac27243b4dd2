"""Ways to run one training script: plainly, by all-reduce, or through parameter servers.

A SCRIPT is a function of a `Way`. It builds a model and an optimizer, has them distributed, trains
with its part of each batch and returns everything that must not depend on the way: parameters,
buffers, gradients, losses, the optimizer's state. `require_equal` compares two results to the bit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import torch
from torch import nn

import paceline as pl
from paceline.comm.group import Group
from paceline.observe.telemetry.staleness import TableReport
from paceline.pace.parse import parse
from paceline.pace.registry import KNOWN
from paceline.ps import messages as m
from paceline.runtime import job
from support.reference import bits

Result = dict[str, Any]


class Way:
    """One way to train, on one rank."""

    def __init__(self, group: Group, pace: str, **options: Any) -> None:
        self.group = group
        self.pace = pace
        self._options = options

    def __str__(self) -> str:
        return f"{self.pace} {self._options}"

    def distribute(self, model: nn.Module, optimizer: torch.optim.Optimizer, **more: Any) -> None:
        """Hand a model over, with those of the options that the pace has; `plain` leaves it."""
        if self.pace != "plain":
            kinds = {one.name: one.kind for one in KNOWN[parse(self.pace).name].options}
            words = {key: kind for key, kind in kinds.items() if isinstance(kind, tuple)}
            asked = {key: value for key, value in more.items() if value in words.get(key, ())}
            pl.distribute(model, optimizer, pace=self.pace, **{**self._options, **asked})

    def settle(self, model: nn.Module) -> None:
        """Called before a script touches parameters: with wait=layer they may be on their way."""
        if self._options.get("wait") == "layer":
            model.pull()

    def mine(self, batch: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of a batch, or all of them."""
        if self.pace == "plain":
            return batch
        return batch.chunk(self.group.size)[self.group.rank]


Script = Callable[[Way], Result]

# They write through `.data`, which servers notice on the CPU only (docs/guides/devices.md).
UNSEEN_ON_DEVICE = ("clip_behind_autograd", "clamped_parameters", "decayed_before_the_step")
# A loss on the CPU has a scale there, and torch reads it with the device's flags without a wait.
SCALED_ON_CPU = ("grad_scaler",)


def applicable(scripts: Mapping[str, Script]) -> dict[str, Script]:
    """Return the scripts that give the same bits through servers where the models are."""
    is_there = "TEST_ON_DEVICE" in os.environ
    left_out = (*UNSEEN_ON_DEVICE, *SCALED_ON_CPU) if is_there else ()
    return {name: script for name, script in scripts.items() if name not in left_out}


def result_of(model: nn.Module, optimizer: torch.optim.Optimizer, **more: Any) -> Result:
    """Return copies of all that a script has trained."""
    found: Result = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **more}
    return {name: _copy(value) for name, value in leaves(found)}


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def leaves(thing: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Take containers apart, down to tensors and plain values."""
    if isinstance(thing, Mapping):
        parts: Any = thing.items()
    elif isinstance(thing, list | tuple):
        parts = enumerate(thing)
    else:
        yield name, thing
        return
    for key, part in parts:
        yield from leaves(part, f"{name}/{key}")


def require_equal(found: Result, expected: Result, what: object) -> None:
    """Assert that two results have the same names, shapes, dtypes and bits."""
    assert found.keys() == expected.keys(), (
        f"{what}: only one has {sorted(found.keys() ^ expected.keys())[:8]}"
    )
    for name, value in expected.items():
        other = found[name]
        if not isinstance(value, torch.Tensor):
            assert other == value, f"{what}: {name} is {other!r}, expected {value!r}"
            continue
        kinds = [(tuple(t.shape), t.dtype, t.stride()) for t in (other, value)]
        assert kinds[0] == kinds[1], f"{what}: {name} is {kinds[0]}, expected {kinds[1]}"
        assert bits(other) == bits(value), (
            f"{what}: {name} differs by up to {(other - value).abs().max()}"
        )


def grads_of(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return copies of the gradients that the script sees."""
    return {name: _copy(param.grad) for name, param in model.named_parameters()}


def noise(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the same numbers wherever they are asked for."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=random, dtype=torch.float64).to(dtype)


def centre_reports(number: int | None = None) -> list[TableReport]:
    """Ask every server what it has counted about places of a method; None: of the last one."""
    found = []
    for link in job.current().servers:
        reports = [msgspec.convert(r, TableReport) for r in link.ask(m.Stats).wait().reports]
        found += [report for report in reports if report.table.startswith("centre ")]
    last = max(int(report.table.split()[1].partition(".")[0]) for report in found)
    start = f"centre {last if number is None else number}."
    return [report for report in found if report.table.startswith(start)]


def newest_reports() -> list[TableReport]:
    """Ask every server what it has counted about the table that was made last."""
    found = []
    for link in job.current().servers:
        reports = [msgspec.convert(r, TableReport) for r in link.ask(m.Stats).wait().reports]
        if reports:  # small tables are on one server only
            found.append(max(reports, key=lambda report: float(report.table.split()[1])))
    return found
