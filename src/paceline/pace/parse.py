"""The text of a pace: one word, perhaps a number, perhaps options in brackets.

    allreduce        ps[server_dtype=bf16,bucket_mb=8]        ssp:3

The same text is used in Python (`pace="..."`), on the command line (`--pace`) and in the
environment (PACELINE_PACE). It is checked completely here, against the table in registry.py, so
that a typing error is answered before any process starts. No torch: the command line imports this.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from paceline.compress.registry import CODECS, CodecSpec, parse_codec
from paceline.errors import UsageError
from paceline.options.grammar import Number, near, number_text, read_options
from paceline.pace.registry import KNOWN, Pace, find

_FORM = re.compile(r"([^:\[\]]*)(?::([^\[\]]*))?(?:\[([^\[\]]*)\])?")
_COMMA = re.compile(r",(?![^(]*\))")  # not those in parentheses


@dataclass(frozen=True)
class PaceSpec:
    """A pace that was asked for; `str()` gives its canonical text."""

    name: str
    number: float | str | None = None  # or a word, where the pace has those
    options: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        text = self.number if isinstance(self.number, str) else number_text(self.number or 0.0)
        number = "" if self.number is None else f":{text}"
        options = ",".join(f"{key}={value}" for key, value in sorted(self.options.items()))
        return f"{self.name}{number}" + (f"[{options}]" if options else "")

    @property
    def value(self) -> float:
        """The number after the colon, or its default; 0: the pace has none."""
        row = find(self.name)
        return float(self.number if self.number is not None else (row and row.default) or 0)

    @property
    def needs_servers(self) -> bool:
        """Whether it cannot do without parameter servers."""
        row = find(self.name)
        assert row is not None, "a pace that was read is known"
        needed = row.needs_servers_with.items()
        return row.needs_servers or any(self.options.get(key) == value for key, value in needed)

    @property
    def is_free_running(self) -> bool:
        """Whether workers go on without each other."""
        row = find(self.name)
        return row is not None and (row.is_free_running or self.options.get("mode") == "async")

    @property
    def uses_servers(self) -> bool:
        """Whether it goes through parameter servers where there are some."""
        row = find(self.name)
        return row is not None and (row.needs_servers or row.uses_servers)

    @property
    def why_no_servers(self) -> str:
        """Why it has no use for parameter servers, as far as there is more to say."""
        row = find(self.name)
        return f" ({row.no_servers})" if row is not None and row.no_servers else ""

    @property
    def word(self) -> str:
        """The word behind the colon, or its default."""
        row = find(self.name)
        return str(self.number if self.number is not None else row.default if row else "")


def parse(text: str) -> PaceSpec:
    """Read a pace; UsageError says in one line what is wrong with it and what would be right.

    >>> parse("allreduce[update=sharded, bucket_mb=8.0]")
    PaceSpec(name='allreduce', number=None, options={'update': 'sharded', 'bucket_mb': '8'})
    """
    if not isinstance(text, str):
        raise UsageError(f"a pace is a text such as 'allreduce' (got {text!r:.60})")
    found = _FORM.fullmatch(text.strip())
    if found is None:
        raise _wrong(text, "write word, word:number or word[option=value,option=value]")
    name, number, options = found[1].strip(), found[2], found[3]
    known = find(name)
    if known is None:
        raise _wrong(text, _unknown(name))
    return PaceSpec(
        KNOWN[name].stands_for or name,
        None if number is None else _read_number(text, name, known, number),
        {} if options is None else _read_options(text, name, known, options),
    )


def notice_of(text: str) -> str:
    """Return what has to be said about the word that a pace was asked for with."""
    found = _FORM.fullmatch(text.strip())
    row = KNOWN.get(found[1].strip()) if found is not None else None
    return row.notice if row is not None else ""


def find_problem_with_backups(pace: PaceSpec, workers: int, servers: int) -> str:
    """Say why these workers and servers cannot have that many backups; "" if they can."""
    if pace.name != "backup":
        return ""
    if pace.value >= workers:
        some = "1 worker" if workers == 1 else f"{workers} workers"
        return (
            f"pace {pace}: {int(pace.value)} backups of {some} leave nobody to wait for; choose"
            f" fewer than {workers}, such as backup:{workers - 1}"
        )
    if pace.value and servers > 1:
        return (
            f"pace {pace} and {servers} servers: who is in a round must be decided in one place;"
            " use -s 1, or pace ps, which has use for several"
        )
    return ""


def find_problem_with_codec(pace: PaceSpec, options: Mapping[str, str]) -> str:
    """Say why servers cannot take what a codec makes of a pace's pushes; "" if they can."""
    codec = parse_codec(options.get("compress", "none"))
    if not codec.is_on or not pace.needs_servers:
        return ""
    if codec.why_no_servers:
        able = ", ".join(word for word in CODECS if not CodecSpec(word).why_no_servers)
        why = codec.why_no_servers
        return f"pace {pace.name} and compress={codec}: {why}; those that can: {able}"
    push = options.get("push", "grad")
    if push != "grad":
        return (
            f"pace {pace.name}, compress={codec} and push={push}: what a codec leaves out is added"
            " to the next gradient, and of values and differences nobody would send it later; use"
            " push=grad"
        )
    return ""


def _read_number(text: str, name: str, known: Pace, number: str) -> float | str:
    if not known.number:
        raise _wrong(text, f"{name} takes no number; leave out {':' + number[:40]!r}")
    kind = known.kind
    if isinstance(kind, Number):
        value = kind.read(number)
        if value is None:
            raise _wrong(
                text,
                f"{known.number} must be {kind.words} (got {number[:40]!r}); write for example"
                f" {name}:{known.default}",
            )
        return value
    word = number.strip()
    if word not in kind:
        choices = ", ".join(kind)
        raise _wrong(text, f"{known.number}: {word[:40]!r}{near(word, kind)}; choose {choices}")
    return word


def _read_options(text: str, name: str, known: Pace, options: str) -> dict[str, str]:
    """Read what is between the brackets; spaces around keys and values do not count."""
    return read_options(_COMMA.split(options), name, known.options, partial(_wrong, text))


def _unknown(name: str) -> str:
    exist = f"this version has: {', '.join(KNOWN)}"
    return f"there is no such pace{near(name, KNOWN)}; {exist}"


def _wrong(text: str, why: str) -> UsageError:
    shown = text if len(text) <= 80 else text[:77] + "..."
    return UsageError(f"pace {shown!r}: {why}")
