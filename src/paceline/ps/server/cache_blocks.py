"""The optimizer of a shard, grain by grain, so that an update stays in the cache.

An update reads the gradient and changes the values; then somebody wants the values, and often there
is more than one pass over them (momentum, Adam). Done on a whole shard, each pass goes to memory
and back. A GRAIN is a part of the shard that fits into the cache: all of its passes are done
before the next grain's turn.

Large updates are shared out among a few threads, grain by grain.

Only optimizers that treat every element by itself are cut, and not their fused kernels, whose
results depend on where a vector begins.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch

from paceline.errors import UsageError
from paceline.ps.placement import ELEMENTWISE
from paceline.ps.server.optimizer import PieceOptimizer, Settings, StateEntry
from paceline.ps.spec import OptimizerSpec, Piece

_GRAIN_BYTES = 4 << 20  # of values; smaller ones spend more on calls than they save

OnDone = Callable[[int, int], None]  # elements from, to

_helpers: list[ThreadPoolExecutor] = []  # one thread each; see use_threads


def use_threads(count: int) -> None:
    """Let large updates of this process be computed by so many threads, the caller's among them.

    Grains do not touch each other, so the result is the same to the bit. Memory, not arithmetic, is
    what an update waits for, and one core does not use all of its bandwidth.
    """
    while len(_helpers) > max(count - 1, 0):
        _helpers.pop().shutdown()
    while len(_helpers) < count - 1:
        _helpers.append(ThreadPoolExecutor(1, thread_name_prefix="paceline-grain"))


@dataclass(frozen=True)
class _Grain:
    start: int
    stop: int
    numbers: Sequence[int]  # of its pieces, in the shard
    pieces: Sequence[Piece]  # as the grain has them
    optimizer: PieceOptimizer


class GrainedOptimizer:
    """Runs the user's optimizer over the pieces of one shard."""

    def __init__(self, spec: OptimizerSpec, pieces: Sequence[Piece], values: torch.Tensor) -> None:
        self._pieces = pieces
        self._grains: list[_Grain] = []
        for start, stop in _cut(spec, values):
            held = [(n, _part(p, start, stop)) for n, p in enumerate(pieces)]
            mine = [(number, part) for number, part in held if part is not None]
            parts = [part for _, part in mine]
            optimizer = PieceOptimizer(spec, parts, values[start:stop])
            self._grains.append(_Grain(start, stop, [n for n, _ in mine], parts, optimizer))

    def step(
        self,
        grad: torch.Tensor,
        absent: Collection[int],
        settings: Settings,
        slowdown: float,
        on_done: OnDone | None = None,
    ) -> None:
        """Update the values; `on_done` is called for each part as soon as it is ready."""

        def run(grains: Sequence[_Grain]) -> None:
            for grain in grains:
                part = grad[grain.start : grain.stop]
                grain.optimizer.step(part, absent, settings, slowdown)
                if on_done is not None:
                    on_done(grain.start, grain.stop)

        helpers = _helpers if len(self._grains) > 1 else []
        stripes = [self._grains[n :: len(helpers) + 1] for n in range(len(helpers) + 1)]
        others = [helper.submit(run, s) for helper, s in zip(helpers, stripes[1:], strict=True)]
        try:
            run(stripes[0])
        finally:
            wait(others)  # nobody may still write when the step has ended, also if it failed
        for other in others:
            other.result()

    def state(self) -> list[StateEntry]:
        """Return what the optimizer remembers, by piece of the shard."""
        found: dict[tuple[int, str], list[Any]] = defaultdict(list)
        for grain in self._grains:
            for entry in grain.optimizer.state():
                found[grain.numbers[entry.piece], entry.key].append(entry.value)
        return [
            StateEntry(number, key, self._join(self._pieces[number], values))
            for (number, key), values in sorted(found.items(), key=lambda item: item[0])
        ]

    def outline(self) -> list[StateEntry]:
        """Return what the optimizer remembers, without the numbers: large tensors are empty."""
        found: dict[tuple[int, str], Any] = {}
        for grain in self._grains:
            for entry in grain.optimizer.state():
                number, value = grain.numbers[entry.piece], entry.value
                if isinstance(value, torch.Tensor) and value.numel() > 1:
                    is_cut = value.shape == torch.Size(grain.pieces[entry.piece].shape)
                    shape = torch.Size(self._pieces[number].shape) if is_cut else value.shape
                    value = torch.empty((), dtype=value.dtype).expand(shape)
                found.setdefault((number, entry.key), value)
        return [StateEntry(*key, found[key]) for key in sorted(found)]

    def numbers(self, start: int, stop: int) -> list[torch.Tensor]:
        """Return what the optimizer remembers about a range of elements, where it lies.

        What does not belong to single elements goes with the first element of its piece.
        """
        found = []
        for grain in self._grains:
            if grain.stop <= start or stop <= grain.start:
                continue
            for entry in sorted(grain.optimizer.state(), key=lambda one: (one.piece, one.key)):
                piece, value = grain.pieces[entry.piece], entry.value
                if not isinstance(value, torch.Tensor) or (value.dim() == 0 and piece.shape):
                    continue
                flat, base = value.view(-1), grain.start + piece.start
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
        for grain in self._grains:
            mine = []
            for index, (number, part) in enumerate(zip(grain.numbers, grain.pieces, strict=True)):
                piece = self._pieces[number]
                first = max(grain.start - piece.start, 0)
                for entry in entries:
                    if entry.piece == number:
                        value = _cut_value(entry.value, piece, first, part)
                        mine.append(StateEntry(index, entry.key, value))
            grain.optimizer.load_state(mine)

    @staticmethod
    def _join(piece: Piece, values: Sequence[Any]) -> Any:
        """Put the grains' parts of one entry together."""
        first = values[0]
        if len(values) == 1 or not isinstance(first, torch.Tensor) or first.dim() == 0:
            return first
        return torch.cat([value.reshape(-1) for value in values]).view(piece.shape)


def _cut(spec: OptimizerSpec, values: torch.Tensor) -> Iterator[tuple[int, int]]:
    count, most = values.numel(), _GRAIN_BYTES // values.element_size()
    is_fused = any(group.get("fused") for group in spec.groups)
    if spec.name not in ELEMENTWISE or is_fused or count <= most:
        most = max(count, 1)
    for start in range(0, max(count, 1), most):
        yield start, min(start + most, count)


def _part(piece: Piece, start: int, stop: int) -> Piece | None:
    """Return what a range has of a piece, in places of the range."""
    first, last = max(piece.start, start), min(piece.start + piece.count, stop)
    if first >= last and not (piece.count == 0 and start <= piece.start <= stop and start == 0):
        return None
    shape = piece.shape if last - first == piece.count else (last - first,)
    return Piece(piece.name, piece.param, piece.group, first - start, max(last - first, 0), shape)


def _cut_value(value: Any, piece: Piece, first: int, part: Piece) -> Any:
    """Return a grain's part of one entry of a piece's state."""
    is_cut = isinstance(value, torch.Tensor) and value.shape == torch.Size(piece.shape)
    if not is_cut or part.count == piece.count:
        return value
    return value.reshape(-1)[first : first + part.count]
