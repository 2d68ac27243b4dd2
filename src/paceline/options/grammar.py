"""The types of options of paces, servers and codecs, and how their text is parsed.

An OPTION is declared once, with its name, its kind, its default and one line of help. Parsing
("key=value"), errors for wrong values, the lists of `paceline paces` and the tables in the guides
follow from the declaration. Options are declared in options/table.py, pace/registry.py and
compress/registry.py.

The command line imports this module, so it does not import torch.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

_NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?(e[+-]?[0-9]+)?")


@dataclass(frozen=True)
class Number:
    """A kind of number, 0 or more; `words` describes it in messages."""

    words: str
    has_zero: bool = False
    is_whole: bool = False
    most: float = math.inf

    def has(self, value: float) -> bool:
        """Return whether a number is of this kind."""
        if not 0 <= value <= self.most or math.isinf(value):
            return False
        return (value > 0 or self.has_zero) and (not self.is_whole or value == int(value))

    def read(self, text: str) -> float | None:
        """Return the number of a text, or None if it is not of this kind."""
        value = float(text) if _NUMBER.fullmatch(text) else math.inf
        return value if self.has(value) else None


@dataclass(frozen=True)
class Text:
    """A text with its own grammar; `read` returns its canonical form, or raises UsageError."""

    default: str
    read: Callable[[object], str]


ABOVE_0 = Number("a number above 0")
FROM_0 = Number("a number, 0 or more", has_zero=True)
WHOLE = Number("a whole number above 0", is_whole=True)
COUNT = Number("a whole number, 0 or more", has_zero=True, is_whole=True)
SHARE = Number("a number above 0, up to 1", most=1)

Kind: TypeAlias = Number | Text | tuple[str, ...]  # a tuple: one of its values; default: the first


@dataclass(frozen=True)
class Option:
    """An option of a pace or a codec: `name=value`."""

    name: str
    kind: Kind
    help: str  # one line; Markdown
    default: float | None = None  # of a number; None: none, or what `otherwise` describes
    otherwise: str = ""  # description of a default that is not a value

    @property
    def default_text(self) -> str | None:
        """The default as text; None if there is none."""
        if isinstance(self.kind, Number):
            return None if self.default is None else number_text(self.default)
        return self.kind.default if isinstance(self.kind, Text) else self.kind[0]

    def read(self, text: str, wrong: Callable[[str], Exception]) -> str:
        """Return the canonical form of a value; `wrong` creates the error if it is not allowed."""
        if isinstance(self.kind, Text):
            return self.kind.read(text)
        if isinstance(self.kind, Number):
            number = self.kind.read(text)
            if number is None:
                raise wrong(
                    f"{self.name}={text[:40]!r}: expected {self.kind.words}, such as {self.name}=1"
                )
            return number_text(number)
        if text not in self.kind:
            hint = near(text, self.kind)
            raise wrong(f"{self.name}={text[:40]!r}{hint}; allowed: {', '.join(self.kind)}")
        return text

    def find_problem(self, value: object) -> str:
        """Return why a Python value is not allowed, or ""; a Text raises its own error."""
        if isinstance(self.kind, Text):
            self.kind.read(value)
            return ""
        if isinstance(self.kind, Number):
            is_fine = isinstance(value, int | float) and self.kind.has(value)
            return "" if is_fine else f"{self.name}={value!r:.80} must be {self.kind.words}"
        if value in self.kind:
            return ""
        hint, choices = near(str(value), self.kind), ", ".join(self.kind)
        return f"{self.name}={value!r:.80} is unknown{hint}; choose one of {choices}"

    def value_of(self, text: str) -> str | float:
        """Return the value of a text in canonical form: a number, or the text itself."""
        if isinstance(self.kind, Number):
            return int(float(text)) if self.kind.is_whole else float(text)
        return text


def number_text(value: float) -> str:
    """Return the canonical text of a number: 8, not 8.0."""
    return str(int(value)) if value == int(value) and value < 1e15 else repr(float(value))


def read_options(
    items: Iterable[str], name: str, options: Iterable[Option], wrong: Callable[[str], Exception]
) -> dict[str, str]:
    """Parse "key=value" for each item; `wrong` creates the error for what is not allowed."""
    known = {option.name: option for option in options}
    found: dict[str, str] = {}
    for item in items:
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not key:
            raise wrong(f"expected option=value, found {item.strip()[:40]!r}")
        if key not in known:
            raise wrong(
                f"{name} has no option {key[:40]!r}{near(key, known)}; its options:"
                f" {', '.join(known) or 'none'}"
            )
        if key in found:
            raise wrong(f"option {key} is given twice")
        found[key] = known[key].read(value, wrong)
    return found


def near(word: str, words: Iterable[str]) -> str:
    """Return " (did you mean ...?)" with the closest of `words`; "" if none is close."""
    found = difflib.get_close_matches(word[:40].lower(), list(words), n=1)
    return f" (did you mean {found[0]}?)" if found else ""
