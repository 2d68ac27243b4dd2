"""The paces that are compared, one row each.

A pace that this version does not know, or that has no such option, is left out with a line that
says why: the table may be ahead of the package. All train with the optimizer of the task, unless
the definition of the pace demands another; the row says so, and so does the report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.errors import UsageError
from paceline.pace.parse import parse

REFERENCE = "allreduce"


@dataclass(frozen=True)
class Row:
    """One pace; `{tenth}` in its text becomes a tenth of the steps of the run."""

    label: str
    pace: str
    family: str  # decides on the colour in the figures
    servers: bool = False
    one_server: bool = False  # it can have no more
    # Free-running: no worker waits, or only for workers that lag more than `bound` steps; workers
    # of different speed then do different numbers of steps.
    free: bool = False
    bound: int | None = None
    one_host: bool = False
    optimizers: Mapping[str, str] = field(default_factory=dict)  # by task; "": the task's own
    note: str = ""

    def text(self, steps: int) -> str:
        """Return the pace as `distribute` gets it, in a run of so many steps."""
        return self.pace.replace("{tenth}", str(max(1, steps // 10)))


_EARLY = "its default `after` is longer than these runs; here it is 1/10 of the steps"
_BITS = (
    "sends only signs, so every value moves by the full learning rate: SGD with a far smaller one"
)
_STREAM = "small buckets, so that there is more than one fragment"

TABLE = (
    Row("allreduce", "allreduce", "lockstep"),
    Row("partial:0.5", "partial:0.5", "lockstep"),
    Row(
        "bitmap",
        "bitmap",
        "lockstep",
        optimizers={"book": "sgd:0.001", "digits": "sgd:0.001"},
        note=_BITS,
    ),
    Row("ps", "ps", "servers", servers=True),
    Row(
        "backup:1",
        "backup:1",
        "servers",
        servers=True,
        one_server=True,
        note="one server only, also on slow links",
    ),
    Row("ssp:3", "ssp:3", "servers", servers=True, free=True, bound=3),
    Row("async", "async", "servers", servers=True, free=True),
    Row("hogwild", "hogwild", "servers", one_host=True),
    Row("local:8", "local:8", "local"),
    Row(
        "local:8 streaming",
        "local:8[delay=7,late=shift]",
        "local",
        note="an average may be in flight until the next one is due",
    ),
    Row("post_local:8", "post_local:8[after={tenth}]", "local", note=_EARLY),
    Row("bmuf:10", "bmuf:10[after={tenth}]", "local", note=_EARLY),
    Row("diloco:50", "diloco:50", "local", note="50 steps instead of its default of 500"),
    Row(
        "diloco:50 streaming",
        "diloco:50[fragments=2,delay=5,merge=0.5,bucket_mb=0.15]",
        "local",
        note=_STREAM,
    ),
    Row("easgd:10", "easgd:10", "elastic"),
    Row(
        "eamsgd:10",
        "eamsgd:10",
        "elastic",
        optimizers={"book": "sgd:0.05", "digits": "sgd:0.02"},
        note="needs SGD; its momentum of 0.9 needs a smaller learning rate",
    ),
    Row("easgd:10 async", "easgd:10[mode=async]", "elastic", servers=True, free=True),
    Row("gossip:ring", "gossip:ring", "gossip"),
    Row("gossip:exponential", "gossip:exponential", "gossip"),
    Row("gossip:random", "gossip:random", "gossip"),
)


def choose(wanted: Sequence[str] = (), table: Sequence[Row] = TABLE) -> list[Row]:
    """Return the rows that were asked for, by label or by the name of a pace; all by default."""
    for name in wanted:
        if not any(name in _names(row) for row in table):
            labels = ", ".join(row.label for row in table)
            raise SystemExit(f"paces: there is no row {name!r}; choose among: {labels}")
    return [row for row in table if not wanted or set(wanted) & _names(row)]


def known(rows: Sequence[Row]) -> tuple[list[Row], list[str]]:
    """Divide the rows: those that this version can run, and a line for each that it cannot."""
    problems = {row.label: problem_with(row.text(1000)) for row in rows}
    notes = [f"{label}: left out: {problem}" for label, problem in problems.items() if problem]
    return [row for row in rows if not problems[row.label]], notes


def problem_with(pace: str) -> str:
    """Return why this version cannot run a pace; "" if it can."""
    try:
        parse(pace)
    except UsageError as error:
        return str(error)
    return ""


def _names(row: Row) -> set[str]:
    return {row.label, row.pace, row.pace.partition(":")[0]}
