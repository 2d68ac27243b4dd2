"""The codecs that there are: their words, what may follow them, and what makes them.

A codec turns a tensor into fewer bytes and back. One from outside the package is added with
`register`. No torch: the command line imports this; what makes a codec is imported where one is
used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.errors import UsageError
from paceline.grammar import ABOVE_0, COUNT, FROM_0, SHARE, WHOLE

# Stands for the allowed values of the options of a pace that are codecs; the first is the default.
CODEC = ("auto", "a codec such as int8 or topk:0.01")

_SMALL = {"min": COUNT, "seed": COUNT}
_FEEDBACK = {"feedback": ("yes", "no"), **_SMALL}
_UNCORRECTED = {"feedback": ("no", "yes"), **_SMALL}


@dataclass(frozen=True)
class Row:
    """What may follow the word of a codec, and what it is."""

    make: str | type = ""  # a class, or where it is: "module:Class"
    # Of each option the allowed values; the first is the default, or the kind of number.
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    number: str = ""  # what comes behind the colon, if something may
    kind: tuple[str, ...] = COUNT
    default: str = ""
    # Tensors with fewer elements stay as they are, unless `min` says another number.
    min_elements: int = 1024
    has_values: bool = False  # sends some values, for which another codec may be named behind +
    no_servers: str = ""  # why it cannot go through servers
    only_gradients: str = ""  # why it cannot be used on models that are brought together


_TWO_ROUNDS = "it needs two averages, one after the other, of all workers at once"
_SAME_PLACES = "all workers must choose the same places, whatever servers apply in between"

CODECS: dict[str, Row] = {
    "auto": Row(),  # none; where models compute in 16 bits and hosts are apart, those 16 bits
    "none": Row(),
    "fp16": Row("paceline.compress.sliced:Blocks", _UNCORRECTED, min_elements=0),
    "bf16": Row("paceline.compress.sliced:Blocks", _UNCORRECTED, min_elements=0),
    "int8": Row("paceline.compress.sliced:Blocks", {**_UNCORRECTED, "scales": ("own", "shared")}),
    "int4": Row("paceline.compress.sliced:Blocks", _UNCORRECTED),
    "onebit": Row("paceline.compress.sliced:Blocks", _FEEDBACK),
    "topk": Row(
        "paceline.compress.chosen:TopK",
        _FEEDBACK,
        number="the fraction of values",
        kind=SHARE,
        default="0.01",
        has_values=True,
    ),
    "randomk": Row(
        "paceline.compress.chosen:RandomK",
        _FEEDBACK,
        number="the fraction of values",
        kind=SHARE,
        default="0.01",
        no_servers=_SAME_PLACES,
    ),
    "dgc": Row(
        "paceline.compress.dgc:DeepGradient",
        {"momentum": FROM_0, "warmup": COUNT, "clip": ABOVE_0, **_SMALL},
        number="the fraction of values",
        kind=SHARE,
        default="0.001",
        has_values=True,
        only_gradients="its momentum is one of gradients; use topk",
    ),
    "powersgd": Row(
        "paceline.compress.lowrank:PowerSGD",
        {**_FEEDBACK, "rate": ABOVE_0},
        number="the rank",
        kind=WHOLE,
        default="1",
        no_servers=_TWO_ROUNDS,
    ),
}

VALUE_CODECS = ("fp16", "bf16", "int8")  # those that may stand behind +


def register(name: str, make: type | str, **more: object) -> None:
    """Add a codec, before the first `distribute` that uses it.

    `make` is a subclass of `paceline.compress.codec.Codec`, or where it is: "module:Class".
    """
    if not name.isidentifier():
        raise UsageError(f"the name of a codec is one word of letters, not {name[:40]!r}")
    row = Row(make, **{"options": _FEEDBACK, **more})  # type: ignore[arg-type]
    if name in CODECS and CODECS[name] != row:
        raise UsageError(f"there is a codec {name} already; choose another word")
    CODECS[name] = row
