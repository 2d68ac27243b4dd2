"""Seats: who is who among the processes of a job, and what each is called.

Workers come first, servers behind them, newcomers to a job under way behind all. `rank` counts all
processes, as the control plane does, and is never used twice; `number` counts within the role, is
taken over by a replacement, and is what people see: the third process of a job with two workers is
"server 0", its lines begin with [s0].
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Seat:
    """The place of one process in its job."""

    rank: int
    number: int
    is_server: bool = False
    is_newcomer: bool = False  # it was not there when the job began

    @property
    def place(self) -> tuple[bool, int]:
        """What it shares with those that it replaces: role and number; workers come first."""
        return self.is_server, self.number

    @property
    def role(self) -> str:
        return "server" if self.is_server else "worker"

    @property
    def label(self) -> str:
        """The short form, in front of lines and in tables: "3", or "s0" for a server."""
        return f"s{self.number}" if self.is_server else str(self.number)

    @property
    def noun(self) -> str:
        return "server" if self.is_server else "rank"

    def __str__(self) -> str:
        return f"{self.noun} {self.number}"

    @property
    def log_name(self) -> str:
        """The name of its file in --log-dir."""
        return f"{self.noun}-{self.number}.log"


def seats(num_workers: int, num_servers: int = 0) -> list[Seat]:
    """Return every seat of a job, in order of rank."""
    workers = [Seat(number, number) for number in range(num_workers)]
    return workers + [Seat(num_workers + k, k, is_server=True) for k in range(num_servers)]


def names(chosen: Iterable[Seat]) -> str:
    """Name several seats in few words: "ranks 0-2, 5 and server 1"."""
    groups: dict[str, list[int]] = {}
    for seat in chosen:
        groups.setdefault(seat.noun, []).append(seat.number)
    words = [
        f"{noun if len(numbers) == 1 else noun + 's'} {_span(numbers)}"
        for noun, numbers in groups.items()
    ]
    return " and ".join(words)


def counted(num_workers: int, num_servers: int) -> str:
    """Say how many there are: "2 ranks and 1 server"."""
    words = [f"{num_workers} rank{'s' if num_workers != 1 else ''}"]
    if num_servers:
        words.append(f"{num_servers} server{'s' if num_servers != 1 else ''}")
    return " and ".join(words)


def _span(numbers: Iterable[int]) -> str:
    """Write [0, 1, 2, 5] as "0-2, 5"."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
