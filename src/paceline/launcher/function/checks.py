"""The arguments of `pl.launch`, checked before the first process is forked."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.errors import ConfigError, UsageError
from paceline.launcher.function.forked import fork_quietly
from paceline.launcher.job_size import MAX_DATA_WORKERS, MAX_SERVERS, MAX_WORKERS, check_pace
from paceline.launcher.spec import RESERVED
from paceline.pace.parse import Schedule, parse_schedule
from paceline.runtime.config import inherited_environ, requested_mesh, requested_pace
from paceline.runtime.mesh import Mesh
from paceline.runtime.process_names import ProcessName, process_names

_PROBE_S = 5.0
_DEFAULT_WORKERS = 2


@dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """The checked arguments of one launch."""

    num_workers: int
    num_servers: int
    data_workers: tuple[int, ...]
    pace: Schedule | None
    mesh: Mesh | None
    env: Mapping[str, str]
    threads: int
    timeout_s: float | None

    @property
    def process_names(self) -> list[ProcessName]:
        return process_names(self.num_workers, self.num_servers, sum(self.data_workers))


def checked(
    function: object,
    workers: int | None,
    servers: int,
    data_workers: int | Sequence[int],
    pace: str | None,
    mesh: str | None,
    env: Mapping[str, str] | None,
    threads: int,
    timeout_s: float | None,
) -> LaunchSpec:
    """Return the checked arguments; raises UsageError or ConfigError."""
    if not callable(function):
        raise UsageError(f"launch({function!r:.60}): expected a function, then its arguments")
    _refuse_joined()
    if workers is not None:
        _check_count("workers", workers, 1, MAX_WORKERS)
    _check_count("servers", servers, 0, MAX_SERVERS)
    _check_count("threads", threads, 1, 4096)
    if timeout_s is not None and not (math.isfinite(timeout_s) and timeout_s > 0):
        raise UsageError(f"launch(timeout_s={timeout_s!r}): expected a number above 0, or None")
    added = dict(env or {})
    _check_env(added)
    grid = _mesh(mesh, added)
    if workers is None:
        workers = _DEFAULT_WORKERS if grid is None else grid.num_workers
    if grid is not None:
        grid.require(workers, "launch: mesh")
    return LaunchSpec(
        num_workers=workers,
        num_servers=servers,
        data_workers=_data_workers(data_workers),
        pace=_pace(pace, added, workers, servers),
        mesh=grid,
        env=added,
        threads=threads,
        timeout_s=timeout_s,
    )


def refuse_stuck_threads(threads: int) -> None:
    """Raise UsageError if a forked child cannot compute with several threads here.

    A child does not have the threads of torch's OpenMP pool in the parent, but waits for them for
    ever. torch cannot tell beforehand, so a child tries it.
    """
    if threads == 1 or "torch" not in sys.modules:
        return
    torch, pid = sys.modules["torch"], fork_quietly()
    if pid == 0:
        try:
            torch.set_num_threads(threads)
            torch.ones(1 << 20).exp_()
        finally:
            os._exit(0)
    deadline_s = time.monotonic() + _PROBE_S
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline_s:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise UsageError(
                f"launch(threads={threads}): torch has already computed with threads in this"
                " process, which a forked worker cannot use; call launch before that, or with"
                " threads=1"
            )
        time.sleep(0.005)


def _refuse_joined() -> None:
    job = sys.modules.get("paceline.runtime.job")
    if job is not None and job.joined() is not None:
        raise UsageError(
            "launch: this process has joined a job itself; call paceline.shutdown() first, or call"
            " paceline.init() only in the launched function"
        )


def _check_count(name: str, count: object, low: int, high: int) -> None:
    if not isinstance(count, int) or isinstance(count, bool) or not low <= count <= high:
        raise UsageError(f"launch({name}={count!r:.40}): expected an integer from {low} to {high}")


def _data_workers(counts: int | Sequence[int]) -> tuple[int, ...]:
    stages = (counts,) if isinstance(counts, int) else tuple(counts)
    if stages == (0,):
        return ()
    for count in stages:
        _check_count("data_workers", count, 1, MAX_DATA_WORKERS)
    return stages


def _check_env(env: Mapping[str, str]) -> None:
    for name, value in env.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise UsageError(f"launch(env=...): {name!r:.40}={value!r:.40}: expected two strings")
        if not name or "=" in name or "\0" in name + value:
            raise UsageError(
                f"launch(env=...): {name!r:.40} or its value is invalid for a variable"
            )
        if name in RESERVED:
            raise ConfigError(f"launch(env=...): launch sets {name} for each worker; leave it out")


def _mesh(mesh: str | None, env: Mapping[str, str]) -> Mesh | None:
    """Return the mesh that overrides the function's: the argument, else the environment's."""
    text = mesh if mesh is not None else requested_mesh({**inherited_environ(), **env})
    return None if text is None else Mesh.parse(text)


def _pace(pace: str | None, env: Mapping[str, str], workers: int, servers: int) -> Schedule | None:
    """Return the pace that overrides the function's: the argument, else the environment's."""
    text = pace if pace is not None else requested_pace({**inherited_environ(), **env})
    if text is None:
        return None
    spec = parse_schedule(text)
    check_pace(spec, servers, add="servers=1", given=f"servers={servers}")
    problem = spec.find_problem(workers, servers)
    if problem:
        raise ConfigError(problem)
    return spec
