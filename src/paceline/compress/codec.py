"""The interface of a codec, and the layout of the flat tensor that it compresses.

A CODEC encodes numbers in fewer bytes, and decodes such bytes of several workers into the mean of
their numbers. A codec from outside the package needs no more than this:

    class Half(Codec):
        def num_bytes(self, count): return 2 * count
        def compress(self, values, payload, draw): payload.view(torch.float16).copy_(values)
        def decode(self, payload, out): out.copy_(payload.view(torch.float16))

    paceline.extend.register_codec("half", Half)            # then use compress="half"

With error feedback, the difference between the values and the payload is kept in a RESIDUAL and
added to the values of the next step: nothing is lost, it is sent later. A REDUCTION (reduction.py)
is the compressed all-reduce of one flat tensor among the workers; a codec may define its own.

A LAYOUT lists the parts of a flat tensor that are compressed. Small tensors (biases, norms) are
sent uncompressed: they are few bytes, and compression hurts them most. Adjacent large tensors form
one SPAN, whose structure the codec does not see. Between two tensors are a few zeros, so that each
begins on a cache line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

import torch

from paceline.compress.kernels import Draw
from paceline.compress.registry import CODECS, CodecSpec
from paceline.errors import UsageError
from paceline.runtime.deprecation import RenamedMethods

if TYPE_CHECKING:
    from paceline.compress.packet import Packet
    from paceline.compress.reduction import CompressedReduction

Allocate = Callable[[int, torch.dtype], torch.Tensor]


class Segment(Protocol):
    """One tensor within a flat tensor."""

    @property
    def start(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def shape(self) -> torch.Size: ...


@dataclass(frozen=True)
class Span:
    """A range of elements."""

    start: int
    count: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this range of a flat tensor, as a view."""
        return flat[self.start : self.start + self.count]


@dataclass(frozen=True)
class Layout:
    """The compressed and the uncompressed parts of one flat tensor."""

    size: int
    first: int  # index of its first element in the whole model
    large: tuple[Span, ...]
    small: tuple[Span, ...]
    matrices: tuple[tuple[Span, torch.Size], ...]  # each large tensor with its shape

    @property
    def num_small(self) -> int:
        """The number of elements that are not compressed."""
        return sum(span.count for span in self.small)

    def pack_small(self, values: torch.Tensor, small: torch.Tensor) -> None:
        """Copy the uncompressed tensors to `small`, one after the other."""
        at = 0
        for span in self.small:
            small[at : at + span.count].copy_(span.of(values))
            at += span.count

    def unpack_small(self, small: torch.Tensor, out: torch.Tensor) -> None:
        """Copy the uncompressed tensors from `small` to their positions in `out`."""
        at = 0
        for span in self.small:
            span.of(out).copy_(small[at : at + span.count])
            at += span.count

    def wanted_size(self, values: torch.Tensor, residual: torch.Tensor) -> float:
        """Return the norm of values + residual of the compressed parts; 0 if it is not finite."""
        wanted = (span.of(values) + span.of(residual) for span in self.large)
        size = math.hypot(*(float(torch.linalg.vector_norm(part)) for part in wanted))
        return size if math.isfinite(size) else 0.0


def plan(segments: Sequence[Segment], size: int, first: int, min_elements: int) -> Layout:
    """Return the layout of a flat tensor. All workers compute the same one."""
    large: list[Span] = []
    small: list[Span] = []
    matrices: list[tuple[Span, torch.Size]] = []
    is_open = False  # the last tensor was a large one
    for segment in segments:
        span = Span(segment.start, segment.count)
        if segment.count < max(1, min_elements):
            small.append(span)
            is_open = False
            continue
        matrices.append((span, segment.shape))
        if is_open:
            last = large.pop()
            span = Span(last.start, span.start + span.count - last.start)
        large.append(span)
        is_open = True
    return Layout(size, first, tuple(large), tuple(small), tuple(matrices))


@dataclass(frozen=True)
class CodecContext:
    """What a reduction or a packet of this codec is made with."""

    layout: Layout
    allocate: Allocate
    rank: int  # of this worker, to seed its own random numbers
    is_elastic: bool = False  # an exchange may be repeated with other workers
    num_workers: int = 1  # for a packet; a reduction gets the group


class Codec(RenamedMethods, renamed={"squeeze": "compress", "journey": "reduction"}):
    """Base class of all codecs; float32 only. Main thread only."""

    def __init__(self, spec: CodecSpec) -> None:
        self.spec = spec
        self.has_feedback = spec.is_chosen("feedback")
        self.seed = int(spec.option("seed"))

    def num_bytes(self, count: int) -> int:
        """Return the size of the payload of this many numbers."""
        raise NotImplementedError

    def encode(
        self,
        values: torch.Tensor,
        payload: torch.Tensor,
        residual: torch.Tensor | None,
        draw: Draw,
    ) -> None:
        """Write values + residual to `payload` (uint8), and the encoding error to `residual`.

        The default implementation uses `compress` and `decode`.
        """
        wanted = values if residual is None else values + residual
        self.compress(wanted, payload, draw)
        if residual is not None:
            self.decode(payload, residual)
            torch.sub(wanted, residual, out=residual)
            # The receiver reports numbers that are not finite; they must not stay in the residual.
            residual.nan_to_num_(0.0, 0.0, 0.0)

    def compress(self, values: torch.Tensor, payload: torch.Tensor, draw: Draw) -> None:
        """Write values to `payload`."""
        raise NotImplementedError

    def decode(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        """Write the numbers of a payload to `out`."""
        self.mean([payload], out)

    def mean(self, payloads: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Write the mean of the numbers of several payloads to `out`."""
        self.decode(payloads[0], out)
        more = torch.empty_like(out)
        for payload in payloads[1:]:
            self.decode(payload, more)
            out.add_(more)
        if len(payloads) > 1:
            out.div_(len(payloads))

    def reduction(self, context: CodecContext) -> CompressedReduction:
        """Return the compressed all-reduce of one flat tensor; the default all-gathers payloads."""
        from paceline.compress.reduction import AllGatherReduction

        return AllGatherReduction(self, context)

    def packet(self, context: CodecContext) -> Packet:
        """Return the message to a server in place of one flat tensor."""
        from paceline.compress.packet import Packet

        return Packet(self, context)

    def find_problem(self, optimizer: torch.optim.Optimizer) -> str:
        """Return why this optimizer cannot be used with the codec; "" if it can."""
        del optimizer
        return ""


def make_codec(spec: CodecSpec) -> Codec:
    """Create the codec of a spec."""
    make = CODECS[spec.name].make
    if isinstance(make, str):
        module, _, name = make.partition(":")
        make = getattr(import_module(module), name, object)
    if not (isinstance(make, type) and issubclass(make, Codec)):
        raise UsageError(
            f"codec {spec}: {CODECS[spec.name].make!r} is not a Codec; register a subclass of"
            " paceline.extend.Codec"
        )
    return make(spec)
