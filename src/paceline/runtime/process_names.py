"""The names of a job's processes: rank, role, number, and how each is printed.

Workers have the first ranks, then servers, then data workers; processes that join a running job
have the last ones. `rank` counts all processes, as the control plane does, and is never used twice.
`number` counts within the role, is inherited by a replacement, and is what people see: the third
process of a job with two workers is "server 0", and its output lines begin with [s0].
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class ProcessName:
    """One process of a job."""

    rank: int
    number: int
    is_server: bool = False
    is_newcomer: bool = False  # it joined a running job
    is_data_worker: bool = False

    @property
    def is_worker(self) -> bool:
        """Whether it trains. Servers and data workers serve the workers."""
        return not (self.is_server or self.is_data_worker)

    @property
    def slot(self) -> tuple[int, int]:
        """Role and number, which a replacement inherits; workers sort first."""
        return (2 if self.is_data_worker else int(self.is_server)), self.number

    @property
    def role(self) -> str:
        if self.is_data_worker:
            return "data"
        return "server" if self.is_server else "worker"

    @property
    def label(self) -> str:
        """The short form for output lines and tables: "3", "s0" for a server, "d0"."""
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
        """The name of its log file in --log-dir."""
        return f"{self.noun.replace(' ', '-')}-{self.number}.log"


def process_names(
    num_workers: int, num_servers: int = 0, num_data_workers: int = 0
) -> list[ProcessName]:
    """Return the names of all processes of a job, in order of rank."""
    workers = [ProcessName(number, number) for number in range(num_workers)]
    servers = [ProcessName(num_workers + k, k, is_server=True) for k in range(num_servers)]
    first = num_workers + num_servers
    data_workers = [ProcessName(first + k, k, is_data_worker=True) for k in range(num_data_workers)]
    return workers + servers + data_workers


def names(chosen: Iterable[ProcessName]) -> str:
    """Return a short list of several processes, each once: "ranks 0-2, 5 and server 1"."""
    groups: dict[str, set[int]] = {}
    for name in chosen:  # a process and its replacement have the same number
        groups.setdefault(name.noun, set()).add(name.number)
    words = [
        f"{noun if len(numbers) == 1 else noun + 's'} {span(sorted(numbers))}"
        for noun, numbers in groups.items()
    ]
    return " and ".join(words)


def counted(num_workers: int, num_servers: int, num_data_workers: int = 0) -> str:
    """Return the number of processes in words: "2 ranks and 1 server"."""
    counts = {"rank": num_workers, "server": num_servers, "data worker": num_data_workers}
    words = [
        f"{count} {noun}{'s' if count != 1 else ''}"
        for noun, count in counts.items()
        if count or noun == "rank"
    ]
    return " and ".join(words) if len(words) < 3 else f"{words[0]}, {words[1]} and {words[2]}"


def span(numbers: Iterable[int]) -> str:
    """Return [0, 1, 2, 5] as "0-2, 5"."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
