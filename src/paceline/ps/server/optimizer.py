"""The user's own torch optimizer on the pieces of a shard.

A piece that is a whole parameter has the parameter's shape, so that optimizers that look at rows
and columns work; a cut one is flat. The kernels are those that the script's settings choose
(`foreach`, `fused` or neither), which makes the result equal to the bit with one process's.
Gradients are views of what was pushed; nothing is copied.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.errors import ShapeMismatch, UsageError
from paceline.ps.spec import OptimizerSpec, Piece

Settings = Sequence[Mapping[str, Any]]  # of each param group
_FUSED = ("SGD", "Adam", "AdamW", "Adagrad")  # those with kernels that trust their state
_REFUSED = {
    "LBFGS": "it evaluates the loss several times in a step, which only the worker can do",
    "SparseAdam": "servers take dense gradients",
}


@dataclass(frozen=True)
class StateEntry:
    """One value that the optimizer remembers about a piece.

    A tensor of the piece's shape is the piece's part of one of the parameter's shape; anything
    else, such as the number of steps, is the same for all pieces of a parameter.
    """

    piece: int
    key: str
    value: torch.Tensor | float | int | bool


class PieceOptimizer:
    """Runs one optimizer over the pieces of one shard."""

    def __init__(self, spec: OptimizerSpec, pieces: Sequence[Piece], values: torch.Tensor) -> None:
        self._name = spec.name
        self._pieces = pieces
        self._params = [part(values, piece) for piece in pieces]
        self._groups = sorted({piece.group for piece in pieces})  # those that the shard has
        self._optimizer = _build(spec, self._param_groups(spec)) if pieces else None

    def step(
        self, grad: torch.Tensor, absent: Collection[int], settings: Settings, slowdown: float
    ) -> None:
        """Update the values; the learning rate is divided by `slowdown`."""
        if self._optimizer is None:
            return
        for param, piece in zip(self._params, self._pieces, strict=True):
            param.grad = None if piece.param in absent else part(grad, piece)
        try:
            for number, group in zip(self._groups, self._optimizer.param_groups, strict=True):
                group.update(_plain(settings[number]))
                if slowdown != 1.0:
                    group["lr"] /= slowdown
            self._optimizer.step()
        except Exception as error:  # whatever the class makes of the settings it was given
            raise UsageError(f"torch.optim.{self._name} failed in step(): {error}") from error
        finally:
            for param in self._params:
                param.grad = None  # the memory is the worker's

    def state(self) -> list[StateEntry]:
        """Return what the optimizer remembers, by piece."""
        if self._optimizer is None:
            return []
        return [
            StateEntry(number, key, value)
            for number, param in enumerate(self._params)
            for key, value in self._optimizer.state.get(param, {}).items()
            if value is not None
        ]

    def load_state(self, entries: Sequence[StateEntry]) -> None:
        """Replace all that the optimizer remembers; tensors are copied."""
        if self._optimizer is None:
            return
        numbers = _numbers_in_optimizer(self._pieces, self._groups)
        state: dict[int, dict[str, Any]] = {}
        for entry in entries:
            if not 0 <= entry.piece < len(numbers):
                raise UsageError(
                    f"the state has {entry.key!r} of piece {entry.piece}, but the shard has"
                    f" {len(numbers)} pieces; load a state of the same placement"
                )
            self._check_shape(entry)
            value = entry.value.clone() if isinstance(entry.value, torch.Tensor) else entry.value
            state.setdefault(numbers[entry.piece], {})[entry.key] = value
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _check_shape(self, entry: StateEntry) -> None:
        """Refuse what fused kernels would take for as many numbers as the parameter has."""
        if self._name not in _FUSED or not isinstance(entry.value, torch.Tensor):
            return
        piece, shape = self._pieces[entry.piece], tuple(entry.value.shape)
        is_counter = entry.key == "step" and entry.value.numel() == 1
        if not is_counter and (entry.key == "step" or shape != piece.shape):
            raise ShapeMismatch(
                f"the optimizer's state {entry.key!r} of {piece.name!r} has shape {list(shape)},"
                f" expected {list(piece.shape)}; load the state of the same model"
            )

    def _param_groups(self, spec: OptimizerSpec) -> list[dict[str, Any]]:
        groups = {n: {**_plain(spec.groups[n]), "params": []} for n in self._groups}
        for param, piece in zip(self._params, self._pieces, strict=True):
            groups[piece.group]["params"].append(param)
        return list(groups.values())


def part(flat: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Return a piece of a flat tensor, in its shape."""
    return flat.narrow(0, piece.start, piece.count).view(piece.shape)


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """Return the class of torch.optim of that name, if servers can run it."""
    if name in _REFUSED:
        raise UsageError(
            f"torch.optim.{name} cannot run on servers: {_REFUSED[name]}; use another optimizer,"
            " or --pace allreduce"
        )
    found = getattr(torch.optim, name, None)
    if not (inspect.isclass(found) and issubclass(found, torch.optim.Optimizer)) or (
        found is torch.optim.Optimizer
    ):
        raise UsageError(
            f"servers run the optimizers of torch.optim, and {name!r} is none of them; use one of"
            f" {', '.join(_names())}, or --pace allreduce, which runs any optimizer on the workers"
        )
    return found


def _names() -> list[str]:
    return sorted(
        name
        for name, found in vars(torch.optim).items()
        if inspect.isclass(found)
        and issubclass(found, torch.optim.Optimizer)
        and found is not torch.optim.Optimizer
        and name not in _REFUSED
    )


def _build(spec: OptimizerSpec, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    found = optimizer_class(spec.name)
    # Some choices, such as `fused`, are checked or prepared by the constructor only; a group's own
    # settings come before these.
    accepted = inspect.signature(found).parameters.keys() - {"params"}
    shared = accepted.intersection(*(group.keys() for group in groups))
    defaults = {key: groups[0][key] for key in shared}
    try:
        return found(groups, **defaults)
    except Exception as error:  # whatever the class makes of the settings it was given
        raise UsageError(f"torch.optim.{spec.name} refuses its settings: {error}") from error


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as the optimizer had them before they travelled: lists were tuples."""
    return {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in settings.items()
        if key != "params"
    }


def _numbers_in_optimizer(pieces: Sequence[Piece], groups: Sequence[int]) -> list[int]:
    """Return each piece's number in the optimizer's state_dict, which counts group by group."""
    order = sorted(range(len(pieces)), key=lambda number: groups.index(pieces[number].group))
    numbers = [0] * len(pieces)
    for position, number in enumerate(order):
        numbers[number] = position
    return numbers
