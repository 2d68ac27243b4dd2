"""StageTransport: sends tensors between neighbouring stages, with a header that describes them.

The first message of a step between two stages is preceded by a HEADER with the number of tensors,
their dtypes and shapes, as plain integers; so batches may change from step to step. Later
microbatches of the step have the same shapes. The header also has the number of rows and
microbatches of the sender's batch, so that stages with different batches notice that.

In backward the header lists which gradients exist: a tensor on which nothing depends has none, as
in one process.

Headers and tensors on the CPU are sent by the engine, with tags. A tensor on a device is sent by
the device's own backend, which has no tags: each direction between two stages has a link of its
own (stage_links.py), on which microbatches are sent and received in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.comm.device_group import DeviceGroup
from paceline.comm.devices import CPU, is_on_device
from paceline.errors import InconsistentRanks, UsageError
from paceline.model_parallel.pipeline.stage import StageTensor
from paceline.model_parallel.pipeline.stage_links import StageLinks
from paceline.observe.telemetry.trace import Stopwatch

_HEADER = 1024  # integers: enough for a hundred tensors or more
_MOST_TENSORS = 256  # from one stage to the next, so that each has a tag
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}


@dataclass(frozen=True)
class TensorMeta:
    """Dtype and shape of a tensor that is sent."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    needs_grad: bool
    is_on_device: bool = False

    @classmethod
    def of(cls, tensor: Tensor) -> TensorMeta:
        is_there = is_on_device(tensor)
        return cls(tensor.dtype, tuple(tensor.shape), tensor.requires_grad, is_there)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True)
class BatchShape:
    """What stages compare, to be sure that they work on the same batch."""

    rows: int
    microbatches: int


def encode(metas: Sequence[TensorMeta], *numbers: int) -> Tensor:
    """Return numbers and the metadata of tensors as a header of integers."""
    header_values = [*numbers, len(metas)]
    for meta in metas:
        flags = meta.needs_grad + 2 * meta.is_on_device
        header_values += (_CODES[meta.dtype], flags, len(meta.shape), *meta.shape)
    if len(header_values) > _HEADER or len(metas) > _MOST_TENSORS:
        raise UsageError(
            f"{len(metas)} tensors cross from one stage to the next, too many for one header of"
            f" {_HEADER} integers; split the model where a stage needs fewer"
        )
    return torch.tensor(header_values + [0] * (_HEADER - len(header_values)))


def blank() -> Tensor:
    """Return an empty tensor for an encoded header."""
    return torch.empty(_HEADER, dtype=torch.int64)


def decode(header: Tensor, count: int) -> tuple[list[int], list[TensorMeta]]:
    """Return the first `count` numbers of a header, and the metadata of tensors."""
    header_values = header.tolist()
    numbers, position, metas = header_values[:count], count + 1, []
    for _ in range(header_values[count]):
        code, flags, num_dims = header_values[position : position + 3]
        position += 3
        shape = tuple(header_values[position : position + num_dims])
        position += num_dims
        metas.append(TensorMeta(DTYPES[code], shape, bool(flags & 1), bool(flags & 2)))
    return numbers, metas


class StageTransport:
    """Sends and receives for one process; asynchronous, in any order of the microbatches."""

    def __init__(
        self, group: Any, stage_ranks: Sequence[int], on_device: StageLinks | None = None
    ) -> None:
        self.waiting = Stopwatch()  # for neighbouring stages, while idle
        self._group, self._links = group, on_device
        self.device = CPU if on_device is None else on_device.device  # of the model
        self._owners = stage_ranks
        self._rank: int = group.rank()
        self._sent: deque[tuple[Any, Tensor]] = deque()  # with the tensors, to keep them alive

    def is_local(self, stage: int) -> bool:
        """Return whether this process holds a stage."""
        return self._owners[stage] == self._rank

    def send(self, tensors: Sequence[Tensor], source: int, target: int, microbatch: int) -> None:
        """Send tensors from a stage to a neighbour; they must not change before `flush`."""
        rank = self._owners[target]
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()[0].wait()  # raises its error, if it has one
        for number, tensor in enumerate(map(Tensor.contiguous, tensors)):
            if tensor.numel() and is_on_device(tensor):
                self._sent.append((self._link(source, target).send(tensor), tensor))
            elif tensor.numel():
                tag = _tag(source, target, microbatch, number)
                self._sent.append((self._group.send([tensor], rank, tag), tensor))

    def _link(self, source: int, target: int) -> DeviceGroup:
        assert self._links is not None, "tensors are on a device only if the model is"
        return self._links.between(source, target)

    def can_look_ahead(self) -> bool:
        """Return whether to wait for a tensor is to be idle: on a device the host is ahead."""
        return self._links is None

    def send_header(self, header: Tensor, source: int, target: int, microbatch: int) -> None:
        """Send a header."""
        tag = _tag(source, target, microbatch, _MOST_TENSORS)
        self._sent.append((self._group.send([header], self._owners[target], tag), header))

    def receive_header(self, header: Tensor, source: int, target: int, microbatch: int) -> Tensor:
        """Wait for a header."""
        tag = _tag(source, target, microbatch, _MOST_TENSORS)
        with self.waiting:
            self._group.recv([header], self._owners[source], tag).wait()
        return header

    def begin(
        self, metas: Sequence[TensorMeta], source: int, target: int, microbatch: int
    ) -> PendingReceive:
        """Start to receive tensors from a neighbouring stage."""
        tensors, works = [], []
        for number, meta in enumerate(metas):
            tensor = self.empty(meta)
            tensors.append(tensor)
            if tensor.numel() and meta.is_on_device:
                works.append(self._link(source, target).receive(tensor))
            elif tensor.numel():
                tag = _tag(source, target, microbatch, number)
                works.append(self._group.recv([tensor], self._owners[source], tag))
        return PendingReceive(tensors, works)

    def empty(self, meta: TensorMeta) -> Tensor:
        """Return a new tensor of this kind."""
        device = self.device if meta.is_on_device else CPU
        return torch.empty(meta.shape, dtype=meta.dtype, device=device)

    def flush(self) -> None:
        """Wait until all sends are complete; on a device, the current stream does."""
        with self.waiting:
            while self._sent:
                self._sent.popleft()[0].wait()


@dataclass
class PendingReceive:
    """Tensors that are being received."""

    tensors: list[Tensor]
    works: list[Any]

    def is_there(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def wait(self) -> list[Tensor]:
        for work in self.works:
            work.wait()
        return self.tensors


def check_metas(expected: Sequence[TensorMeta], tensors: Sequence[Tensor], stage: int) -> None:
    """Raise UsageError for outputs of other shapes than those of the first microbatch."""
    found = [TensorMeta.of(tensor) for tensor in tensors]
    if found != list(expected):
        raise UsageError(
            f"stage {stage}: outputs of one microbatch are {', '.join(map(str, expected))}, of"
            f" another {', '.join(map(str, found))}; microbatches of a batch must have outputs"
            " of the same shapes, so shapes cannot depend on the values of the data"
        )


def check_batch(own: BatchShape, other: BatchShape, stage: int) -> None:
    """Raise InconsistentRanks if the stage before works on another batch than this process."""
    if own != other:
        raise InconsistentRanks(
            f"pipeline: stage {stage} works on a batch of {own.rows} rows in"
            f" {own.microbatches} microbatches, the stage before it on {other.rows} rows in"
            f" {other.microbatches}; give all processes of a model the same batches"
        )


def stage_tensors(metas: Sequence[TensorMeta], tensors: Sequence[Tensor]) -> list[StageTensor]:
    return [StageTensor(t, meta.needs_grad) for t, meta in zip(tensors, metas, strict=True)]


def _tag(source: int, target: int, microbatch: int, number: int) -> int:
    direction = int(target < source)
    return ((microbatch * 1024 + source) * 2 + direction) * 512 + number
