"""The user's own torch optimizer on a shard, one cache block at a time.

A PIECE is what a shard has of one parameter. A piece that is a whole parameter has the parameter's
shape, so that optimizers that use rows and columns work; a piece that was cut is flat. The kernels
are those that the script's settings choose (`foreach`, `fused` or neither), which makes the result
equal to the bit with one process's. Gradients are views of what was pushed; nothing is copied.

An update reads the gradient and changes the values, often in more than one pass (momentum, Adam);
then a worker wants the values. On a whole shard each pass goes to memory and back. A CACHE BLOCK is
a part of the shard that fits into the cache: all of its passes are done before the next block's
turn. Blocks of large updates are shared out among a few threads. Only optimizers that treat every
element by itself are cut into blocks, and not their fused kernels, whose results depend on where a
vector begins.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch

from paceline.errors import ShapeMismatch, UsageError
from paceline.ps.placement import ELEMENTWISE
from paceline.ps.spec import OptimizerSpec, ShardPiece

Settings = Sequence[Mapping[str, Any]]  # of each param group
_FUSED = ("SGD", "Adam", "AdamW", "Adagrad")  # those with kernels that trust their state
_REFUSED = {
    "LBFGS": "it evaluates the loss several times in a step, which only the worker can do",
    "SparseAdam": "servers take dense gradients",
}
# Bytes of values in a block; smaller ones spend more on calls than they save. SGD makes few passes.
# All copies of a shard have the same blocks, so nothing else may decide.
_BLOCK_BYTES, _SGD_BLOCK_BYTES = 1 << 20, 4 << 20

OnDone = Callable[[int, int], None]  # elements from, to

_helpers: list[ThreadPoolExecutor] = []  # one thread each; see use_threads


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

    def __init__(
        self, spec: OptimizerSpec, pieces: Sequence[ShardPiece], values: torch.Tensor
    ) -> None:
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

    def move(self, values: torch.Tensor) -> None:
        """Update these values from now on, which are the same."""
        for param, piece in zip(self._params, self._pieces, strict=True):
            param.data = part(values, piece)

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


def part(flat: torch.Tensor, piece: ShardPiece) -> torch.Tensor:
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


def _numbers_in_optimizer(pieces: Sequence[ShardPiece], groups: Sequence[int]) -> list[int]:
    """Return each piece's number in the optimizer's state_dict, which counts group by group."""
    order = sorted(range(len(pieces)), key=lambda number: groups.index(pieces[number].group))
    numbers = [0] * len(pieces)
    for position, number in enumerate(order):
        numbers[number] = position
    return numbers


def use_threads(count: int) -> None:
    """Let large updates of this process be computed by so many threads, the caller's among them.

    Grains do not touch each other, so the result is the same to the bit. Memory, not arithmetic, is
    what an update waits for, and one core does not use all of its bandwidth.
    """
    while len(_helpers) > max(count - 1, 0):
        _helpers.pop().shutdown()
    while len(_helpers) < count - 1:
        _helpers.append(ThreadPoolExecutor(1, thread_name_prefix="paceline-block"))


@dataclass(frozen=True)
class _Block:
    start: int
    stop: int
    numbers: Sequence[int]  # of its pieces, in the shard
    pieces: Sequence[ShardPiece]  # as the block has them
    optimizer: PieceOptimizer


class ShardOptimizer:
    """Runs the user's optimizer over the pieces of one shard."""

    def __init__(
        self, spec: OptimizerSpec, pieces: Sequence[ShardPiece], values: torch.Tensor
    ) -> None:
        self._pieces = pieces
        self._blocks: list[_Block] = []
        for start, stop in _cut(spec, values):
            held = [(n, _part(p, start, stop)) for n, p in enumerate(pieces)]
            mine = [(number, part) for number, part in held if part is not None]
            parts = [part for _, part in mine]
            optimizer = PieceOptimizer(spec, parts, values[start:stop])
            self._blocks.append(_Block(start, stop, [n for n, _ in mine], parts, optimizer))

    def step(
        self,
        grad: torch.Tensor,
        absent: Collection[int],
        settings: Settings,
        slowdown: float,
        on_done: OnDone | None = None,
    ) -> None:
        """Update the values; `on_done` is called for each part as soon as it is ready."""

        def run(blocks: Sequence[_Block]) -> None:
            for block in blocks:
                part = grad[block.start : block.stop]
                block.optimizer.step(part, absent, settings, slowdown)
                if on_done is not None:
                    on_done(block.start, block.stop)

        helpers = _helpers if len(self._blocks) > 1 else []
        stripes = [self._blocks[n :: len(helpers) + 1] for n in range(len(helpers) + 1)]
        others = [helper.submit(run, s) for helper, s in zip(helpers, stripes[1:], strict=True)]
        try:
            run(stripes[0])
        finally:
            wait(others)  # no thread may still write when the step has ended, even if it failed
        for other in others:
            other.result()

    def move(self, values: torch.Tensor) -> None:
        """Update these values from now on, which are the same."""
        for block in self._blocks:
            block.optimizer.move(values[block.start : block.stop])

    def state(self) -> list[StateEntry]:
        """Return what the optimizer remembers, by piece of the shard."""
        found: dict[tuple[int, str], list[Any]] = defaultdict(list)
        for block in self._blocks:
            for entry in block.optimizer.state():
                found[block.numbers[entry.piece], entry.key].append(entry.value)
        return [
            StateEntry(number, key, self._join(self._pieces[number], values))
            for (number, key), values in sorted(found.items(), key=lambda item: item[0])
        ]

    def outline(self) -> list[StateEntry]:
        """Return what the optimizer remembers, without the numbers: large tensors are empty."""
        found: dict[tuple[int, str], Any] = {}
        for block in self._blocks:
            for entry in block.optimizer.state():
                number, value = block.numbers[entry.piece], entry.value
                if isinstance(value, torch.Tensor) and value.numel() > 1:
                    is_cut = value.shape == torch.Size(block.pieces[entry.piece].shape)
                    shape = torch.Size(self._pieces[number].shape) if is_cut else value.shape
                    value = torch.empty((), dtype=value.dtype).expand(shape)
                found.setdefault((number, entry.key), value)
        return [StateEntry(*key, found[key]) for key in sorted(found)]

    def numbers(self, start: int, stop: int) -> list[torch.Tensor]:
        """Return what the optimizer remembers about a range of elements, where it lies.

        What does not belong to single elements goes with the first element of its piece.
        """
        found = []
        for block in self._blocks:
            if block.stop <= start or stop <= block.start:
                continue
            for entry in sorted(block.optimizer.state(), key=lambda one: (one.piece, one.key)):
                piece, value = block.pieces[entry.piece], entry.value
                if not isinstance(value, torch.Tensor) or (value.dim() == 0 and piece.shape):
                    continue
                flat, base = value.view(-1), block.start + piece.start
                if value.shape == torch.Size(piece.shape):
                    first, last = max(start, base), min(stop, base + piece.count)
                    if first < last:
                        found.append(flat[first - base : last - base])
                elif start <= base < stop:
                    found.append(flat)
        return found

    def load_state(self, entries: Sequence[StateEntry]) -> None:
        """Replace all that the optimizer remembers; tensors are copied."""
        for entry in entries:
            if not 0 <= entry.piece < len(self._pieces):
                raise UsageError(
                    f"the state has {entry.key!r} of piece {entry.piece}, but the shard has"
                    f" {len(self._pieces)} pieces; load a state of the same placement"
                )
        for block in self._blocks:
            mine = []
            for index, (number, part) in enumerate(zip(block.numbers, block.pieces, strict=True)):
                piece = self._pieces[number]
                first = max(block.start - piece.start, 0)
                for entry in entries:
                    if entry.piece == number:
                        value = _cut_value(entry.value, piece, first, part)
                        mine.append(StateEntry(index, entry.key, value))
            block.optimizer.load_state(mine)

    @staticmethod
    def _join(piece: ShardPiece, values: Sequence[Any]) -> Any:
        """Put the blocks' parts of one entry together."""
        first = values[0]
        if len(values) == 1 or not isinstance(first, torch.Tensor) or first.dim() == 0:
            return first
        return torch.cat([value.reshape(-1) for value in values]).view(piece.shape)


def _cut(spec: OptimizerSpec, values: torch.Tensor) -> Iterator[tuple[int, int]]:
    size = _SGD_BLOCK_BYTES if spec.name == "SGD" else _BLOCK_BYTES
    count, most = values.numel(), size // values.element_size()
    is_fused = any(group.get("fused") for group in spec.groups)
    if spec.name not in ELEMENTWISE or is_fused or count <= most:
        most = max(count, 1)
    for start in range(0, max(count, 1), most):
        yield start, min(start + most, count)


def _part(piece: ShardPiece, start: int, stop: int) -> ShardPiece | None:
    """Return what a range has of a piece, in places of the range."""
    first, last = max(piece.start, start), min(piece.start + piece.count, stop)
    if first >= last and not (piece.count == 0 and start <= piece.start <= stop and start == 0):
        return None
    shape = piece.shape if last - first == piece.count else (last - first,)
    return ShardPiece(
        piece.name, piece.param, piece.group, first - start, max(last - first, 0), shape
    )


def _cut_value(value: Any, piece: ShardPiece, first: int, part: ShardPiece) -> Any:
    """Return a block's part of one entry of a piece's state."""
    is_cut = isinstance(value, torch.Tensor) and value.shape == torch.Size(piece.shape)
    if not is_cut or part.count == piece.count:
        return value
    return value.reshape(-1)[first : first + part.count]
