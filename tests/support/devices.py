"""Jobs on the test device `laggard` (testing/laggard): its build, and ranks that use it.

Every body runs in a process of its own. The device cannot be unloaded, a process that has it would
choose it for all later tests, and a touch of closed memory ends the process that did it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from support.body import pack, unpack
from support.environs import Hosts, job_environs
from support.ranks import Outcome, RanksFailed, _serve, started_processes

LAGGARD = Path(__file__).resolve().parents[2] / "testing" / "laggard"
BUILD = LAGGARD / "build.py"
IMPOSSIBLE = 3  # status of build.py
SCHEDULES = "1,lazy"  # what runs without --laggard-schedules


def build_device() -> str | None:
    """Build the device if that is necessary. Return the reason if it cannot be built here."""
    ended = subprocess.run([sys.executable, BUILD], capture_output=True, text=True)
    if ended.returncode == IMPOSSIBLE:
        return ended.stdout.strip()
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    return None


def load_device() -> Any:
    """In a rank: register the device. Return the package `laggard`."""
    if str(LAGGARD) not in sys.path:
        sys.path.insert(0, str(LAGGARD))
    import laggard

    return laggard


def require_no_wait_of_the_script(laggard: Any) -> None:
    """Fail if a thread other than an errand thread has waited for the device since the last call.

    The writer of checkpoints waits in the same way.
    """
    for wait in laggard.take_synchronizations():
        is_thread = " in _run\n" in wait.stack and "forkserver.py" not in wait.stack
        is_errand = "wait_on_host" in wait.stack or is_thread
        assert "device_route.py" in wait.stack and is_errand, wait.stack


def device_path(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a script that does `import laggard` itself."""
    others = [p for p in environ.get("PYTHONPATH", "").split(":") if p]
    return {**environ, "PYTHONPATH": ":".join([str(LAGGARD), *others])}


def _on_schedule(
    schedule: str, races_are_errors: bool, call: Callable[..., Any], arguments: tuple[Any, ...]
) -> Any:
    """Run a call on one schedule; fail if the vector clocks found a race meanwhile."""
    laggard = load_device()
    from laggard.pytest_plugin import schedule_named

    with schedule_named(schedule):
        value = call(*arguments)
    races = laggard.take_races()
    if races and races_are_errors:
        raise AssertionError(f"laggard found {len(races)} races; the first:\n{races[0].report}")
    return value


def _join_and_run(
    schedule: str, races_are_errors: bool, packed: dict[str, Any], arguments: tuple[Any, ...]
) -> Any:
    def call() -> Any:
        import paceline as pl

        pl.init()
        return unpack(packed)(pl.world(), *arguments)

    return _on_schedule(schedule, races_are_errors, call, ())


def _run_alone(
    schedule: str, races_are_errors: bool, packed: dict[str, Any], arguments: tuple[Any, ...]
) -> Any:
    return _on_schedule(schedule, races_are_errors, unpack(packed), arguments)


def device_outcomes(
    world_size: int,
    body: Callable[..., Any],
    *arguments: Any,
    schedule: str,
    races_are_errors: bool = True,
    hosts: Hosts = 1,
    env: Mapping[str, str] | None = None,
    servers: int = 0,
    timeout_s: float = 90.0,
) -> list[Outcome]:
    """Run `body(world group, *arguments)` in the workers of a job; return what became of each.

    Workers have the device `laggard`, and run on the schedule; servers are on the CPU. A worker in
    which a race was found fails with the report.
    """
    with job_environs(world_size, hosts, env, servers) as environs:
        joining = (_join_and_run, (schedule, races_are_errors, pack(body), arguments))
        calls: list[Any] = [joining] * world_size + [(_serve, ())] * servers
        with started_processes(calls, environs) as ranks:
            return ranks.wait(timeout_s)


def run_on_device(
    world_size: int, body: Callable[..., Any], *arguments: Any, schedule: str, **options: Any
) -> list[Any]:
    """Like device_outcomes; return the workers' results. RanksFailed if any process failed."""
    outcomes = device_outcomes(world_size, body, *arguments, schedule=schedule, **options)
    return _values(outcomes)[:world_size]


def run_alone_on_device(
    body: Callable[..., Any],
    *arguments: Any,
    schedule: str,
    races_are_errors: bool = True,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 60.0,
) -> Any:
    """Run `body(*arguments)` in one process that has the device and is in no job."""
    call = (_run_alone, (schedule, races_are_errors, pack(body), arguments))
    with started_processes([call], [{**os.environ, **(env or {})}]) as ranks:
        [value] = _values(ranks.wait(timeout_s))
    return value


def _values(outcomes: Sequence[Outcome]) -> list[Any]:
    if any(o.error or o.status for o in outcomes):
        raise RanksFailed("a rank failed on the device", outcomes)
    return [o.value for o in outcomes]
