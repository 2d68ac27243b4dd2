"""How stale updates were and who waited for whom, as servers count it."""

from __future__ import annotations

import msgspec


class WorkerReport(msgspec.Struct, frozen=True):
    """What a server counted about one worker."""

    worker: int
    updates: int
    staleness: dict[int, int] = {}  # of its updates: how stale -> how many
    waited_s: dict[int, float] = {}  # for whom -> how long
    dropped: int = 0  # too old
    skipped: int = 0  # not finite
    overwritten: int = 0  # versions of others that its values replaced


class TableReport(msgspec.Struct, frozen=True, tag_field="type", tag="table"):
    """What a server counted about one table."""

    table: str
    server: int
    version: int
    workers: tuple[WorkerReport, ...] = ()
