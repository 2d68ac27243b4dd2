"""The codecs that are compared, as texts of paces. One that this version lacks is left out."""

from __future__ import annotations

from collections.abc import Sequence

from pace_runs.table import REFERENCE, Row, problem_with

from paceline.pace.parse import parse
from paceline.pace.registry import find

_PLAIN = ("bf16", "int8", "int4", "onebit", "topk:0.01", "topk:0.01+int8", "powersgd:1")
CODECS = (*_PLAIN, "dgc", "dgc(momentum=0)")  # for the losses, with their defaults
_TIMED = (*_PLAIN, "dgc(warmup=0)")  # as they are in the long run: dgc sends more at first
_OWN_MOMENTUM = "needs SGD; its momentum of 0.9 needs a smaller learning rate"
_FAMILIES = {"topk": "values", "randomk": "values", "dgc": "values", "powersgd": "rank"}


def with_codec(codec: str) -> str:
    """Return the pace that averages every step's gradients, compressed."""
    return f"{REFERENCE}[compress={codec}]"


PACES = (REFERENCE, *(with_codec(codec) for codec in _TIMED))


def rows(codecs: Sequence[str] = CODECS) -> list[Row]:
    """Return a table of paces for the losses: without a codec, and with each of these."""
    return [Row(REFERENCE, REFERENCE, "lockstep"), *map(_row, codecs)]


def _row(codec: str) -> Row:
    """Name the row by its codec; what that saves on decides on the colour in the figures."""
    word = codec.partition(":")[0].partition("+")[0].partition("(")[0]
    family = _FAMILIES.get(word, "bits")
    if word != "dgc" or "momentum=0" in codec:
        return Row(codec, with_codec(codec), family)
    rates = {"book": "sgd:0.05", "digits": "sgd:0.02"}
    return Row(codec, with_codec(codec), family, optimizers=rates, note=_OWN_MOMENTUM)


def known(paces: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divide: those that two hosts without servers can run, and a line for each other one."""
    problems = {pace: problem_with(pace) or _problem_here(pace) for pace in paces}
    notes = [f"{pace}: left out: {problem}" for pace, problem in problems.items() if problem]
    return [pace for pace, problem in problems.items() if not problem], notes


def _problem_here(pace: str) -> str:
    asked = parse(pace)
    row = find(asked.name)
    if asked.needs_servers:
        return "it needs parameter servers, and there are none here"
    return "its workers share memory" if row is not None and row.on_one_host else ""
