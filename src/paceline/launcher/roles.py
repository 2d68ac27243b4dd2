"""How many parameter servers and data workers a job gets, and whether its pace has use for them.

Counts come from the command line as text (`-s 2`, `-s colocated`; `--data-workers 2`, or `2,1` for
two stages in a row). Every refusal says what to type
instead: a pace that needs servers and finds none would otherwise fail in every worker, and servers
that nobody talks to would only take memory.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import ConfigError
from paceline.pace.registry import paces_with_servers
from paceline.pace.schedule import Schedule

MAX_SERVERS = 1024
COLOCATED = "colocated"
_NUMBER = re.compile(r"-?[0-9]{1,9}")
MAX_DATA_WORKERS = 1024
_NUMBERS = re.compile(r"[0-9]{1,9}(,[0-9]{1,9})*")


@dataclass(frozen=True, kw_only=True)
class ServerPlan:
    """The servers of one job. `replicas` is how many of them hold each value."""

    count: int = 0
    is_colocated: bool = False
    replicas: int = 1
    threads: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.count <= MAX_SERVERS:
            raise ConfigError(
                f"-s {self.count}: expected a number from 0 to {MAX_SERVERS}, or {COLOCATED};"
                " for example -s 1"
            )
        self._check_replicas()
        if self.threads is not None and not 1 <= self.threads <= 4096:
            raise ConfigError(
                f"--threads-per-server {self.threads}: expected a number from 1 to 4096, for"
                " example --threads-per-server 1"
            )
        if self.threads is not None and not self.count:
            raise ConfigError(
                "--threads-per-server without servers: add -s 1, or leave out --threads-per-server"
            )

    def _check_replicas(self) -> None:
        if self.replicas < 1:
            raise ConfigError(f"--replicas {self.replicas}: expected a number of at least 1")
        if self.replicas > max(1, self.count):
            raise ConfigError(
                f"replicas {self.replicas} > servers {self.count}: each copy of a value needs a"
                f" server of its own; give -s {self.replicas}, or fewer --replicas"
            )

    def check_pace(self, pace: Schedule | None, num_workers: int | None = None) -> None:
        """Refuse servers without use, and a pace without its servers; None: the script decides."""
        if pace is None:
            return
        if pace.needs_servers and not self.count:
            raise ConfigError(f"pace {pace} needs parameter servers: add -s 1 (or -s {COLOCATED})")
        if self.count and not pace.uses_servers:
            given = COLOCATED if self.is_colocated else self.count
            raise ConfigError(
                f"pace {pace} uses no parameter servers{pace.why_no_servers}: leave out -s {given},"
                f" or choose a pace with servers ({', '.join(paces_with_servers())})"
            )
        if num_workers is not None and self.count:
            num_places = self.count if self.replicas == 1 else 1  # others may hold its copies
            problem = pace.problem_with(num_workers, num_places)
            if problem:
                raise ConfigError(problem)


def plan_servers(
    text: str, *, num_workers: int, replicas: int | None = None, threads: int | None = None
) -> ServerPlan:
    """Read what was given as -s: a number, or "colocated" for one beside each worker."""
    is_colocated = text.strip() == COLOCATED
    if not is_colocated and not _NUMBER.fullmatch(text.strip()):
        raise ConfigError(f"-s {text[:40]}: expected a number or {COLOCATED}, for example -s 1")
    # A wrong number of workers is refused where workers are counted.
    count = min(max(num_workers, 0), MAX_SERVERS) if is_colocated else int(text)
    return ServerPlan(
        count=count,
        is_colocated=is_colocated,
        replicas=1 if replicas is None else replicas,
        threads=threads,
    )


def parse_data_workers(text: str) -> tuple[int, ...]:
    """Read what was given as --data-workers; "0" means none."""
    words = text.replace(" ", "")
    if not _NUMBERS.fullmatch(words):
        raise ConfigError(
            f"--data-workers {text[:40]}: expected a number, or one for each stage; for example"
            " --data-workers 2, or --data-workers 2,1"
        )
    counts = tuple(map(int, words.split(",")))
    return () if counts == (0,) else counts


def check_data_workers(counts: Sequence[int]) -> None:
    """Refuse stages without anybody, and more than a machine can have."""
    if any(count < 1 for count in counts) or sum(counts) > MAX_DATA_WORKERS:
        given = ",".join(map(str, counts))
        raise ConfigError(
            f"--data-workers {given}: expected at least 1 for each stage, and at most"
            f" {MAX_DATA_WORKERS} in all; for example --data-workers 2"
        )
