"""The public names for writing your own paces and codecs.

A PACE is a subclass of `Method`, registered with its number and options:

    class Mine(Method):
        ...
    register_pace("mine", Pace(method=Mine, options=(Option("size", WHOLE, "how many", 4),)))
    pl.distribute(model, optimizer, pace="mine[size=8]")

A CODEC is a subclass of `Codec`, registered with its options:

    class Half(Codec):
        ...
    register_codec("half", Half)
    pl.distribute(model, optimizer, compress="half")

To use a pace from the command line, put it into a package with an entry point of the group
`paceline.paces`. examples/own_pace.py and examples/own_codec.py are complete examples.
"""

from __future__ import annotations

from typing import Any

from paceline.comm.group import Group
from paceline.compress.codec import Codec, CodecContext, Layout, Segment, Span
from paceline.compress.kernels import Draw
from paceline.compress.packet import Packet
from paceline.compress.reduction import CompressedReduction
from paceline.compress.registry import CodecSpec
from paceline.compress.registry import register as register_codec
from paceline.options.grammar import ABOVE_0, COUNT, FROM_0, SHARE, WHOLE, Number, Option
from paceline.pace.exchange import Bucket, Exchange, ExchangeTraits
from paceline.pace.method import Method, Setting
from paceline.pace.parse import PaceSpec
from paceline.pace.registry import Pace
from paceline.pace.registry import register as register_pace
from paceline.runtime.deprecation import warn_renamed
from paceline.runtime.work import Work
from paceline.state.protocol import Change, Part, State

__all__ = [
    "ABOVE_0",
    "COUNT",
    "FROM_0",
    "SHARE",
    "WHOLE",
    "Bucket",
    "Change",
    "Codec",
    "CodecSpec",
    "Draw",
    "Exchange",
    "ExchangeTraits",
    "CodecContext",
    "Group",
    "CompressedReduction",
    "Layout",
    "Method",
    "Number",
    "Option",
    "Pace",
    "PaceSpec",
    "Packet",
    "Part",
    "Segment",
    "Setting",
    "Span",
    "State",
    "Work",
    "register_codec",
    "register_pace",
]

_RENAMED = {"Ground": "CodecContext", "Journey": "CompressedReduction"}


def __getattr__(name: str) -> Any:
    """Return what an old name stands for, with a DeprecationWarning."""
    if name in _RENAMED:
        warn_renamed(f"paceline.extend.{name}", _RENAMED[name])
        return globals()[_RENAMED[name]]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
