"""A picture of a job: what is known of each process at one moment, ready to be laid out.

Shares are in percent of the time of steps. What nobody knows is None, and what nobody knows of any
process gets no column.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Row:
    """One process as it is shown; `label` is its rank, or s0, s1 ... for a server."""

    label: str
    step: int | None
    values: Mapping[str, float]
    state: str
    steps_per_s: float | None = None
    samples_per_s: float | None = None
    input: float | None = None
    compute: float | None = None
    wait: float | None = None
    staleness: float | None = None  # of its updates, on average, in versions
    sent_per_s: float | None = None  # bytes


@dataclass(frozen=True)
class Picture:
    """All processes. `columns` are the names of reported values, in order."""

    columns: tuple[str, ...]
    rows: Sequence[Row]
    line: str  # the same in one line
    words: tuple[str, ...] = ()  # what the table does not say, the most important first
