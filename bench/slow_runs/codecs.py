"""The codecs that are compared, as texts of paces. One that this version lacks is left out."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.errors import UsageError
from paceline.pace.known import find
from paceline.pace.parse import parse

REFERENCE = "allreduce"
CODECS = (
    "bf16",
    "int8",
    "int4",
    "onebit",
    "topk:0.01",
    "topk:0.01+int8",
    "dgc",
    "powersgd:1",
)


def with_codec(codec: str) -> str:
    """Return the pace that averages every step's gradients, compressed."""
    return f"{REFERENCE}[compress={codec}]"


PACES = (REFERENCE, *(with_codec(codec) for codec in CODECS))


def known(paces: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divide: those that two hosts without servers can run, and a line for each other one."""
    problems = {pace: _problem(pace) for pace in paces}
    notes = [f"{pace}: left out: {problem}" for pace, problem in problems.items() if problem]
    return [pace for pace, problem in problems.items() if not problem], notes


def _problem(pace: str) -> str:
    try:
        asked = parse(pace)
    except UsageError as error:
        return str(error)
    row = find(asked.name)
    if asked.needs_servers:
        return "it needs parameter servers, and there are none here"
    return "its workers share memory" if row is not None and row.on_one_host else ""
