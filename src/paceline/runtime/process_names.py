"""Seats: who is who among the processes of a job, and what each is called.

Workers come first, servers behind them, then data workers; newcomers to a job under way come last.
`rank` counts all processes, as the control plane does, and is never used twice; `number` counts
within the role, is taken over by a replacement, and is what people see: the third process of a job
with two workers is "server 0", its lines begin with [s0].
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
    is_data_worker: bool = False

    @property
    def is_worker(self) -> bool:
        """Whether it trains; the others serve those who do."""
        return not (self.is_server or self.is_data_worker)

    @property
    def place(self) -> tuple[int, int]:
        """What it shares with those that it replaces: role and number; workers come first."""
        return (2 if self.is_data_worker else int(self.is_server)), self.number

    @property
    def role(self) -> str:
        if self.is_data_worker:
            return "data"
        return "server" if self.is_server else "worker"

    @property
    def label(self) -> str:
        """The short form, in front of lines and in tables: "3", "s0" for a server, "d0"."""
        letter = "d" if self.is_data_worker else "s" if self.is_server else ""
        return f"{letter}{self.number}"

    @property
    def noun(self) -> str:
        if self.is_data_worker:
            return "data worker"
        return "server" if self.is_server else "rank"

    def __str__(self) -> str:
        return f"{self.noun} {self.number}"

    @property
    def log_name(self) -> str:
        """The name of its file in --log-dir."""
        return f"{self.noun.replace(' ', '-')}-{self.number}.log"


def seats(num_workers: int, num_servers: int = 0, num_data_workers: int = 0) -> list[Seat]:
    """Return every seat of a job, in order of rank."""
    workers = [Seat(number, number) for number in range(num_workers)]
    servers = [Seat(num_workers + k, k, is_server=True) for k in range(num_servers)]
    first = num_workers + num_servers
    feeders = [Seat(first + k, k, is_data_worker=True) for k in range(num_data_workers)]
    return workers + servers + feeders


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


def counted(num_workers: int, num_servers: int, num_data_workers: int = 0) -> str:
    """Say how many there are: "2 ranks and 1 server"."""
    counts = {"rank": num_workers, "server": num_servers, "data worker": num_data_workers}
    words = [
        f"{count} {noun}{'s' if count != 1 else ''}"
        for noun, count in counts.items()
        if count or noun == "rank"
    ]
    return " and ".join(words) if len(words) < 3 else f"{words[0]}, {words[1]} and {words[2]}"


def _span(numbers: Iterable[int]) -> str:
    """Write [0, 1, 2, 5] as "0-2, 5"."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
