"""The codecs that there are: their words, what may follow them, and what makes them.

A codec turns a tensor into fewer bytes and back. One from outside the package is added with
`register`. No torch: the command line imports this; what makes a codec is imported where one is
used.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import UsageError
from paceline.options.grammar import ABOVE_0, COUNT, FROM_0, SHARE, WHOLE, Number, Option

_SEED = Option("seed", COUNT, "of what is drawn by chance", 0)
_KEPT = "keep what is left out, and add it to what is sent next"
_YES, _NO = Option("feedback", ("yes", "no"), _KEPT), Option("feedback", ("no", "yes"), _KEPT)


def _min(elements: int) -> Option:
    return Option("min", COUNT, "tensors with fewer elements travel as they are", elements)


_FEEDBACK = (_YES, _min(1024), _SEED)
_UNCORRECTED = (_NO, _min(1024), _SEED)
_ROUNDED = (_NO, _min(0), _SEED)


@dataclass(frozen=True)
class Row:
    """What may follow the word of a codec, and what it is."""

    make: str | type = ""  # a class, or where it is: "module:Class"
    options: tuple[Option, ...] = ()
    number: str = ""  # what comes after the colon, if something may
    kind: Number = COUNT
    default: str = ""
    has_values: bool = False  # sends some values, for which another codec may be named behind +
    no_servers: str = ""  # why it cannot go through servers
    only_gradients: str = ""  # why it cannot be used on models that are brought together

    def option(self, name: str) -> Option | None:
        """Return an option; None: it has none of that name."""
        return next((option for option in self.options if option.name == name), None)


_TWO_ROUNDS = "it needs two averages, one after the other, of all workers at once"
_SCALES = Option(
    "scales",
    ("own", "shared"),
    "`shared`: the workers agree on the scales first, and the ring adds up bytes",
)
_DEEP = (
    Option("momentum", FROM_0, "what each worker keeps of the last gradients; 0: nothing", 0.9),
    Option("warmup", COUNT, "so many steps send more at first, in five stages", 500),
    Option("clip", ABOVE_0, "bounds the norm of a worker's gradient", otherwise="no bound"),
    _min(1024),
    _SEED,
)
_RATE = Option("rate", ABOVE_0, "matrices that do not become so many times smaller stay whole", 2)
_SAME_PLACES = "all workers must choose the same places, whatever servers apply in between"

CODECS: dict[str, Row] = {
    "auto": Row(),  # none; where models compute in 16 bits and hosts are apart, those 16 bits
    "none": Row(),
    "fp16": Row("paceline.compress.sliced:Blocks", _ROUNDED),
    "bf16": Row("paceline.compress.sliced:Blocks", _ROUNDED),
    "int8": Row("paceline.compress.sliced:Blocks", (*_UNCORRECTED, _SCALES)),
    "int4": Row("paceline.compress.sliced:Blocks", _UNCORRECTED),
    "onebit": Row("paceline.compress.sliced:Blocks", _FEEDBACK),
    "topk": Row(
        "paceline.compress.sparsifiers:TopK",
        _FEEDBACK,
        number="the fraction of values",
        kind=SHARE,
        default="0.01",
        has_values=True,
    ),
    "randomk": Row(
        "paceline.compress.sparsifiers:RandomK",
        _FEEDBACK,
        number="the fraction of values",
        kind=SHARE,
        default="0.01",
        no_servers=_SAME_PLACES,
    ),
    "dgc": Row(
        "paceline.compress.dgc:DeepGradient",
        _DEEP,
        number="the fraction of values",
        kind=SHARE,
        default="0.001",
        has_values=True,
        only_gradients="its momentum is one of gradients; use topk",
    ),
    "powersgd": Row(
        "paceline.compress.powersgd:PowerSGD",
        (*_FEEDBACK, _RATE),
        number="the rank",
        kind=WHOLE,
        default="1",
        no_servers=_TWO_ROUNDS,
    ),
}

VALUE_CODECS = ("fp16", "bf16", "int8")  # those that may stand behind +


def register(
    name: str,
    make: type | str,
    *,
    options: tuple[Option, ...] = (),
    feedback: bool = True,
    min_elements: int = 1024,
    number: str = "",
    kind: Number = COUNT,
    default: str = "",
) -> None:
    """Add a codec, before the first `distribute` that uses it.

    `make` is a subclass of `Codec`, or where it is: "module:Class". `options` are its own; every
    codec has `feedback` (whether it is on by default), `min` and `seed` besides. `number`, `kind`
    and `default` are about a number after the colon, as in `topk:0.01`.
    """
    if not name.isidentifier():
        raise UsageError(f"the name of a codec is one word of letters, not {name[:40]!r}")
    common = (_YES if feedback else _NO, _min(min_elements), _SEED)
    row = Row(make, (*options, *common), number, kind, default)
    if name in CODECS and CODECS[name] != row:
        raise UsageError(f"there is a codec {name} already; choose another word")
    CODECS[name] = row
