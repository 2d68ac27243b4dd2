"""`paceline paces`: lists the paces and codecs from their registries."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator

from paceline.compress.registry import CODECS, CodecEntry
from paceline.errors import UsageError
from paceline.options.grammar import Number, Option, near
from paceline.pace.registry import KNOWN, Pace, find

_WIDTH = 100
_LINK = re.compile(r"\[([^]]+)]\([^)]*\)")  # of Markdown


def paces(word: str | None) -> int:
    """Print all paces and codecs with their options, or one; raises UsageError if unknown."""
    sys.stdout.write(listing(word))
    return 0


def listing(word: str | None = None) -> str:
    """Return the text that `paceline paces` prints."""
    if word is None:
        names = [name for name, row in KNOWN.items() if not row.stands_for]
        listed = [*names, *(name for name, row in CODECS.items() if row.make)]
    elif find(word) or word in CODECS:
        listed = [word]
    else:
        every = [*KNOWN, *CODECS]
        raise UsageError(
            f"unknown pace or codec {word[:40]!r}{near(word, every)}; expected one of"
            f" {', '.join(every)}"
        )
    rows = ((name, find(name) or CODECS[name]) for name in listed)
    return "".join("\n".join([*_about(name, row), "", ""]) for name, row in rows)


def _about(name: str, row: Pace | CodecEntry) -> Iterator[str]:
    title = f"{name}:{row.default}" if row.number else name
    notes = [row.number] if row.number else []
    if isinstance(row, Pace) and row.needs_servers:
        notes.append("needs servers")
    word = "pace" if isinstance(row, Pace) else "codec"
    yield f"{word} {title}" + (f" ({', '.join(notes)})" if notes else "")
    for option in row.options:
        yield f"  {option.name}={_values(option)}"
        yield textwrap.fill(
            _plain(option.help), _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6
        )


def _values(option: Option) -> str:
    kind, default = option.kind, _plain(option.otherwise) or option.default_text
    words = kind.words if isinstance(kind, Number) else "a codec"
    values = "|".join(kind) if isinstance(kind, tuple) else f"<{words}>"
    return values if default is None else f"{values}  (default: {default})"


def _plain(markdown: str) -> str:
    return _LINK.sub(r"\1", markdown).replace("`", "").replace("\\", "")
