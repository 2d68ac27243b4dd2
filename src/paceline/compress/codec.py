"""The seam between what travels and how: a codec, and the journey of one flat tensor.

A CODEC turns numbers into fewer bytes, and such bytes of several workers into the mean of their
numbers. That is all that one from outside the package has to do:

    class Half(Codec):
        def num_bytes(self, count): return 2 * count
        def squeeze(self, values, payload, draw): payload.view(torch.float16).copy_(values)
        def decode(self, payload, out): out.copy_(payload.view(torch.float16))

    paceline.extend.register_codec("half", Half)            # and then compress="half"

With a RESIDUAL (error feedback) what a payload leaves out is kept, and added to what is sent next:
nothing is lost, it comes later. A JOURNEY (journey.py) is what happens to one flat tensor between
the workers; a codec may bring one of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

import torch

from paceline.compress.kernels import Draw
from paceline.compress.layout import Layout
from paceline.compress.parse import CodecSpec
from paceline.compress.registry import CODECS
from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.compress.journey import Journey
    from paceline.compress.packet import Packet

Allocate = Callable[[int, torch.dtype], torch.Tensor]


@dataclass(frozen=True)
class Ground:
    """What a journey is given to work with."""

    layout: Layout
    allocate: Allocate
    rank: int  # this worker's place, for random numbers of its own
    is_elastic: bool = False  # an exchange may be repeated, with other workers
    num_workers: int = 1  # of a packet; a journey sees the group


class Codec:
    """Base of all codecs; float32 only. Main thread only."""

    def __init__(self, spec: CodecSpec) -> None:
        self.spec = spec
        self.has_feedback = spec.is_chosen("feedback")
        self.seed = int(spec.option("seed"))

    def num_bytes(self, count: int) -> int:
        """Return how many bytes so many numbers become."""
        raise NotImplementedError

    def encode(
        self,
        values: torch.Tensor,
        payload: torch.Tensor,
        residual: torch.Tensor | None,
        draw: Draw,
    ) -> None:
        """Write values + residual to `payload` (uint8), and to `residual` what that leaves out.

        The default does it with `squeeze` and `decode`.
        """
        wanted = values if residual is None else values + residual
        self.squeeze(wanted, payload, draw)
        if residual is not None:
            self.decode(payload, residual)
            torch.sub(wanted, residual, out=residual)
            # A number that is no number is reported by whoever receives it, and not kept.
            residual.nan_to_num_(0.0, 0.0, 0.0)

    def squeeze(self, values: torch.Tensor, payload: torch.Tensor, draw: Draw) -> None:
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

    def journey(self, ground: Ground) -> Journey:
        """Return how a flat tensor travels; by default everybody sends everything to everybody."""
        from paceline.compress.journey import Gathered

        return Gathered(self, ground)

    def packet(self, ground: Ground) -> Packet:
        """Return what a flat tensor becomes on its way to a server."""
        from paceline.compress.packet import Packet

        return Packet(self, ground)

    def find_problem(self, optimizer: torch.optim.Optimizer) -> str:
        """Say why this optimizer cannot be used with it; "" if it can."""
        del optimizer
        return ""


def make_codec(spec: CodecSpec) -> Codec:
    """Make the codec that a text describes."""
    make = CODECS[spec.name].make
    if isinstance(make, str):
        module, _, name = make.partition(":")
        make = getattr(import_module(module), name, object)
    if not (isinstance(make, type) and issubclass(make, Codec)):
        raise UsageError(f"codec {spec}: {CODECS[spec.name].make!r} is not a Codec")
    return make(spec)
