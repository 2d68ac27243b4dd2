"""What a worker that comes later must have of a training: the part of one model.

Parameters, the buffers that all agreed on last, the optimizer's state and settings, and the number
of steps done. With parameter servers the first and the third are theirs; a newcomer reads them
there.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from paceline.data_parallel.buffers import Buffers
from paceline.errors import InconsistentRanks
from paceline.job import Job
from paceline.state.protocol import Change, State

_NO_SETTINGS = ("params", "param_names")


class TrainingState:
    """The state of one distributed model, as a newcomer receives it."""

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        buffers: Buffers,
        is_local: bool,
    ) -> None:
        self._job = job
        self._model = weakref.ref(model)
        self._optimizer = weakref.ref(optimizer)
        self._buffers = buffers
        self._is_local = is_local  # parameters and optimizer are the workers' own

    def state(self) -> State:
        """Return everything, as it was after the last step that all agreed on."""
        model, optimizer = self._both()
        shared: dict[str, Any] = {
            "buffers": self._buffers.agreed,
            "settings": settings_of(optimizer),
        }
        if self._is_local:
            shared["params"] = {name: p.detach() for name, p in model.named_parameters()}
            shared["optimizer"] = optimizer.state_dict()["state"]
        what = f"the optimizer {type(optimizer).__name__}"
        return State(counts=self._job.steps_done, shared=shared, what=what)

    def load(self, state: State, change: Change | None) -> None:  # noqa: ARG002
        """Take over everything."""
        model, optimizer = self._both()
        if state.shared["buffers"].numel():
            self._buffers.adopt(state.shared["buffers"])
        if self._is_local:
            _load_params(dict(model.named_parameters()), state.shared["params"])
            groups = zip(state.shared["settings"], _numbered(optimizer), strict=True)
            numbered = [{**settings, "params": numbers} for settings, numbers in groups]
            told = {"state": state.shared["optimizer"], "param_groups": numbered}
            optimizer.load_state_dict(told)
        else:
            give_settings(optimizer, state.shared["settings"])
        self._job.reporter.steps_done = state.counts

    def _both(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        model, optimizer = self._model(), self._optimizer()
        assert model is not None and optimizer is not None, "a worker that is asked is in training"
        return model, optimizer

    def resume(self, change: Change) -> None:
        """Nothing is left to do: the groups follow by themselves."""


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the settings of each param group: all but its parameters."""
    return [{k: v for k, v in g.items() if k not in _NO_SETTINGS} for g in optimizer.param_groups]


def give_settings(optimizer: torch.optim.Optimizer, settings: Sequence[Mapping[str, Any]]) -> None:
    """Let the param groups have these settings."""
    for group, mine in zip(optimizer.param_groups, settings, strict=True):
        group.update(mine)


def _numbered(optimizer: torch.optim.Optimizer) -> Iterator[list[int]]:
    """Yield the parameters of each group as numbers, as `state_dict()` counts them."""
    first = 0
    for group in optimizer.param_groups:
        yield list(range(first, first + len(group["params"])))
        first += len(group["params"])


def _load_params(mine: dict[str, nn.Parameter], theirs: dict[str, torch.Tensor]) -> None:
    here = [[name, list(param.shape)] for name, param in mine.items()]
    there = [[name, list(value.shape)] for name, value in theirs.items()]
    if here != there:
        raise _difference(here, there)
    with torch.no_grad():
        for name, value in theirs.items():
            mine[name].copy_(value)


def _difference(mine: list[Any], theirs: list[Any]) -> InconsistentRanks:
    pairs = [(a, b) for a, b in zip(mine, theirs, strict=False) if a != b]
    here, there = pairs[0] if pairs else (f"{len(mine)} parameters", f"{len(theirs)}")
    return InconsistentRanks(
        f"a newcomer has built another model than the job trains: {here} here, {there} there;"
        " start it with the same script and arguments",
        name=str(here),
    )
