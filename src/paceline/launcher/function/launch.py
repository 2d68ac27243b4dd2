"""`pl.launch`: run a function on several workers from a notebook, a test or a plain script.

    this process -- fork --> worker 0, worker 1, ... --> function(*args)
      |             `------> data worker 0, ...      --> function(*args), up to its first loop
      |             `------> server 0, ...           --> paceline.runtime.server_main
      `-- coordinator (a thread, started when all are forked); waits, and returns the results

The workers find their job in the environment, as under `paceline run`, so the function does what a
script does, beginning with `pl.init()`. The rules are the launcher's too: the first worker that
fails ends the job, consequences of its failure are told apart from it, and no process is left when
`launch` returns or raises.

Threads: may be called from any one thread; that thread must live until `launch` returns.
"""

from __future__ import annotations

import functools
import secrets
import selectors
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from paceline.control.client.rendezvous import CoordinatorThread
from paceline.control.transport.secret_file import create_secret_file, load_secret
from paceline.control.transport.sockets import close_in_children
from paceline.errors import LaunchError, UsageError
from paceline.launcher.environment import (
    SERVER_PATIENCE_S,
    JobAddresses,
    for_server,
    seat_variables,
    without_foreign_ranks,
)
from paceline.launcher.function.checks import Plan, checked, refuse_stuck_threads
from paceline.launcher.function.plain_values import unpack
from paceline.launcher.job_directory import JobDirectory
from paceline.launcher.local import CAUSE_GRACE_S, SERVERS_GRACE_S
from paceline.launcher.outcome import RankResult, failure_report
from paceline.launcher.processes.forked import NOT_PLAIN, VALUE, ForkedProcess
from paceline.launcher.processes.guard import end_processes
from paceline.launcher.processes.lifeline import Guard, hold_port
from paceline.launcher.processes.table import Crew
from paceline.runtime.config import EngineConfig, inherited_environ, runtime_dir
from paceline.runtime.process_names import Seat, names

_TICK_S = 0.1  # an end that closes no socket is seen after so long
_STOP_GRACE_S = 1.0


def launch(
    function: Callable[..., object],
    *args: object,
    workers: int | None = None,
    servers: int = 0,
    data_workers: int | Sequence[int] = 0,
    pace: str | None = None,
    mesh: str | None = None,
    env: Mapping[str, str] | None = None,
    threads: int = 1,
    timeout_s: float | None = None,
) -> list[object]:
    """Call `function(*args)` on `workers` new processes and return their results in rank order.

    How many: as the `mesh` has ("dp=2,tp=2", which wins over the function's own); without one, 2.

    The processes are forked: each begins as a copy of this one, with its data and random state.
    Results are plain: None, bool, int, float, str, bytes, lists and dicts of these (a tuple comes
    back as a list). A worker that fails ends all, and LaunchError has its traceback. `pace` wins
    over the function's own; `servers` parameter servers run beside the workers, and `data_workers`
    (or so many for each stage) make batches for `pl.shard(..., mode="pipeline")`; `env` is added to
    the environment; `threads` is for each worker's torch.

    >>> def my_rank():
    ...     pl.init()
    ...     return pl.rank()
    >>> pl.launch(my_rank, workers=3)
    [0, 1, 2]
    """
    counts = (workers, servers, data_workers)
    plan = checked(function, *counts, pace, mesh, env, threads, timeout_s)
    refuse_stuck_threads(threads)
    team = _Team(plan)
    with ExitStack() as held:
        try:
            team.start(functools.partial(function, *args), held)
            team.watch()
        finally:
            team.end()
    return team.results()


class _Team:
    """The processes of one launched function."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._job_id = secrets.token_hex(8)
        self._processes: list[ForkedProcess] = []
        self._crew: Crew[ForkedProcess] = Crew(self._on_end)
        self._selector = selectors.DefaultSelector()
        self._is_ended = False
        self._coordinator: CoordinatorThread | None = None
        self._deadline_s = time.monotonic() + (plan.timeout_s or float("inf"))

    def start(self, function: Callable[[], object], held: ExitStack) -> None:
        """Fork everybody, start the coordinator, and tell them where it is."""
        inherited = inherited_environ()
        config = EngineConfig.from_environ({**inherited, **self._plan.env})
        directory = held.enter_context(JobDirectory(Path(runtime_dir(inherited))))
        port = close_in_children(held.enter_context(hold_port()))
        secret_file = create_secret_file(directory.path)
        guard = Guard(self._job_id, directory.path)
        held.callback(guard.end)
        for seat in self._plan.seats:
            body = _serve if seat.is_server else function
            threads = self._plan.threads if seat.is_worker else 1
            process = ForkedProcess(seat, body, guard, threads=threads)
            self._processes.append(process)
            self._crew.add(process)
            self._selector.register(process.link, selectors.EVENT_READ, process)
        self._coordinator = coordinator = CoordinatorThread(
            self._job_id,
            load_secret(secret_file),
            len(self._processes),
            SERVER_PATIENCE_S if self._plan.num_servers else config.join_timeout_s,
            liveness_s=config.liveness_s,
        )
        held.callback(coordinator.stop)
        where = JobAddresses(
            job_id=self._job_id,
            coordinator=coordinator.start(),
            secret_file=str(secret_file),
            master_port=port.getsockname()[1],
        )
        for process in self._processes:
            process.tell(self._environ(inherited, process.seat, where))

    def _environ(
        self, inherited: Mapping[str, str], seat: Seat, where: JobAddresses
    ) -> dict[str, str]:
        plan = self._plan
        environ = without_foreign_ranks(inherited)
        counts = (plan.num_workers, plan.num_servers)
        environ.update(seat_variables(seat, *counts, where, plan.data_workers))
        if plan.mesh is not None:
            environ["PACELINE_MESH"] = str(plan.mesh)
        if seat.is_server:
            return for_server(environ, plan.env, None)
        environ["OMP_NUM_THREADS"] = str(plan.threads if seat.is_worker else 1)
        environ.update(plan.env)
        if plan.pace is not None:
            environ["PACELINE_PACE"] = str(plan.pace)
        return environ

    # -- watch -------------------------------------------------------------------------------

    def watch(self) -> None:
        """Return when everybody has ended or had the time to; raises LaunchError, UsageError."""
        while self._crew.workers:
            self._wait()
            if self._crew.failures():
                self._await_cause()
                break
            if time.monotonic() > self._deadline_s:
                left = names(process.seat for process in self._crew.workers)
                raise LaunchError(
                    f"{left} had not finished after timeout_s={self._plan.timeout_s:g}; all"
                    " processes were ended"
                )
        first = self._crew.first_cause(None)
        if first is not None:
            raise self._error(first)
        deadline_s = time.monotonic() + SERVERS_GRACE_S
        while self._crew.servers and time.monotonic() < deadline_s:
            self._wait()

    def _await_cause(self) -> None:
        """Give the cause time to appear when only consequences of it have been seen so far."""
        deadline_s = time.monotonic() + CAUSE_GRACE_S
        while self._crew.workers and time.monotonic() < deadline_s:
            if not all(result.is_consequence for result in self._crew.failures()):
                return
            self._wait()

    def _wait(self) -> None:
        """Take in what the processes send, and see who has ended."""
        for key, _ in self._selector.select(_TICK_S):
            process: ForkedProcess = key.data
            if not process.receive():
                self._selector.unregister(process.link)
        self._crew.look()

    def _on_end(self, process: ForkedProcess) -> None:
        """Let the job go on without a data worker that has joined: others make its batches."""
        joined = self._coordinator is not None and self._coordinator.coordinator.membership
        if process.seat.is_data_worker and joined:
            self._crew.excuse(process)

    # -- results -----------------------------------------------------------------------------

    def _error(self, first: RankResult) -> LaunchError | UsageError:
        process = self._processes[first.seat.rank]
        if process.kind == NOT_PLAIN:
            return UsageError(f"{first.seat}: {process.payload.decode(errors='replace')}")
        self.end()  # what became of the others belongs into the report
        report = failure_report(self._crew.results(), first, why_killed=None)
        return LaunchError(
            "\n".join(line.removeprefix("paceline: ") for line in report.splitlines())
        )

    def results(self) -> list[object]:
        """Return what the workers returned; call after `watch`."""
        values: list[object] = []
        for process in self._processes[: self._plan.num_workers]:
            if process.kind != VALUE:
                raise LaunchError(f"{process.seat} ended without a result (os._exit, or an exec)")
            values.append(unpack(process.payload))
        return values

    def end(self) -> None:
        """End every process and what it started; may be called twice."""
        if self._is_ended:
            return
        self._is_ended = True
        try:
            self._crew.tell_to_stop(self._crew.running)
            deadline_s = time.monotonic() + _STOP_GRACE_S
            while self._crew.running and time.monotonic() < deadline_s:
                self._wait()
        finally:
            self._crew.kill()
            end_processes(self._job_id, self._crew.pids)
            self._selector.close()
            self._crew.release()


def _serve() -> None:
    from paceline.runtime.server_main import main

    sys.exit(main())
