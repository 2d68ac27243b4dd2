"""How far a job may change: the bounds that `paceline run` was given, and what follows from them.

Without any of these options a job is what it always was: it ends with its first loss. With one of
them it is ELASTIC: it goes on with other processes. The defaults of the others then change nothing
by themselves: as many workers as the job was started with, no fewer and no more. Servers may become
twice as many, because their tables are cut for that anyway. With a mesh all numbers of workers are
of whole units (control/membership/numbers.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.control.membership.policy import require_whole_units
from paceline.errors import ConfigError
from paceline.launcher.roles import MAX_SERVERS, ServerPlan
from paceline.runtime.config import ON_LOSS
from paceline.runtime.mesh import Mesh

MAX_WORKERS = 1024
MAX_RESTARTS = 1000


@dataclass(frozen=True, kw_only=True)
class ElasticPlan:
    """The bounds of one elastic job, complete and checked."""

    min_workers: int
    max_workers: int
    max_servers: int = 0
    on_loss: str = ON_LOSS[0]
    restarts: int = 0  # how often all start again when too few are left to go on

    def num_partitions(self, servers: ServerPlan) -> int:
        """Into how many parts the servers' tables are cut: enough for any server to take some."""
        return max(2 * servers.count, self.max_servers) if servers.count else 0

    def variables(self, servers: ServerPlan) -> dict[str, str]:
        """Return what every process of the job is told about it."""
        told = {"PACELINE_ELASTIC": "1", "PACELINE_ON_LOSS": self.on_loss}
        if servers.count:
            told["PACELINE_PARTITIONS"] = str(self.num_partitions(servers))
            told["PACELINE_REPLICAS"] = str(servers.replicas)
        return told


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
) -> ElasticPlan | None:
    """Read the options of the command line; None when none of them was given.

    A detached job is elastic too: whoever attaches to it later must find its coordinator's journal.
    """
    given = (min_workers, max_workers, max_servers, on_loss, restarts)
    if all(option is None for option in given) and servers.replicas == 1 and not is_detached:
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
            f"--on-loss {plan.on_loss[:40]}: expected shrink (go on at once without a lost worker)"
            " or replace (hold the step until another has taken its place)"
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
