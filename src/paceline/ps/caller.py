"""A worker, as the tables of a partition know it: named by its rank, counted by its number.

Every copy of a partition knows the same callers, also those copies that have no line to them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False)
class Caller:
    """Who asks."""

    rank: int  # of the process: whose memory it is, and whose requests
    worker: int  # its number: whose place in the tables
    is_here: bool  # on this host: its memory can be seen
