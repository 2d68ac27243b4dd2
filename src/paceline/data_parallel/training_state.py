"""What a worker that comes later must have of a training: the participant of one model.

Parameters, the buffers that all agreed on last, the optimizer's state and settings, and the number
of steps done. With parameter servers the first and the third are theirs; a newcomer reads them
there.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from paceline.data_parallel.buffers import Buffers
from paceline.elastic.plain import put_together, take_apart
from paceline.elastic.protocol import Change, Parcel
from paceline.errors import InconsistentRanks
from paceline.job import Job


class TrainingState:
    """Packs and unpacks the state of one distributed model."""

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

    def tell(self) -> None:
        """Nothing has to be known before the change is decided."""

    def pack(self) -> Parcel:
        """Return everything, as it was after the last step that all agreed on."""
        model, optimizer = self._model(), self._optimizer()
        assert model is not None and optimizer is not None, "whoever packs is in training"
        named = list(model.named_parameters()) if self._is_local else []
        state: dict[str, Any] = {"steps": self._job.steps_done, "settings": _settings(optimizer)}
        if self._is_local:
            state["optimizer"] = optimizer.state_dict()["state"]
        plain, tensors = take_apart(state, f"the optimizer {type(optimizer).__name__}")
        shapes = [[name, list(param.shape)] for name, param in named]
        values = [param.detach() for _, param in named]
        return [plain, shapes], [self._buffers.agreed, *values, *tensors]

    def unpack(self, plain: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Take over everything."""
        model, optimizer = self._model(), self._optimizer()
        assert model is not None and optimizer is not None, "whoever unpacks is in training"
        told, shapes = plain
        params = dict(model.named_parameters()) if self._is_local else {}
        mine = [[name, list(param.shape)] for name, param in params.items()]
        if mine != shapes:
            raise _difference(mine, shapes)
        if tensors[0].numel():
            self._buffers.adopt(tensors[0])
        count = len(shapes)
        with torch.no_grad():
            for (name, _), value in zip(shapes, tensors[1 : 1 + count], strict=True):
                params[name].copy_(value)
        state = put_together(told, tensors[1 + count :])
        groups = [
            {**settings, "params": group["params"]}
            for settings, group in zip(state["settings"], _packed_groups(optimizer), strict=True)
        ]
        if self._is_local:
            loaded = {"state": state["optimizer"], "param_groups": groups}
            optimizer.load_state_dict(loaded)
        else:
            for group, settings in zip(optimizer.param_groups, state["settings"], strict=True):
                group.update(settings)
        self._job.reporter.steps_done = state["steps"]

    def resume(self, change: Change) -> None:
        """Nothing is left to do: the groups follow by themselves."""


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    names = ("params", "param_names")
    return [{k: v for k, v in g.items() if k not in names} for g in optimizer.param_groups]


def _packed_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Number the parameters as `state_dict()` does."""
    groups, first = [], 0
    for group in optimizer.param_groups:
        groups.append({"params": list(range(first, first + len(group["params"])))})
        first += len(group["params"])
    return groups


def _difference(mine: list[Any], theirs: list[Any]) -> InconsistentRanks:
    pairs = [(a, b) for a, b in zip(mine, theirs, strict=False) if a != b]
    here, there = pairs[0] if pairs else (f"{len(mine)} parameters", f"{len(theirs)}")
    return InconsistentRanks(
        f"a newcomer has built another model than the job trains: {here} here, {there} there;"
        " start it with the same script and arguments",
        name=str(here),
    )
