"""The text of a codec: a word, perhaps a number, options in parentheses, a codec for its values.

    int8        topk:0.01+int8        dgc:0.001(momentum=0.9, warmup=500)

It is checked completely here, so that a typing error is answered before any process starts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from paceline.compress.registry import CODECS, VALUE_CODECS, Row
from paceline.errors import UsageError
from paceline.options.grammar import Text, near, number_text, read_options

_FORM = re.compile(r"([^:()+]*)(?::([^()+]*))?(?:\(([^()]*)\))?(?:\+(.*))?")


@dataclass(frozen=True)
class CodecSpec:
    """A codec that was asked for; `str()` gives its canonical text."""

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
    def row(self) -> Row:
        """What is known about it."""
        return CODECS[self.name]

    @property
    def why_no_servers(self) -> str:
        """Why parameter servers cannot read what it writes; "" if they can."""
        why = self.row.no_servers
        if not isinstance(self.row.make, str) or not self.row.make.startswith("paceline."):
            why = "they do not run the script that registers it"
        if self.options.get("scales") == "shared":
            why = "workers agree on shared scales among themselves; leave out scales=shared"
        return f"it cannot go through parameter servers: {why}" if why else ""

    @property
    def is_on(self) -> bool:
        """Whether it changes anything."""
        return self.name not in ("auto", "none")

    @property
    def value(self) -> float:
        """The number behind the colon, or its default."""
        return float(self.number if self.number is not None else self.row.default)

    def text(self, name: str) -> str:
        """Return an option as text; "": it has none of that name, or no value for it."""
        option = self.row.option(name)
        default = None if option is None else option.default_text
        return self.options.get(name, default or "")

    def option(self, name: str) -> float:
        """Return an option that is a number; 0: it has none of that name, or no value for it."""
        return float(self.text(name) or 0.0)

    def is_chosen(self, name: str) -> bool:
        """Return an option that is yes or no."""
        return self.text(name) == "yes"

    @property
    def min_elements(self) -> int:
        """Tensors with fewer of them stay as they are."""
        return int(self.option("min"))


def parse_codec(text: object) -> CodecSpec:
    """Read a codec; UsageError says in one line what is wrong with it and what would be right.

    >>> str(parse_codec("topk: 0.010 + int8"))
    'topk:0.01+int8'
    """
    found = _FORM.fullmatch(text.strip()) if isinstance(text, str) else None
    if found is None:
        raise _wrong(text, "write word, word:number, word(option=value) or word+word")
    name, number, options, values = (part.strip() if part else part for part in found.groups())
    if name not in CODECS:
        raise _wrong(text, f"there is no such codec{near(name, CODECS)}; there are: {_list()}")
    row = CODECS[name]
    return CodecSpec(
        name,
        None if number is None else _read_number(text, name, row, number),
        {} if options is None else _read_options(text, name, row, options),
        "" if values is None else _read_values(text, name, row, values),
    )


def _read_number(text: object, name: str, row: Row, number: str) -> float:
    if not row.number:
        raise _wrong(text, f"{name} takes no number; leave out {':' + number[:40]!r}")
    value = row.kind.read(number)
    if value is None:
        raise _wrong(
            text,
            f"{row.number} must be {row.kind.words} (got {number[:40]!r}); write for example"
            f" {name}:{row.default}",
        )
    return value


def _read_options(text: object, name: str, row: Row, options: str) -> dict[str, str]:
    return read_options(options.split(","), name, row.options, partial(_wrong, text))


def _read_values(text: object, name: str, row: Row, values: str) -> str:
    if not row.has_values:
        havers = ", ".join(word for word, each in CODECS.items() if each.has_values)
        raise _wrong(
            text,
            f"{name} sends no chosen values, for which +{values[:40]} could be;"
            f" those that do: {havers}",
        )
    if values not in VALUE_CODECS:
        raise _wrong(
            text,
            f"+{values[:40]}{near(values, VALUE_CODECS)}: values can be {', '.join(VALUE_CODECS)}",
        )
    return values


def _list() -> str:
    return ", ".join(CODECS)


def _wrong(text: object, why: str) -> UsageError:
    shown = repr(text) if len(repr(text)) <= 80 else repr(text)[:77] + "..."
    return UsageError(f"codec {shown}: {why}")


# The kind of the options of a pace that are codecs.
CODEC = Text("auto", lambda text: str(parse_codec(text)))
