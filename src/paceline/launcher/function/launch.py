"""`pl.launch`: run a function on several workers from a notebook, a test or a plain script.

    this process -- fork --> worker 0, worker 1, ... --> function(*args)
      |             `------> data worker 0, ...      --> function(*args), up to its first loop
      |             `------> server 0, ...           --> paceline.runtime.server_main
      `-- coordinator (a thread, started when all are forked); waits, and returns the results

The workers find their job in the environment, as under `paceline run`, so the function does what a
script does, beginning with `pl.init()`. The rules are those of `paceline run` too: the first worker
that fails ends the job, the error names the cause and not its consequences, and no process is left
when `launch` returns or raises.

Threads: may be called from any one thread; that thread must live until `launch` returns.
"""

from __future__ import annotations

import functools
import selectors
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from paceline.control.client.rendezvous import CoordinatorThread
from paceline.control.coordinator.coordinator import Coordinator
from paceline.control.transport.auth import create_secret_file, load_secret
from paceline.control.transport.sockets import close_in_children
from paceline.errors import LaunchError, UsageError
from paceline.launcher.environment import (
    SERVER_PATIENCE_S,
    JobAddresses,
    for_server,
    process_variables,
    without_foreign_ranks,
)
from paceline.launcher.function.checks import LaunchSpec, checked, refuse_stuck_threads
from paceline.launcher.function.forked import NOT_PLAIN, VALUE, ForkedProcess
from paceline.launcher.function.plain_values import unpack
from paceline.launcher.job import CAUSE_GRACE_S, SERVERS_GRACE_S
from paceline.launcher.job_directory import JobDirectory
from paceline.launcher.job_registry import new_job_id
from paceline.launcher.job_resources import hold_port
from paceline.launcher.outcome import failure_report
from paceline.launcher.processes.guard import Guard
from paceline.launcher.processes.table import ProcessResult, ProcessTable
from paceline.runtime.config import EngineConfig, inherited_environ, runtime_dir
from paceline.runtime.process_names import ProcessName, names

_TICK_S = 0.1  # an exit that closes no socket is noticed after this time
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

    `workers` defaults to the size of the `mesh`, or 2. `mesh` ("dp=2,tp=2") and `pace` override
    the function's own.

    The processes are forked: each begins as a copy of this one, with its data and random state.
    Results are plain: None, bool, int, float, str, bytes, lists and dicts of these (a tuple comes
    back as a list). If a worker fails, all are ended, and LaunchError has its traceback. `servers`
    is the number of parameter servers, and `data_workers` (one number, or one for each stage) that
    of the processes that make batches for `pl.shard(..., mode="pipeline")`. `env` is added to the
    environment; `threads` is the number of threads of each worker's torch.

    >>> def my_rank():
    ...     pl.init()
    ...     return pl.rank()
    >>> pl.launch(my_rank, workers=3)
    [0, 1, 2]
    """
    counts = (workers, servers, data_workers)
    spec = checked(function, *counts, pace, mesh, env, threads, timeout_s)
    refuse_stuck_threads(threads)
    job = _FunctionJob(spec)
    with ExitStack() as held:
        try:
            job.start(functools.partial(function, *args), held)
            job.watch()
        finally:
            job.end()
    return job.results()


class _FunctionJob:
    """The processes of one launched function. Works without an event loop, in any thread."""

    def __init__(self, spec: LaunchSpec) -> None:
        self._spec = spec
        self._job_id = new_job_id()
        self._workers: list[ForkedProcess] = []
        self._processes: ProcessTable[ForkedProcess] = ProcessTable(self._job_id, self._on_end)
        self._selector = selectors.DefaultSelector()
        self._is_ended = False
        self._coordinator: CoordinatorThread | None = None
        self._deadline_s = time.monotonic() + (spec.timeout_s or float("inf"))

    def start(self, function: Callable[[], object], held: ExitStack) -> None:
        """Fork all processes, start the coordinator, and send them its address."""
        inherited = inherited_environ()
        config = EngineConfig.from_environ({**inherited, **self._spec.env})
        directory = held.enter_context(JobDirectory(Path(runtime_dir(inherited))))
        port = close_in_children(held.enter_context(hold_port()))
        secret_file = create_secret_file(directory.path)
        self._processes.guard = guard = Guard(self._job_id, directory.path)
        held.callback(guard.end)
        forked: list[ForkedProcess] = []
        for name in self._spec.process_names:
            body = _serve if name.is_server else function
            threads = self._spec.threads if name.is_worker else 1
            process = ForkedProcess(name, body, guard, threads=threads)
            forked.append(process)
            self._processes.add(process)
            self._selector.register(process.link, selectors.EVENT_READ, process)
        self._workers = forked[: self._spec.num_workers]
        self._coordinator = coordinator = CoordinatorThread(
            Coordinator(
                self._job_id,
                load_secret(secret_file),
                len(forked),
                SERVER_PATIENCE_S if self._spec.num_servers else config.join_timeout_s,
                liveness_s=config.liveness_s,
            )
        )
        held.callback(coordinator.stop)
        where = JobAddresses(
            job_id=self._job_id,
            coordinator=coordinator.start(),
            secret_file=str(secret_file),
            master_port=port.getsockname()[1],
        )
        for process in forked:
            process.send_environ(self._environ(inherited, process.name, where))

    def _environ(
        self, inherited: Mapping[str, str], name: ProcessName, where: JobAddresses
    ) -> dict[str, str]:
        spec = self._spec
        environ = without_foreign_ranks(inherited)
        counts = (spec.num_workers, spec.num_servers)
        environ.update(process_variables(name, *counts, where, spec.data_workers))
        if spec.mesh is not None:
            environ["PACELINE_MESH"] = str(spec.mesh)
        if name.is_server:
            return for_server(environ, spec.env, None)
        environ["OMP_NUM_THREADS"] = str(spec.threads if name.is_worker else 1)
        environ.update(spec.env)
        if spec.pace is not None:
            environ["PACELINE_PACE"] = str(spec.pace)
        return environ

    # -- watch -------------------------------------------------------------------------------

    def watch(self) -> None:
        """Wait until all processes have ended; raises LaunchError, UsageError."""
        while self._processes.workers:
            self._wait()
            if self._processes.failures():
                self._await_cause()
                break
            if time.monotonic() > self._deadline_s:
                left = names(process.name for process in self._processes.workers)
                raise LaunchError(
                    f"{left} had not finished after timeout_s={self._spec.timeout_s:g}; all"
                    " processes were ended"
                )
        first = self._processes.first_cause(None)
        if first is not None:
            raise self._error(first)
        deadline_s = time.monotonic() + SERVERS_GRACE_S
        while self._processes.servers and time.monotonic() < deadline_s:
            self._wait()

    def _await_cause(self) -> None:
        """Wait for the cause to exit while all known failures are consequences."""
        deadline_s = time.monotonic() + CAUSE_GRACE_S
        while self._processes.workers and time.monotonic() < deadline_s:
            if not all(result.is_consequence for result in self._processes.failures()):
                return
            self._wait()

    def _wait(self) -> None:
        """Read what the processes send, and notice exits."""
        for key, _ in self._selector.select(_TICK_S):
            process: ForkedProcess = key.data
            if not process.receive():
                self._selector.unregister(process.link)
        self._processes.check()

    def _on_end(self, process: ForkedProcess) -> None:
        """Continue without a data worker after all have joined: others make its batches."""
        joined = self._coordinator is not None and self._coordinator.coordinator.membership
        if process.name.is_data_worker and joined:
            self._processes.excuse(process)

    # -- results -----------------------------------------------------------------------------

    def _error(self, first: ProcessResult) -> LaunchError | UsageError:
        process = self._processes.find(first.name.rank)
        if process is not None and process.kind == NOT_PLAIN:
            return UsageError(f"{first.name}: {process.payload.decode(errors='replace')}")
        self.end()  # the report has a line for every process
        report = failure_report(self._processes.results(), first, why_killed=None)
        return LaunchError(
            "\n".join(line.removeprefix("paceline: ") for line in report.splitlines())
        )

    def results(self) -> list[object]:
        """Return what the workers returned; call after `watch`."""
        values: list[object] = []
        for process in self._workers:
            if process.kind != VALUE:
                raise LaunchError(f"{process.name} ended without a result (os._exit, or an exec)")
            values.append(unpack(process.payload))
        return values

    def end(self) -> None:
        """End every process and what it started; may be called twice."""
        if self._is_ended:
            return
        self._is_ended = True
        try:
            self._processes.ask_to_stop(self._processes.running)
            deadline_s = time.monotonic() + _STOP_GRACE_S
            while self._processes.running and time.monotonic() < deadline_s:
                self._wait()
        finally:
            self._processes.kill_all()
            self._selector.close()
            self._processes.release()


def _serve() -> None:
    from paceline.runtime.server_main import main

    sys.exit(main())
