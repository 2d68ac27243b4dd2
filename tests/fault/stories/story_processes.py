"""Who is who among the processes of a job: "worker 2", "server 0", "coordinator", "launcher"."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from paceline.launcher.job_directory import directories
from paceline.launcher.job_registry import recorded_processes


def state_of(pid: int) -> str:
    """Return the letter of the kernel: R, S, T, ...; "" when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def is_alive(pid: int) -> bool:
    return state_of(pid) not in ("", "Z", "X")


def descendants(pid: int) -> Iterator[int]:
    """Yield all that a process has started, directly or not."""
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = task.read_text().split()
        except OSError:
            continue
        for child in children:
            yield int(child)
            yield from descendants(int(child))


def _environ(pid: int) -> dict[str, str]:
    try:
        data = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(item.partition("=")[::2] for item in data.split("\0") if item)


def having(variables: set[str]) -> list[int]:
    """Return all living processes that were started with these variables: NAME=VALUE."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        environ = {f"{name}={value}" for name, value in _environ(int(path.name)).items()}
        if variables <= environ and is_alive(int(path.name)):
            found.append(int(path.name))
    return found


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def find(who: str, launcher: int, runtime: Path) -> list[int]:
    """Return the living processes that have this name, the newest last."""
    if who == "launcher":
        return [launcher]
    below = sorted(set(descendants(launcher)))
    if who == "coordinator":
        return [pid for pid in below if "paceline.runtime.coordinator_main" in _command(pid)]
    role, _, number = who.partition(" ")
    # Newcomers may be forks of a warm process and have its environment on the outside.
    for directory in directories(runtime):
        known = [
            record.pid
            for record in recorded_processes(directory)
            if record.name.role == role and record.number == int(number) and record.is_alive
        ]
        if known:
            return known
    places = [(pid, _environ(pid)) for pid in below]
    wanted = {("worker", "worker"): "worker", ("server", "server"): "server"}
    return [
        pid
        for pid, environ in places
        if environ.get("PACELINE_RANK") == number
        and wanted.get((role, environ.get("PACELINE_ROLE", "worker"))) == role
        and is_alive(pid)
        and "PACELINE_COORDINATOR" in environ
    ]
