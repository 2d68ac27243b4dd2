"""Wire: tensors between neighbouring stages, with word of what they are.

The first message of a step between two stages is preceded by a HEADER that says how many tensors
there are, with dtypes and shapes, as plain integers; so batches may change from step to step. Later
microbatches of the step are like the first. The header also has the number of rows and microbatches
of the sender's batch: stages that were given different batches find out here.

On the way back a header says which gradients there are: where nothing depends on a tensor there is
none, as in one process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.errors import InconsistentRanks, UsageError
from paceline.model_parallel.pipeline.stage import Crossing
from paceline.observe.telemetry.trace import Stopwatch

_HEADER = 1024  # integers: enough for a hundred tensors or more
_MOST_TENSORS = 256  # of one stage for the next, so that each has a tag
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}


@dataclass(frozen=True)
class Like:
    """What a tensor on the wire looks like."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    needs_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Like:
        return cls(tensor.dtype, tuple(tensor.shape), tensor.requires_grad)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True)
class Batch:
    """What stages compare, to be sure that they work on the same batch."""

    rows: int
    microbatches: int


def encode(likes: Sequence[Like], *numbers: int) -> Tensor:
    """Write down numbers and tensors' looks as integers."""
    words = [*numbers, len(likes)]
    for like in likes:
        words += (_CODES[like.dtype], int(like.needs_grad), len(like.shape), *like.shape)
    if len(words) > _HEADER or len(likes) > _MOST_TENSORS:
        raise UsageError(
            f"{len(likes)} tensors cross from one stage to the next, too many to describe in one"
            f" message; cut the model where fewer are needed behind the cut"
        )
    return torch.tensor(words + [0] * (_HEADER - len(words)))


def blank() -> Tensor:
    """Return room for an encoded header."""
    return torch.empty(_HEADER, dtype=torch.int64)


def decode(header: Tensor, count: int) -> tuple[list[int], list[Like]]:
    """Read `count` numbers, and the looks of tensors."""
    words = header.tolist()
    numbers, position, likes = words[:count], count + 1, []
    for _ in range(words[count]):
        code, needs_grad, num_dims = words[position : position + 3]
        position += 3
        shape = tuple(words[position : position + num_dims])
        position += num_dims
        likes.append(Like(DTYPES[code], shape, bool(needs_grad)))
    return numbers, likes


class Wire:
    """Sends and receives for one process; asynchronous, in any order of the microbatches."""

    def __init__(self, group: Any, owners: Sequence[int]) -> None:
        self.waiting = Stopwatch()  # for neighbours, with nothing else to do
        self._group = group
        self._owners = owners
        self._rank: int = group.rank()
        self._sent: deque[Any] = deque()  # holds on to the tensors

    def is_local(self, stage: int) -> bool:
        """Whether this process holds a stage."""
        return self._owners[stage] == self._rank

    def send(self, tensors: Sequence[Tensor], source: int, target: int, microbatch: int) -> None:
        """Send tensors from a stage to a neighbour; they must not change before `flush`."""
        rank = self._owners[target]
        while self._sent and self._sent[0].is_completed():
            self._sent.popleft().wait()  # raises its error, if it has one
        for number, tensor in enumerate(tensors):
            if tensor.numel():
                tag = _tag(source, target, microbatch, number)
                self._sent.append(self._group.send([tensor.contiguous()], rank, tag))

    def send_header(self, header: Tensor, source: int, target: int, microbatch: int) -> None:
        """Send word of what follows."""
        tag = _tag(source, target, microbatch, _MOST_TENSORS)
        self._sent.append(self._group.send([header], self._owners[target], tag))

    def receive_header(self, header: Tensor, source: int, target: int, microbatch: int) -> Tensor:
        """Wait for word of what follows."""
        tag = _tag(source, target, microbatch, _MOST_TENSORS)
        with self.waiting:
            self._group.recv([header], self._owners[source], tag).wait()
        return header

    def begin(self, likes: Sequence[Like], source: int, target: int, microbatch: int) -> Arrival:
        """Begin to receive tensors that a neighbour sends."""
        tensors, works = [], []
        for number, like in enumerate(likes):
            tensor = torch.empty(like.shape, dtype=like.dtype)
            tensors.append(tensor)
            if tensor.numel():
                tag = _tag(source, target, microbatch, number)
                works.append(self._group.recv([tensor], self._owners[source], tag))
        return Arrival(tensors, works)

    def flush(self) -> None:
        """Wait until everything that was sent has been taken."""
        with self.waiting:
            while self._sent:
                self._sent.popleft().wait()


@dataclass
class Arrival:
    """Tensors that are being received."""

    tensors: list[Tensor]
    works: list[Any]

    def is_there(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def wait(self) -> list[Tensor]:
        for work in self.works:
            work.wait()
        return self.tensors


def check_alike(expected: Sequence[Like], tensors: Sequence[Tensor], stage: int) -> None:
    """Refuse outputs that look otherwise than those of the first microbatch."""
    found = [Like.of(tensor) for tensor in tensors]
    if found != list(expected):
        raise UsageError(
            f"stage {stage}: outputs of one microbatch are {', '.join(map(str, expected))}, of"
            f" another {', '.join(map(str, found))}; microbatches of a batch must have outputs"
            " of the same shapes, so shapes cannot depend on the values of the data"
        )


def check_batch(own: Batch, other: Batch, stage: int) -> None:
    """Refuse another batch than the one that this process was given."""
    if own != other:
        raise InconsistentRanks(
            f"pipeline: stage {stage} works on a batch of {own.rows} rows in"
            f" {own.microbatches} microbatches, the stage before it on {other.rows} rows in"
            f" {other.microbatches}; give all processes of a model the same batches"
        )


def crossings(likes: Sequence[Like], tensors: Sequence[Tensor]) -> list[Crossing]:
    return [Crossing(t, like.needs_grad) for t, like in zip(tensors, likes, strict=True)]


def _tag(source: int, target: int, microbatch: int, number: int) -> int:
    direction = int(target < source)
    return ((microbatch * 1024 + source) * 2 + direction) * 512 + number
