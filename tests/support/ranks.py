"""Start ranks from a test, act on them, and get what became of them.

Every rank is a process of its own session. When a test is done with its ranks, or they take too
long, what is left of those sessions is killed; a timeout shows where each rank was.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from multiprocessing.connection import wait as wait_any
from pathlib import Path
from typing import Any

from paceline.observe.telemetry.events import Event
from support.body import pack
from support.environs import Hosts, job_environs

TESTS = Path(__file__).resolve().parents[1]
SLOWER_ON_DEVICE = 5  # how much longer ranks may take there


@dataclass
class Outcome:
    """What became of one rank."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    status: int | None = None  # exit code; negative: the signal that ended it
    output: str = ""
    has_reported: bool = False

    def __str__(self) -> str:
        ended = "was still running" if self.status is None else f"ended with {self.status}"
        text = "".join(f"\n    | {line}" for line in self.output.splitlines()[-60:])
        return f"rank {self.rank} {ended}, error {self.error!r}{text}"


class RanksFailed(AssertionError):
    """Some rank did not end well; the message shows all of them."""

    def __init__(self, what: str, outcomes: Sequence[Outcome]) -> None:
        super().__init__("\n".join([what, *map(str, outcomes)]))
        self.outcomes = outcomes


class ForkServer:
    """The test session's side of forkserver.py; started when the first test needs it."""

    _instance: ForkServer | None = None

    @classmethod
    def get(cls) -> ForkServer:
        if cls._instance is None:
            cls._instance = cls()
        return cls._instance

    @classmethod
    def shut_down(cls) -> None:
        if cls._instance is not None:
            cls._instance._control.close()
            cls._instance._process.wait(timeout=60)
            cls._instance = None

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(100)
        paths = [*sys.path[:1], str(TESTS), *sys.path[1:]]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.forkserver", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(p for p in paths if p),
                "OMP_NUM_THREADS": "1",  # numpy would start threads when it is imported
                "OPENBLAS_NUM_THREADS": "1",
            },
        )
        theirs.close()
        self.statuses: dict[int, int] = {}
        self.pid: int = self._expect("ready")

    def start(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], environ: Mapping[str, str]
    ) -> Rank:
        """Fork a process that calls the function."""
        request = {
            "function": pack(function),
            "arguments": arguments,
            "environ": dict(environ),
        }
        ours, theirs = Pipe()
        output = tempfile.TemporaryFile()  # noqa: SIM115  # closed by the rank
        with theirs:
            fds = [theirs.fileno(), output.fileno()]
            socket.send_fds(self._control, [pickle.dumps(request)], fds)
        return Rank(self, self._expect("started"), ours, output)

    def children(self) -> list[int]:
        """Return every process that descends from the server and is there now."""
        listed = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        return [int(pid) for pid in listed.split()]

    @property
    def control(self) -> socket.socket:
        return self._control

    def read(self) -> tuple[Any, ...]:
        """Take one message of the server; exits are noted."""
        data = self._control.recv(1 << 16)
        assert data, "the fork server died"
        message: tuple[Any, ...] = pickle.loads(data)
        if message[0] == "ended":
            self.statuses[message[1]] = message[2]
        elif message[0] == "started":  # a pid that another process had before
            self.statuses.pop(message[1], None)
        return message

    def _expect(self, kind: str) -> Any:
        while (message := self.read())[0] != kind:
            pass
        return message[1]


class Rank:
    """One started process."""

    def __init__(self, server: ForkServer, pid: int, connection: Connection, output: Any) -> None:
        self._server, self.pid, self.connection, self._output = server, pid, connection, output
        self.told: list[Any] = []
        self.is_listening = True

    @property
    def status(self) -> int | None:
        return self._server.statuses.get(self.pid)

    def output(self) -> str:
        text = os.pread(self._output.fileno(), 1 << 22, 0)
        return text.decode(errors="replace")

    def close(self) -> None:
        if self.status is None:  # it may not have got as far as its own session
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        # The whole session: also what the rank forked.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.connection.close()
        self._output.close()


class Ranks:
    """The processes of one started job."""

    def __init__(self, processes: Sequence[Rank]) -> None:
        self._server = ForkServer.get()
        self._processes = list(processes)
        self._outcomes = [Outcome(rank) for rank in range(len(processes))]

    def add(self, process: Rank) -> None:
        """Take in one that was started later; it has the next rank."""
        self._outcomes.append(Outcome(len(self._processes)))
        self._processes.append(process)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        os.kill(self._processes[rank].pid, number)

    def kill_together(self, ranks: Sequence[int]) -> None:
        """Kill several of which none shall notice the death of another before its own."""
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for rank in ranks:
                self.kill(rank, number)

    def send(self, rank: int, thing: object) -> None:
        self._processes[rank].connection.send(thing)

    def receive(self, rank: int, timeout_s: float = 60.0) -> Any:
        """Wait for the next thing that the rank tells."""
        told = self._processes[rank].told
        self._watch(lambda: told or self._has_ended(rank), timeout_s)
        if not told:
            self._settle(rank)  # it may have told more before its end than was read by then
        if not told:
            self._fail(f"rank {rank} told nothing")
        return told.pop(0)

    def receive_all(self, timeout_s: float = 60.0) -> list[Any]:
        return [self.receive(rank, timeout_s) for rank in range(len(self._processes))]

    def output(self, rank: int) -> str:
        """Return what the rank has printed so far."""
        return self._processes[rank].output()

    def wait_for_output(self, rank: int, text: str, timeout_s: float = 60.0) -> None:
        """Wait until the rank has printed this."""
        deadline_s = time.monotonic() + timeout_s
        while not (has_ended := self._has_ended(rank)) and text not in self.output(rank):
            if time.monotonic() > deadline_s:
                self._fail(f"rank {rank} did not print {text!r}")
            self._watch(lambda: False, 0.02)
        if has_ended and text not in self.output(rank):
            self._fail(f"rank {rank} ended and did not print {text!r}")

    def wait(self, timeout_s: float = 60.0, ranks: Sequence[int] | None = None) -> list[Outcome]:
        """Wait until these ranks (default: all) have ended; return what became of them."""
        chosen = range(len(self._processes)) if ranks is None else ranks
        timeout_s *= SLOWER_ON_DEVICE if os.environ.get("TEST_ON_DEVICE") else 1
        if not self._watch(lambda: all(map(self._has_ended, chosen)), timeout_s):
            self._fail(f"ranks did not end within {timeout_s:g} s")
        return [self._settle(rank) for rank in chosen]

    def values(self, timeout_s: float = 60.0) -> list[Any]:
        """Wait; return what the bodies returned. RanksFailed if any rank failed."""
        outcomes = self.wait(timeout_s)
        if any(o.error or o.status for o in outcomes):
            raise RanksFailed("a rank failed", outcomes)
        return [o.value for o in outcomes]

    def close(self) -> None:
        for process in self._processes:
            process.close()
        # A killed process is gone when the server has reaped it.
        deadline_s = time.monotonic() + 60
        while any(p.status is None for p in self._processes) and time.monotonic() < deadline_s:
            self._server.read()

    def _has_ended(self, rank: int) -> bool:
        return self._processes[rank].status is not None

    def _settle(self, rank: int) -> Outcome:
        process, outcome = self._processes[rank], self._outcomes[rank]
        while process.is_listening and process.connection.poll():
            self._read(rank)
        outcome.status, outcome.output = process.status, process.output()
        if outcome.status == 0 and not outcome.has_reported:
            outcome.error = RuntimeError("it ended without a result")
        return outcome

    def _watch(self, is_enough: Callable[[], object], timeout_s: float) -> bool:
        """Handle what arrives until it is enough; False when the time is over."""
        deadline_s = time.monotonic() + timeout_s
        while not is_enough():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            by_source = {p.connection: r for r, p in enumerate(self._processes) if p.is_listening}
            for ready in wait_any([self._server.control, *by_source], left_s):
                if ready is self._server.control:
                    self._server.read()
                else:
                    self._read(by_source[ready])
        return True

    def _read(self, rank: int) -> None:
        process, outcome = self._processes[rank], self._outcomes[rank]
        try:
            kind, thing = process.connection.recv()
        except (EOFError, OSError):  # the end, or one in the middle of a message
            process.is_listening = False
            return
        if kind == "reported":
            process.told.append(thing)
        else:
            outcome.has_reported = True
            setattr(outcome, kind, thing)

    def _fail(self, what: str) -> None:
        for rank, process in enumerate(self._processes):
            if not self._has_ended(rank):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGCONT)
                    os.kill(process.pid, signal.SIGUSR1)  # prints its stacks
        time.sleep(0.5)
        raise RanksFailed(what, [self._settle(rank) for rank in range(len(self._processes))])


def _join_job(body: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    import paceline as pl

    if schedule := os.environ.get("TEST_ON_DEVICE"):
        from support.on_device import adapted

        os.environ["PACELINE_DEVICES"] = "laggard:" + ",".join("01" * 4)  # workers share them
        body = adapted(body, schedule)
    pl.init()
    return body(pl.world(), *arguments)


def _unpack_and_join(packed: dict[str, Any], arguments: tuple[Any, ...]) -> Any:
    from support.body import unpack

    return _join_job(unpack(packed), arguments)


@contextlib.contextmanager
def started_processes(
    functions: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]],
    environs: Sequence[Mapping[str, str]],
) -> Iterator[Ranks]:
    """Run one function per process, each in its own environment; nothing survives the block."""
    server, processes = ForkServer.get(), list[Rank]()
    try:
        for (function, arguments), environ in zip(functions, environs, strict=True):
            processes.append(server.start(function, arguments, environ))
        yield Ranks(processes)
    finally:
        Ranks(processes).close()


def _serve() -> None:
    from paceline.runtime import server_main as serve

    status = serve.main()
    assert status == 0, f"the server ended with {status}"


@contextlib.contextmanager
def started(
    world_size: int,
    body: Callable[..., Any],
    *arguments: Any,
    hosts: Hosts = 1,
    env: Mapping[str, str] | None = None,
    servers: int = 0,
    on_event: Callable[[Event], None] | None = None,
    data_workers: Sequence[int] = (),
) -> Iterator[Ranks]:
    """Start a job whose ranks call `body(world group, *arguments)`; yield it while it runs.

    With parameter servers those are the processes behind the workers. Data workers, which call the
    same body, come behind them.
    """
    with job_environs(world_size, hosts, env, servers, on_event, data_workers) as environs:
        joining = (_unpack_and_join, (pack(body), arguments))
        serving: tuple[Callable[..., Any], tuple[Any, ...]] = (_serve, ())
        calls = [joining] * world_size + [serving] * servers + [joining] * sum(data_workers)
        with started_processes(calls, environs) as ranks:
            yield ranks


def run_ranks(
    world_size: int,
    body: Callable[..., Any],
    *arguments: Any,
    hosts: Hosts = 1,
    env: Mapping[str, str] | None = None,
    servers: int = 0,
    data_workers: Sequence[int] = (),
    timeout_s: float = 60.0,
) -> list[Any]:
    """Run `body(world group, *arguments)` in every rank of a new job; return their results."""
    others: dict[str, Any] = {"servers": servers, "data_workers": data_workers}
    with started(world_size, body, *arguments, hosts=hosts, env=env, **others) as ranks:
        return ranks.values(timeout_s)[:world_size]


def outcomes_of(
    world_size: int,
    body: Callable[..., Any],
    *arguments: Any,
    hosts: Hosts = 1,
    env: Mapping[str, str] | None = None,
    servers: int = 0,
    data_workers: Sequence[int] = (),
    timeout_s: float = 60.0,
) -> list[Outcome]:
    """Like run_ranks, for ranks that may fail: return what became of each process."""
    others: dict[str, Any] = {"servers": servers, "data_workers": data_workers}
    with started(world_size, body, *arguments, hosts=hosts, env=env, **others) as ranks:
        return ranks.wait(timeout_s)


def run_processes(
    function: Callable[..., Any], environs: Sequence[Mapping[str, str]], timeout_s: float = 60.0
) -> list[Outcome]:
    """Run `function(number)` in one process per environment, without joining a job."""
    calls = [(function, (number,)) for number in range(len(environs))]
    with started_processes(calls, environs) as ranks:
        return ranks.wait(timeout_s)
