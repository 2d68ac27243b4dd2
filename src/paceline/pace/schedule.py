"""A schedule: which pace holds from which step on.

    allreduce@0, ssp:3@2000, diloco:50@10000

The steps are optimizer steps as the progress line counts them; a pace alone is a schedule of one
phase. The same text is used in Python, on the command line and in the environment, and is checked
completely here, before any process starts. No torch: the command line imports this.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from paceline.errors import UsageError
from paceline.pace.parse import (
    PaceSpec,
    find_problem_with_backups,
    find_problem_with_codec,
    notice_of,
    parse,
)

_COMMA = re.compile(r",(?![^\[\]]*\])")  # not one between brackets


@dataclass(frozen=True)
class Phase:
    """A pace, and the step behind which it begins."""

    start: int
    pace: PaceSpec


@dataclass(frozen=True)
class Schedule:
    """Phases in order; the first begins at step 0. `str()` gives its canonical text."""

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
        """The pace that training begins with."""
        return self.phases[0].pace

    @property
    def needs_servers(self) -> bool:
        """Whether one of the paces cannot do without parameter servers."""
        return any(phase.pace.needs_servers for phase in self.phases)

    @property
    def uses_servers(self) -> bool:
        """Whether one of the paces goes through parameter servers where there are some."""
        return any(phase.pace.uses_servers for phase in self.phases)

    def problem_with(self, workers: int, servers: int) -> str:
        """Say why so many workers and servers cannot keep this pace; "" if they can."""
        paces = [phase.pace for phase in self.phases]
        found = [find_problem_with_backups(pace, workers, servers) for pace in paces]
        found += [find_problem_with_codec(pace, pace.options) for pace in paces]
        return next((problem for problem in found if problem), "")

    @property
    def why_no_servers(self) -> str:
        """Why the first pace has no use for parameter servers, as far as there is more to say."""
        return self.first.why_no_servers


def parse_schedule(text: str) -> Schedule:
    """Read a schedule, or a single pace; UsageError says in one line what is wrong with it.

    >>> str(parse_schedule("allreduce, diloco:50@1000"))
    'allreduce@0, diloco:50@1000'
    """
    if not isinstance(text, str):
        return Schedule.of(parse(text))  # which says what a pace is
    phases: list[Phase] = []
    for number, part in enumerate(_COMMA.split(text)):
        words, at, step = part.partition("@")
        phases.append(Phase(_step(text, step, part) if at else 0, parse(words)))
        if number == 0 and phases[0].start != 0:
            raise _wrong(text, f"it must say what holds from step 0 on, such as allreduce@0,{part}")
        if number and not at:
            raise _wrong(text, f"{words.strip()} needs a step, such as {words.strip()}@1000")
        if number and phases[-1].start <= phases[-2].start:
            raise _wrong(
                text,
                f"{part.strip()} does not come behind step {phases[-2].start} of"
                f" {phases[-2].pace}; write the steps in order",
            )
    return Schedule(tuple(phases))


def notices_of(text: str) -> list[str]:
    """Return what has to be said about the words that the paces were asked for with."""
    notices = [notice_of(part.partition("@")[0]) for part in _COMMA.split(text)]
    return [notice for notice in notices if notice]


def _step(text: str, step: str, part: str) -> int:
    step = step.strip()
    if not (step.isascii() and step.isdigit()) or len(step) > 15:
        raise _wrong(text, f"{part.strip()[:60]!r}: behind @ comes a step, a whole number")
    return int(step)


def _wrong(text: str, why: str) -> UsageError:
    shown = text if len(text) <= 80 else text[:77] + "..."
    return UsageError(f"schedule {shown!r}: {why}")
