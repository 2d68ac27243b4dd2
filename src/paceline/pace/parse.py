"""The text of a pace: one word, perhaps a number, perhaps options in brackets; and of a schedule.

    allreduce        ps[server_dtype=bf16,bucket_mb=8]        ssp:3
    allreduce@0, ssp:3@2000, diloco:50@10000

A SCHEDULE sets which pace holds from which step on. The steps are optimizer steps as the progress
line counts them; a pace alone is a schedule of one phase. The same text is used in Python
(`pace="..."`), on the command line (`--pace`) and in the environment (PACELINE_PACE). It is checked
completely here, against the table in registry.py, so that a typing error is reported before any
process starts. No torch: the command line imports this.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from paceline.compress.registry import CODECS, CodecSpec, parse_codec
from paceline.errors import UsageError
from paceline.options.grammar import Number, near, number_text, read_options
from paceline.pace.registry import AUTO, KNOWN, Pace, find

_FORM = re.compile(r"([^:\[\]]*)(?::([^\[\]]*))?(?:\[([^\[\]]*)\])?")
_COMMA = re.compile(r",(?![^(]*\))")  # not those in parentheses
_PHASES = re.compile(r",(?![^\[\]]*\])")  # a comma, but not one between brackets


@dataclass(frozen=True)
class PaceSpec:
    """A parsed pace; `str()` returns its canonical text."""

    name: str
    number: float | str | None = None  # or a word, for a pace that has words
    options: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        text = self.number if isinstance(self.number, str) else number_text(self.number or 0.0)
        number = "" if self.number is None else f":{text}"
        options = ",".join(f"{key}={value}" for key, value in sorted(self.options.items()))
        return f"{self.name}{number}" + (f"[{options}]" if options else "")

    @property
    def value(self) -> float:
        """The number after the colon, or its default; 0 if the pace has none."""
        row = find(self.name)
        return float(self.number if self.number is not None else (row and row.default) or 0)

    @property
    def needs_servers(self) -> bool:
        """Whether it needs parameter servers."""
        row = find(self.name)
        assert row is not None, "a parsed pace is known"
        needed = row.needs_servers_with.items()
        return row.needs_servers or any(self.options.get(key) == value for key, value in needed)

    @property
    def is_free_running(self) -> bool:
        """Whether workers do not wait for each other."""
        row = find(self.name)
        return row is not None and (row.is_free_running or self.options.get("mode") == "async")

    @property
    def is_auto(self) -> bool:
        """Whether the planner chooses the pace (planner/automatic)."""
        return self.name == AUTO

    @property
    def uses_servers(self) -> bool:
        """Whether it uses parameter servers if there are some."""
        row = find(self.name)
        return row is not None and (row.needs_servers or row.uses_servers)

    @property
    def why_no_servers(self) -> str:
        """Why it cannot use parameter servers, if there is a reason to report."""
        row = find(self.name)
        return f" ({row.no_servers})" if row is not None and row.no_servers else ""

    @property
    def word(self) -> str:
        """The word after the colon, or its default."""
        row = find(self.name)
        return str(self.number if self.number is not None else row.default if row else "")


def parse(text: str) -> PaceSpec:
    """Return the pace of a text; UsageError: what is wrong, and what would be right.

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
    """Return the notice about the word that names a pace, if there is one."""
    found = _FORM.fullmatch(text.strip())
    row = KNOWN.get(found[1].strip()) if found is not None else None
    return row.notice if row is not None else ""


def find_problem_with_backups(pace: PaceSpec, workers: int, servers: int) -> str:
    """Return why these workers and servers cannot have that many backups; "" if they can."""
    if pace.name != "backup":
        return ""
    if pace.value >= workers:
        some = "1 worker" if workers == 1 else f"{workers} workers"
        return (
            f"pace {pace}: {int(pace.value)} backups of {some} leave no worker to wait for; choose"
            f" fewer than {workers}, such as backup:{workers - 1}"
        )
    if pace.value and servers > 1:
        return (
            f"pace {pace} and {servers} servers: one server must decide which workers are in a"
            " round; use -s 1, or pace ps, which can use several"
        )
    return ""


def find_problem_with_codec(pace: PaceSpec, options: Mapping[str, str]) -> str:
    """Return why servers cannot use a codec for a pace's pushes; "" if they can."""
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
            " to the next gradient, but of values and differences it would never be sent; use"
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
    """Parse the text between the brackets; spaces around keys and values do not count."""
    return read_options(_COMMA.split(options), name, known.options, partial(_wrong, text))


def _unknown(name: str) -> str:
    exist = f"this version has: {', '.join(KNOWN)}"
    return f"there is no such pace{near(name, KNOWN)}; {exist}"


def _wrong(text: str, why: str) -> UsageError:
    shown = text if len(text) <= 80 else text[:77] + "..."
    return UsageError(f"pace {shown!r}: {why}")


# -- schedules ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Phase:
    """A pace, and the step after which it begins."""

    start: int
    pace: PaceSpec


@dataclass(frozen=True)
class Schedule:
    """Phases in order; the first begins at step 0. `str()` returns its canonical text."""

    phases: tuple[Phase, ...]

    @classmethod
    def of(cls, pace: PaceSpec) -> Schedule:
        """Return the schedule that never changes."""
        return cls((Phase(0, pace),))

    def __str__(self) -> str:
        if len(self.phases) == 1:
            return str(self.phases[0].pace)
        return ", ".join(f"{phase.pace}@{phase.start}" for phase in self.phases)

    @property
    def first(self) -> PaceSpec:
        """The first pace."""
        return self.phases[0].pace

    @property
    def needs_servers(self) -> bool:
        """Whether one of the paces needs parameter servers."""
        return any(phase.pace.needs_servers for phase in self.phases)

    @property
    def uses_servers(self) -> bool:
        """Whether one of the paces uses parameter servers if there are some."""
        return any(phase.pace.uses_servers for phase in self.phases)

    def find_problem(self, workers: int, servers: int) -> str:
        """Return why so many workers and servers cannot run this schedule; "" if they can."""
        paces = [phase.pace for phase in self.phases]
        found = [find_problem_with_backups(pace, workers, servers) for pace in paces]
        found += [find_problem_with_codec(pace, pace.options) for pace in paces]
        return next((problem for problem in found if problem), "")

    @property
    def why_no_servers(self) -> str:
        """Why the first pace cannot use parameter servers, if there is a reason to report."""
        return self.first.why_no_servers


def parse_schedule(text: str) -> Schedule:
    """Return the schedule of a text, or of a single pace; UsageError: what is wrong with it.

    >>> str(parse_schedule("allreduce, diloco:50@1000"))
    'allreduce@0, diloco:50@1000'
    """
    if not isinstance(text, str):
        return Schedule.of(parse(text))  # which raises the error
    phases: list[Phase] = []
    for number, part in enumerate(_PHASES.split(text)):
        words, at, step = part.partition("@")
        phases.append(Phase(_step(text, step, part) if at else 0, parse(words)))
        if number == 0 and phases[0].start != 0:
            raise _wrong_schedule(
                text, f"its first pace must begin at step 0, such as allreduce@0,{part}"
            )
        if number and not at:
            raise _wrong_schedule(
                text, f"{words.strip()} needs a step, such as {words.strip()}@1000"
            )
        if number and phases[-1].start <= phases[-2].start:
            raise _wrong_schedule(
                text,
                f"{part.strip()} does not begin after step {phases[-2].start} of"
                f" {phases[-2].pace}; write the steps in order",
            )
        if number and any(phase.pace.is_auto for phase in phases):
            raise _wrong_schedule(
                text, f"{AUTO} chooses the pace at any step; give it alone, or leave it out"
            )
    return Schedule(tuple(phases))


def notices_of(text: str) -> list[str]:
    """Return the notices about the words that name the paces."""
    notices = [notice_of(part.partition("@")[0]) for part in _PHASES.split(text)]
    return [notice for notice in notices if notice]


def _step(text: str, step: str, part: str) -> int:
    step = step.strip()
    if not (step.isascii() and step.isdigit()) or len(step) > 15:
        raise _wrong_schedule(
            text, f"{part.strip()[:60]!r}: after @ a step is expected, a whole number"
        )
    return int(step)


def _wrong_schedule(text: str, why: str) -> UsageError:
    shown = text if len(text) <= 80 else text[:77] + "..."
    return UsageError(f"schedule {shown!r}: {why}")
