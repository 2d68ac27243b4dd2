"""The codecs by name: their numbers and options, their classes, and how their text is parsed.

    int8        topk:0.01+int8        dgc:0.001(momentum=0.9, warmup=500)

The text of a codec is its name, and optionally a number, options in parentheses, and a codec for
its values. It is checked completely here, so that a typo is reported before any process starts.
`register` adds a codec from outside the package. The command line imports this module, so it does
not import torch: the class of a codec is imported when the codec is used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from paceline.errors import UsageError
from paceline.options.grammar import (
    ABOVE_0,
    COUNT,
    FROM_0,
    SHARE,
    WHOLE,
    Number,
    Option,
    Text,
    near,
    number_text,
    read_options,
)

_SEED = Option("seed", COUNT, "seed of the random numbers", 0)
_KEPT = "keep the compression error, and add it to the values of the next step"
_YES, _NO = Option("feedback", ("yes", "no"), _KEPT), Option("feedback", ("no", "yes"), _KEPT)


def _min(elements: int) -> Option:
    return Option("min", COUNT, "tensors with fewer elements are sent uncompressed", elements)


_FEEDBACK = (_YES, _min(1024), _SEED)
_UNCORRECTED = (_NO, _min(1024), _SEED)
_ROUNDED = (_NO, _min(0), _SEED)


@dataclass(frozen=True)
class CodecEntry:
    """A codec: its class, and the number and options that its text may have."""

    make: str | type = ""  # a class, or its location: "module:Class"
    options: tuple[Option, ...] = ()
    number: str = ""  # meaning of the number after the colon; "" if there is none
    kind: Number = COUNT
    default: str = ""
    has_values: bool = False  # sends selected values, which another codec after + may encode
    no_servers: str = ""  # why it cannot be used with parameter servers
    only_gradients: str = ""  # why it cannot be used to average models

    def option(self, name: str) -> Option | None:
        """Return an option; None if it has none of that name."""
        return next((option for option in self.options if option.name == name), None)


_TWO_ROUNDS = "it needs two averages in a row over all workers"
_SCALES = Option(
    "scales",
    ("own", "shared"),
    "`shared`: the workers agree on the scales first, and the ring sums bytes",
)
_DEEP = (
    Option("momentum", FROM_0, "momentum that each worker keeps; 0: none", 0.9),
    Option("warmup", COUNT, "the first steps, which send more, in five stages", 500),
    Option("clip", ABOVE_0, "bound of the norm of a worker's gradient", otherwise="no bound"),
    _min(1024),
    _SEED,
)
_RATE = Option("rate", ABOVE_0, "compress only matrices that become this many times smaller", 2)
_SAME_INDICES = "all workers must choose the same indices in every step"

CODECS: dict[str, CodecEntry] = {
    "auto": CodecEntry(),  # none; between hosts, for models that compute in 16 bits, those 16 bits
    "none": CodecEntry(),
    "fp16": CodecEntry("paceline.compress.quantizers:BlockCodec", _ROUNDED),
    "bf16": CodecEntry("paceline.compress.quantizers:BlockCodec", _ROUNDED),
    "int8": CodecEntry("paceline.compress.quantizers:BlockCodec", (*_UNCORRECTED, _SCALES)),
    "int4": CodecEntry("paceline.compress.quantizers:BlockCodec", _UNCORRECTED),
    "onebit": CodecEntry("paceline.compress.quantizers:BlockCodec", _FEEDBACK),
    "topk": CodecEntry(
        "paceline.compress.sparsifiers:TopK",
        _FEEDBACK,
        number="the fraction of values",
        kind=SHARE,
        default="0.01",
        has_values=True,
    ),
    "randomk": CodecEntry(
        "paceline.compress.sparsifiers:RandomK",
        _FEEDBACK,
        number="the fraction of values",
        kind=SHARE,
        default="0.01",
        no_servers=_SAME_INDICES,
    ),
    "dgc": CodecEntry(
        "paceline.compress.dgc:DeepGradient",
        _DEEP,
        number="the fraction of values",
        kind=SHARE,
        default="0.001",
        has_values=True,
        only_gradients="its momentum is for gradients; use topk",
    ),
    "powersgd": CodecEntry(
        "paceline.compress.powersgd:PowerSGD",
        (*_FEEDBACK, _RATE),
        number="the rank",
        kind=WHOLE,
        default="1",
        no_servers=_TWO_ROUNDS,
    ),
}

VALUE_CODECS = ("fp16", "bf16", "int8")  # those that may follow a +


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

    `make` is a subclass of `Codec`, or its location: "module:Class". `options` are the codec's own
    options; every codec also has `feedback` (here: whether it is on by default), `min` and `seed`.
    `number`, `kind` and `default` describe a number after the colon, as in `topk:0.01`.
    """
    if not name.isidentifier():
        raise UsageError(f"the name of a codec must be one word of letters, not {name[:40]!r}")
    common = (_YES if feedback else _NO, _min(min_elements), _SEED)
    entry = CodecEntry(make, (*options, *common), number, kind, default)
    if name in CODECS and CODECS[name] != entry:
        raise UsageError(f"there is a codec {name} already; choose another name")
    CODECS[name] = entry


_FORM = re.compile(r"([^:()+]*)(?::([^()+]*))?(?:\(([^()]*)\))?(?:\+(.*))?")


@dataclass(frozen=True)
class CodecSpec:
    """A parsed codec; `str()` returns its canonical text."""

    name: str
    number: float | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    values: str = ""  # the codec of its values

    def __str__(self) -> str:
        number = "" if self.number is None else f":{number_text(self.number)}"
        options = ",".join(f"{key}={value}" for key, value in sorted(self.options.items()))
        more = f"+{self.values}" if self.values else ""
        return f"{self.name}{number}" + (f"({options})" if options else "") + more

    @property
    def entry(self) -> CodecEntry:
        """The registered codec."""
        return CODECS[self.name]

    @property
    def why_no_servers(self) -> str:
        """Why parameter servers cannot decode its payloads; "" if they can."""
        why = self.entry.no_servers
        if not isinstance(self.entry.make, str) or not self.entry.make.startswith("paceline."):
            why = "servers do not run the script that registers it"
        if self.options.get("scales") == "shared":
            why = "only workers agree on shared scales; leave out scales=shared"
        return f"it cannot be used with parameter servers: {why}" if why else ""

    @property
    def is_on(self) -> bool:
        """Whether it compresses."""
        return self.name not in ("auto", "none")

    @property
    def value(self) -> float:
        """The number after the colon, or its default."""
        return float(self.number if self.number is not None else self.entry.default)

    def text(self, name: str) -> str:
        """Return an option as text; "" if there is none of that name, or it has no value."""
        option = self.entry.option(name)
        default = None if option is None else option.default_text
        return self.options.get(name, default or "")

    def option(self, name: str) -> float:
        """Return a numeric option; 0 if there is none of that name, or it has no value."""
        return float(self.text(name) or 0.0)

    def is_chosen(self, name: str) -> bool:
        """Return whether a yes-or-no option is yes."""
        return self.text(name) == "yes"

    @property
    def min_elements(self) -> int:
        """Tensors with fewer elements are not compressed."""
        return int(self.option("min"))


def parse_codec(text: object) -> CodecSpec:
    """Parse a codec; raise UsageError with one line about what is wrong and what to write.

    >>> str(parse_codec("topk: 0.010 + int8"))
    'topk:0.01+int8'
    """
    found = _FORM.fullmatch(text.strip()) if isinstance(text, str) else None
    if found is None:
        raise _error(text, "write name, name:number, name(option=value) or name+name")
    name, number, options, values = (part.strip() if part else part for part in found.groups())
    if name not in CODECS:
        raise _error(
            text, f"there is no such codec{near(name, CODECS)}; there are: {', '.join(CODECS)}"
        )
    entry = CODECS[name]
    return CodecSpec(
        name,
        None if number is None else _read_number(text, name, entry, number),
        {} if options is None else _read_options(text, name, entry, options),
        "" if values is None else _read_values(text, name, entry, values),
    )


def _read_number(text: object, name: str, entry: CodecEntry, number: str) -> float:
    if not entry.number:
        raise _error(text, f"{name} takes no number; leave out {':' + number[:40]!r}")
    value = entry.kind.read(number)
    if value is None:
        raise _error(
            text,
            f"{entry.number} must be {entry.kind.words} (got {number[:40]!r}); write for example"
            f" {name}:{entry.default}",
        )
    return value


def _read_options(text: object, name: str, entry: CodecEntry, options: str) -> dict[str, str]:
    return read_options(options.split(","), name, entry.options, partial(_error, text))


def _read_values(text: object, name: str, entry: CodecEntry, values: str) -> str:
    if not entry.has_values:
        able = ", ".join(other for other, each in CODECS.items() if each.has_values)
        raise _error(
            text,
            f"{name} sends no selected values that +{values[:40]} could encode;"
            f" those that do: {able}",
        )
    if values not in VALUE_CODECS:
        raise _error(
            text,
            f"+{values[:40]}{near(values, VALUE_CODECS)}: values can be {', '.join(VALUE_CODECS)}",
        )
    return values


def _error(text: object, why: str) -> UsageError:
    shown = repr(text) if len(repr(text)) <= 80 else repr(text)[:77] + "..."
    return UsageError(f"codec {shown}: {why}")


# The kind of option of a pace whose value is a codec.
CODEC = Text("auto", lambda text: str(parse_codec(text)))
