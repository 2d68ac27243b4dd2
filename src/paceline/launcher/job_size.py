"""How many servers and data workers a job has, and how far the number of its processes may change.

Counts come from the command line as text (`-s 2`, `-s colocated`; `--data-workers 2`, or `2,1` for
two stages in a row). Every error says what to type instead. Checked here, because a pace without
the servers that it needs would otherwise fail in every worker, and servers that no worker uses
would only take memory.

Without --min, --max, --max-servers, --on-loss, --restarts, --replicas and --detach a job ends with
its first loss. With one of them it is ELASTIC: it continues with other processes. The defaults of
the other options then change nothing: as many workers as the job was started with, no fewer and no
more. The number of servers may double: their tables have enough partitions for that. With a mesh
all numbers of workers are whole units (control/membership/state.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.control.membership.policy import require_whole_units
from paceline.errors import ConfigError
from paceline.pace.parse import Schedule
from paceline.pace.registry import paces_with_servers
from paceline.runtime.config import ON_LOSS
from paceline.runtime.mesh import Mesh

# More workers than this on one host is a typing error ("-n 40000"), not a plan.
MAX_WORKERS = 1024
MAX_SERVERS = 1024
MAX_DATA_WORKERS = 1024
MAX_RESTARTS = 1000
COLOCATED = "colocated"
_NUMBER = re.compile(r"-?[0-9]{1,9}")
_NUMBERS = re.compile(r"[0-9]{1,9}(,[0-9]{1,9})*")


def check_pace(pace: Schedule, num_servers: int, *, add: str, given: str) -> None:
    """Refuse a pace without the servers that it needs, and servers that it does not use.

    `add` is what to type for a server, `given` what was typed.
    """
    if pace.needs_servers and not num_servers:
        raise ConfigError(f"pace {pace} needs parameter servers: add {add}")
    if num_servers and not pace.uses_servers:
        raise ConfigError(
            f"pace {pace} uses no parameter servers{pace.why_no_servers}: leave out {given}, or"
            f" choose a pace with servers ({', '.join(paces_with_servers())})"
        )


# -- servers ------------------------------------------------------------------------------------


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
        if self.replicas < 1:
            raise ConfigError(f"--replicas {self.replicas}: expected a number of at least 1")
        if self.replicas > max(1, self.count):
            raise ConfigError(
                f"replicas {self.replicas} > servers {self.count}: each copy of a value needs a"
                f" server of its own; give -s {self.replicas}, or fewer --replicas"
            )
        if self.threads is not None and not 1 <= self.threads <= 4096:
            raise ConfigError(
                f"--threads-per-server {self.threads}: expected a number from 1 to 4096, for"
                " example --threads-per-server 1"
            )
        if self.threads is not None and not self.count:
            raise ConfigError(
                "--threads-per-server without servers: add -s 1, or leave out --threads-per-server"
            )

    def check_pace(self, pace: Schedule | None, num_workers: int | None = None) -> None:
        """Refuse a pace that does not fit these servers; None: the script decides."""
        if pace is None:
            return
        given = f"-s {COLOCATED if self.is_colocated else self.count}"
        check_pace(pace, self.count, add=f"-s 1 (or -s {COLOCATED})", given=given)
        if num_workers is not None and self.count:
            num_places = self.count if self.replicas == 1 else 1  # replicas may hold its copies
            problem = pace.find_problem(num_workers, num_places)
            if problem:
                raise ConfigError(problem)


def plan_servers(
    text: str, *, num_workers: int, replicas: int | None = None, threads: int | None = None
) -> ServerPlan:
    """Read the value of -s: a number, or "colocated" for one server beside each worker."""
    is_colocated = text.strip() == COLOCATED
    if not is_colocated and not _NUMBER.fullmatch(text.strip()):
        raise ConfigError(f"-s {text[:40]}: expected a number or {COLOCATED}, for example -s 1")
    # RunSpec refuses a wrong number of workers.
    count = min(max(num_workers, 0), MAX_SERVERS) if is_colocated else int(text)
    return ServerPlan(
        count=count,
        is_colocated=is_colocated,
        replicas=1 if replicas is None else replicas,
        threads=threads,
    )


# -- data workers -------------------------------------------------------------------------------


def parse_data_workers(text: str) -> tuple[int, ...]:
    """Read the value of --data-workers; "0" means none."""
    words = text.replace(" ", "")
    if not _NUMBERS.fullmatch(words):
        raise ConfigError(
            f"--data-workers {text[:40]}: expected a number, or one for each stage; for example"
            " --data-workers 2, or --data-workers 2,1"
        )
    counts = tuple(map(int, words.split(",")))
    return () if counts == (0,) else counts


def check_data_workers(counts: Sequence[int]) -> None:
    """Refuse stages without a data worker, and more than a machine can run."""
    if any(count < 1 for count in counts) or sum(counts) > MAX_DATA_WORKERS:
        given = ",".join(map(str, counts))
        raise ConfigError(
            f"--data-workers {given}: expected at least 1 for each stage, and at most"
            f" {MAX_DATA_WORKERS} in all; for example --data-workers 2"
        )


# -- elastic jobs -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ElasticPlan:
    """The bounds of one elastic job, complete and checked."""

    min_workers: int
    max_workers: int
    max_servers: int = 0
    on_loss: str = ON_LOSS[0]
    restarts: int = 0  # how often all processes start again when too few are left

    def num_partitions(self, servers: ServerPlan) -> int:
        """Return the number of partitions of a table: enough for each server to have one."""
        return max(2 * servers.count, self.max_servers) if servers.count else 0

    def variables(self, servers: ServerPlan) -> dict[str, str]:
        """Return the variables that every process of the job gets."""
        variables = {"PACELINE_ELASTIC": "1", "PACELINE_ON_LOSS": self.on_loss}
        if servers.count:
            variables["PACELINE_PARTITIONS"] = str(self.num_partitions(servers))
            variables["PACELINE_REPLICAS"] = str(servers.replicas)
        return variables


def plan_changes(
    *,
    num_workers: int,
    servers: ServerPlan,
    min_workers: int | None = None,
    max_workers: int | None = None,
    max_servers: int | None = None,
    on_loss: str | None = None,
    restarts: int | None = None,
    mesh: Mesh | None = None,
    is_detached: bool = False,
    is_elastic: bool = False,
) -> ElasticPlan | None:
    """Read the options of the command line; None if none of them was given.

    A detached job is elastic too: `paceline attach` needs the journal of its coordinator. With
    `is_elastic`, of a job on Ray, it is elastic in any case, and continues with a single unit.
    """
    given = (min_workers, max_workers, max_servers, on_loss, restarts)
    if is_elastic and min_workers is None and on_loss is None:
        min_workers = min(num_workers, 1 if mesh is None else mesh.unit_size)
    elif all(option is None for option in given) and servers.replicas == 1 and not is_detached:
        return None
    plan = ElasticPlan(
        min_workers=num_workers if min_workers is None else min_workers,
        max_workers=num_workers if max_workers is None else max_workers,
        max_servers=2 * servers.count if max_servers is None else max_servers,
        on_loss=ON_LOSS[0] if on_loss is None else on_loss,
        restarts=restarts or 0,
    )
    _check_workers(plan, num_workers)
    _check_servers(plan, servers)
    if mesh is not None:
        require_whole_units(str(mesh), "--min", plan.min_workers)
        require_whole_units(str(mesh), "--max", plan.max_workers)
    if not 0 <= plan.restarts <= MAX_RESTARTS:
        raise ConfigError(f"--restarts {plan.restarts}: expected a number from 0 to {MAX_RESTARTS}")
    if plan.on_loss not in ON_LOSS:
        raise ConfigError(
            f"--on-loss {plan.on_loss[:40]}: expected shrink (continue at once without a lost"
            " worker) or replace (hold the step until a replacement has joined)"
        )
    return plan


def _check_workers(plan: ElasticPlan, num_workers: int) -> None:
    low, high = plan.min_workers, plan.max_workers
    if low < 1:
        raise ConfigError(f"--min {low}: a job needs at least 1 worker, for example --min 1")
    if high > MAX_WORKERS:
        raise ConfigError(f"--max {high}: expected at most {MAX_WORKERS}")
    if low > num_workers:
        raise ConfigError(
            f"--min {low} > -n {num_workers}: the job would begin with too few workers; give"
            f" -n {low}, or a smaller --min"
        )
    if high < num_workers:
        raise ConfigError(
            f"--max {high} < -n {num_workers}: the job would begin with too many workers; give"
            f" -n {high}, or a larger --max"
        )


def _check_servers(plan: ElasticPlan, servers: ServerPlan) -> None:
    high = plan.max_servers
    if high and not servers.count:
        raise ConfigError(
            f"--max-servers {high} without servers: add -s 1, or leave out --max-servers"
        )
    if high < servers.count:
        raise ConfigError(
            f"--max-servers {high} < -s {servers.count}: the job would begin with too many"
            f" servers; give -s {high}, or a larger --max-servers"
        )
    if high > MAX_SERVERS:
        raise ConfigError(f"--max-servers {high}: expected at most {MAX_SERVERS}")
