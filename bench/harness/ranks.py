"""The controller's side of one contender: a set of rank processes that live for the whole run.

Every rank connects back over a Unix socket (also from another network namespace, and under mpirun,
which keeps stdin for itself), then sleeps until it is asked for a turn. The time of a sample runs
from the moment when the last rank starts until the last one has finished.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import barrier

_BENCH = Path(__file__).resolve().parent.parent
_START_S = 120.0
_TURN_S = 180.0


class ContenderFailed(Exception):
    """A contender could not start or did not finish a turn; the others continue without it."""


@dataclass(frozen=True)
class Process:
    """One command to start: a rank, or a launcher that starts all of them.

    The module that a rank runs and its arguments are appended to `argv`.
    """

    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)


class RankSet:
    """The running ranks of one contender."""

    def __init__(
        self,
        name: str,
        kind: str,
        world: int,
        processes: Sequence[Process],
        scratch: Path,
        *,
        module: str = "harness.rank",
        leaves_behind: str = "",  # a pattern of files in /dev/shm that the contender forgets
        polls: bool = False,  # it uses the cores while it waits: it is stopped between its turns
    ) -> None:
        self.name, self.version, self.has_failed = name, "?", False
        self._leaves_behind, self._polls = leaves_behind, polls
        self._world, self._log = world, scratch / f"{name}.log"
        socket_path, barrier_path = scratch / f"{name}.sock", scratch / f"{name}.barrier"
        barrier.create(barrier_path, world)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(socket_path))
        self._listener.listen(world)
        tail = ["-m", module, kind, str(socket_path), str(barrier_path)]
        self._connections: list[socket.socket] = []
        self._lines: list[Any] = []
        with self._log.open("ab") as log:
            self._processes = [self._start(process, tail, log) for process in processes]

    def _start(self, process: Process, tail: list[str], log: Any) -> subprocess.Popen[bytes]:
        python_path = os.pathsep.join(
            filter(None, [str(_BENCH), process.env.get("PYTHONPATH", os.environ.get("PYTHONPATH"))])
        )
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            **process.env,
            "PYTHONPATH": python_path,
        }
        return subprocess.Popen(
            [*process.argv, *tail],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

    def wait_until_ready(self) -> None:
        """Wait until all ranks have joined their job and connected."""
        give_up_s = time.monotonic() + _START_S
        self._listener.settimeout(0.2)
        while len(self._connections) < self._world:
            if any(process.poll() is not None for process in self._processes):
                raise self.failure("a rank ended while it started")
            if time.monotonic() > give_up_s:
                raise self.failure(f"not ready after {_START_S:.0f} s")
            with suppress(TimeoutError):
                self._connections.append(self._listener.accept()[0])
        for connection in self._connections:
            connection.setblocking(True)
            self._lines.append(connection.makefile("rw", encoding="utf-8"))
        self.version = [self._read(lines)["version"] for lines in self._lines][0]
        self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes if self._polls else ():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)

    def turn(self, request: dict[str, Any]) -> list[float]:
        """Let all ranks do one turn; return the seconds of each sample."""
        answers = self.ask(request)
        if any(answer["wrong"] for answer in answers):
            raise self.failure(f"wrong results in {request['op']} of {request['bytes']} bytes")
        samples = zip(*(answer["spans"] for answer in answers), strict=True)
        return [max(end for _, end in s) - max(start for start, _ in s) for s in samples]

    def ask(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        """Send all ranks the same request; return what each of them answers."""
        text = json.dumps(request) + "\n"
        self._signal(signal.SIGCONT)
        try:
            for lines in self._lines:
                lines.write(text)
                lines.flush()
        except OSError as error:
            raise self.failure(f"a rank ended: {error}") from None
        self._wait_for_all()
        answers = [self._read(lines) for lines in self._lines]
        self._signal(signal.SIGSTOP)
        return answers

    def _wait_for_all(self) -> None:
        """Sleep until every rank has answered: reading blindly could wait for a hanging one."""
        give_up_s = time.monotonic() + _TURN_S
        with selectors.DefaultSelector() as selector:
            for connection in self._connections:
                selector.register(connection, selectors.EVENT_READ)
            while selector.get_map():
                ready = selector.select(max(0.0, give_up_s - time.monotonic()))
                if not ready:
                    raise self.failure(f"no answer after {_TURN_S:.0f} s")
                for key, _ in ready:
                    selector.unregister(key.fileobj)

    def _read(self, lines: Any) -> dict[str, Any]:
        line = lines.readline()
        if not line:
            raise self.failure("a rank ended")
        return json.loads(line)  # type: ignore[no-any-return]

    def failure(self, what: str) -> ContenderFailed:
        """Return an error that says what went wrong and what the ranks printed last."""
        self.has_failed = True
        said = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-12:]
        return ContenderFailed("\n    ".join([f"{self.name}: {what}", *said]))

    def stop(self) -> None:
        """End all ranks: closing the sockets asks them to, a signal makes sure."""
        self._signal(signal.SIGCONT)
        for connection in self._connections:
            with suppress(OSError):  # already gone
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self._listener.close()
        for process in self._processes:
            _end(process)
        if self._leaves_behind:
            for path in Path("/dev/shm").glob(self._leaves_behind):
                path.unlink(missing_ok=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(timeout=5.0)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
