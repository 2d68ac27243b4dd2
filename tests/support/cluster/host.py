"""A test host: own network, processes, host name, /dev/shm, /run, home directory. Same files.

The file system is that of this machine, as if all hosts had it over NFS.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from support.cluster.network import Network
from support.cluster.requirements import SEARCH

_NAMESPACES = ("--net", "--uts", "--ipc", "--mount", "--pid")
_INIT = Path(__file__).with_name("host_init.py")


@dataclasses.dataclass(frozen=True)
class HostProcess:
    """A process of a host; `pid` is its number on this machine, not the one that the host sees."""

    pid: int
    command: str
    environ: Mapping[str, str] = dataclasses.field(repr=False)


class Host:
    """One host; `boot` starts it, `power_off` and `kill` end it as failures do."""

    def __init__(
        self, name: str, number: int, network: Network, directory: Path, names: Mapping[str, str]
    ) -> None:
        self.name, self.number, self._network = name, number, network
        self.home, self._log = directory / name, directory / f"{name}.init.log"
        (self.home / ".ssh").mkdir(parents=True, mode=0o700)
        self._daemons: dict[int, str] = {}  # process 1, and those that `start_daemon` started
        self._own_files(directory, names)
        self._init: subprocess.Popen[bytes] | None = None
        self._starters: list[subprocess.Popen[Any]] = []

    def _own_files(self, directory: Path, names: Mapping[str, str]) -> None:
        etc = directory / f"{self.name}.etc"
        etc.mkdir()
        me = os.getuid()
        users = [line.split(":") for line in Path("/etc/passwd").read_text().splitlines()]
        for user in users:
            if user[2] == str(me):
                user[5:] = [
                    str(self.home),
                    "/bin/bash" if Path("/bin/bash").exists() else "/bin/sh",
                ]
        lines = [f"{address} {name}" for name, address in names.items()]
        texts = {
            "/etc/hosts": "\n".join(["127.0.0.1 localhost", "::1 localhost", *lines, ""]),
            "/etc/passwd": "\n".join([*(":".join(user) for user in users), ""]),
            "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
            "/proc/sys/kernel/random/boot_id": f"{uuid.uuid4()}\n",
        }
        self._files = {}
        for target, text in texts.items():
            (etc / Path(target).name).write_text(text)
            self._files[str(etc / Path(target).name)] = target

    @property
    def address(self) -> str:
        return self._network.address(self.number)

    @property
    def address6(self) -> str:
        return self._network.address6(self.number)

    @property
    def environ(self) -> dict[str, str]:
        """Return the environment of a person who has just logged in."""
        return {"HOME": str(self.home), "USER": "root", "LANG": "C.UTF-8", "PATH": SEARCH}

    def boot(self) -> None:
        """Start the host, and give it its address."""
        new = ["unshare", *_NAMESPACES, "--fork", "--kill-child", "--mount-proc"]
        # Also if this test process is killed while one of its children still has our end of stdin.
        command = ["setpriv", "--pdeathsig", "KILL", *new, sys.executable, "-I", str(_INIT)]
        with self._log.open("wb") as log:
            self._init = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
            )
        assert self._init.stdin is not None and self._init.stdout is not None
        wanted = {"name": self.name, "files": self._files}
        self._init.stdin.write(json.dumps(wanted).encode() + b"\n")
        self._init.stdin.flush()
        ready = self._init.stdout.readline() == b"ready\n"
        assert ready, f"host {self.name} does not start: {self._log.read_text()}"
        self._root = _child(self._init.pid)
        self._space = _pid_space(self._root)
        self._daemons = {self._root: "init"}
        self._network.plug(self.number, self._root)

    @property
    def is_up(self) -> bool:
        return self._init is not None

    def enter(self, cwd: str | Path | None = None) -> list[str]:
        """Return the beginning of a command on the host, in a directory (its home by default)."""
        there = f"--wdns={self.home if cwd is None else cwd}"
        return ["nsenter", "--target", str(self._root), *_NAMESPACES, there, "--"]

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command on the host; see `pid_of` for its process number."""
        options["env"] = {**self.environ, **options.get("env", {})}
        return subprocess.Popen([*self.enter(options.pop("cwd", None)), *command], **options)

    @staticmethod
    def pid_of(started: subprocess.Popen[Any]) -> int:
        """Return the number on this machine of what `popen` started: `nsenter` is its parent."""
        return _child(started.pid)

    def run(self, command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command on the host and return its output as text."""
        options.setdefault("timeout", 60)
        options["env"] = {**self.environ, **options.get("env", {})}
        words = [*self.enter(options.pop("cwd", None)), *command]
        return subprocess.run(words, capture_output=True, text=True, check=False, **options)

    def start_daemon(self, command: Sequence[str], log: Path, **env: str) -> int:
        """Start what belongs to the host itself; return its process number on this machine."""
        with log.open("ab") as file:
            started = self.popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=env
            )
        pid = self.pid_of(started)
        self._daemons[pid] = command[0]
        self._starters.append(started)
        return pid

    def adopt_daemons(self) -> None:
        """Count everything that runs now as belonging to the host itself."""
        self._daemons.update({process.pid: process.command for process in self.processes()})

    # -- what runs there ------------------------------------------------------------------------

    def processes(self) -> list[HostProcess]:
        """Return every process of the host but for its daemons."""
        found = [_read(pid) for pid in self._pids() if pid not in self._daemons]
        return [process for process in found if process is not None]

    def _pids(self) -> list[int]:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        return [pid for pid in pids if _pid_space(pid) == self._space]

    def job_processes(self, job: str = "") -> list[HostProcess]:
        """Return processes that a job (or any job) left or still has on the host."""
        return [
            process
            for process in self.processes()
            if process.environ.get("PACELINE_JOB") == job
            or "paceline" in process.command
            or (not job and "PACELINE_JOB" in process.environ)
        ]

    def wait_until_idle(self, within_s: float = 10.0) -> None:
        """Wait until only the daemons are left on the host; raise with what is left otherwise."""
        deadline = time.monotonic() + within_s
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left, f"left on {self.name}: {left}"

    def named_memory(self) -> list[str]:
        """Return the names in the host's /dev/shm."""
        return sorted(os.listdir(f"/proc/{self._root}/root/dev/shm"))

    # -- faults ---------------------------------------------------------------------------------

    def kill(self) -> None:
        """Kill every process of the host with SIGKILL. Its kernel still closes the connections."""
        if self._init is None:
            return
        os.kill(self._root, signal.SIGKILL)
        self._init.communicate()
        for starter in self._starters:
            starter.wait()
        self._starters.clear()
        self._init = None
        self._network.unplug(self.number)

    def cut(self) -> None:
        """Pull the network cable: nothing arrives or leaves, and no connection is closed."""
        self._network.set_link(self.number, "down")

    def mend(self) -> None:
        """Plug the network cable in again."""
        self._network.set_link(self.number, "up")

    def power_off(self) -> None:
        """End the host without any farewell to the network."""
        self.cut()
        self.kill()


def _child(pid: int) -> int:
    """Return the only child of a process, which may not have started it yet."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if children:
            return int(children[0])
        time.sleep(0.002)
    raise AssertionError(f"process {pid} has started nothing")


def _pid_space(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""


def _read(pid: int) -> HostProcess | None:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None
    if state in "ZX":
        return None  # it has ended, and its parent has not asked yet
    pairs = [entry.decode(errors="replace").partition("=") for entry in environ if entry]
    command = b" ".join(words).decode(errors="replace").strip()
    return HostProcess(pid, command, {name: value for name, _, value in pairs})
