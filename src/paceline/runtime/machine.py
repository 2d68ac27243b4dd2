"""The limits of this machine for a process: cores, memory, and signs of the OOM killer; versions;
when a process started.

A container has less than the machine, so every figure is the smaller of the machine's and the
control group's. Both cgroup versions are read. A file that does not exist means "no such limit
here"; an unknown figure is None, never a guess.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

# cgroup v1 writes "no limit" as a number near 2**63, rounded down to pages.
_UNLIMITED_BYTES = 1 << 60


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution, without importing it; None if missing."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def _number(path: Path) -> int | None:
    text = _read(path)
    if text is None or not text.strip().isdigit():
        return None
    return int(text)


def _field(path: Path, name: str) -> int | None:
    """Return the number after `name` in a file of "name number" lines."""
    for line in (_read(path) or "").splitlines():
        words = line.split()
        if len(words) == 2 and words[0] == name and words[1].isdigit():
            return int(words[1])
    return None


def cgroup_dirs(controller: str, root: Path = Path("/"), pid: int | str = "self") -> list[Path]:
    """Return a process's directories for one controller, innermost first, up to the mount.

    A process inside a container often sees a path that is not mounted there. Then the mount itself
    is the container's own group, and the only one.
    """
    mount, inner = root / "sys/fs/cgroup", ""
    for line in (_read(root / f"proc/{pid}/cgroup") or "").splitlines():
        number, names, path = line.split(":", 2)
        if controller in names.split(","):
            mount, inner = root / "sys/fs/cgroup" / controller, path
            break
        if number == "0":
            inner = path
    here = mount / inner.strip("/")
    chain = [here, *here.parents]
    return [d for d in chain if d.is_relative_to(mount) and d.is_dir()]


def usable_cores(root: Path = Path("/")) -> int:
    """Return how many cores this process may use: its affinity, limited by a CPU quota."""
    cores = len(os.sched_getaffinity(0))
    for directory in cgroup_dirs("cpu", root):
        quota = _number(directory / "cpu.cfs_quota_us")
        period = _number(directory / "cpu.cfs_period_us")
        words = (_read(directory / "cpu.max") or "").split()
        if len(words) == 2 and words[0].isdigit():
            quota, period = int(words[0]), int(words[1])
        if quota and period:
            cores = min(cores, -(-quota // period))
    return max(1, cores)


def processor_s(pid: int, root: Path = Path("/")) -> float | None:
    """Return how much processor time a process has used; None if it is gone."""
    fields = (_read(root / f"proc/{pid}/stat") or "").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else None


@dataclass(frozen=True, kw_only=True)
class MemoryInfo:
    """Bytes of memory: total and available on the machine, limit and peak of the control group."""

    total_bytes: int | None
    available_bytes: int | None
    limit_bytes: int | None
    peak_bytes: int | None


def memory(root: Path = Path("/")) -> MemoryInfo:
    """Return the machine's memory and the tightest control-group limit of this process."""
    meminfo: dict[str, int] = {}
    for line in (_read(root / "proc/meminfo") or "").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            meminfo[name] = int(words[0]) * 1024
    limit, peak = memory_limit(cgroup_dirs("memory", root))
    return MemoryInfo(
        total_bytes=meminfo.get("MemTotal"),
        available_bytes=meminfo.get("MemAvailable"),
        limit_bytes=limit,
        peak_bytes=peak,
    )


def memory_limit(directories: Sequence[Path]) -> tuple[int | None, int | None]:
    """Return the tightest limit of some control groups and the peak against it, in bytes."""
    limit, peak = None, None
    for directory in directories:
        for name in ("memory.max", "memory.limit_in_bytes"):
            found = _number(directory / name)
            if found is not None and found < min(limit or _UNLIMITED_BYTES, _UNLIMITED_BYTES):
                limit = found
                peak = _number(directory / "memory.peak") or _number(
                    directory / "memory.max_usage_in_bytes"
                )
    return limit, peak


def oom_kills(directories: Sequence[Path]) -> int:
    """Return the number of OOM kills in the first of some control groups; 0 if it is not shown."""
    for directory in directories[:1]:
        v2 = _field(directory / "memory.events", "oom_kill")
        v1 = _field(directory / "memory.oom_control", "oom_kill")
        return v2 or v1 or 0
    return 0


@dataclass(frozen=True)
class OomCount:
    """Number of OOM kills: in our control group, and on the machine."""

    group: int
    machine: int

    @classmethod
    def read(cls, root: Path = Path("/")) -> OomCount:
        """Return both counters; a counter that this kernel does not show is 0."""
        group = oom_kills(cgroup_dirs("memory", root))
        return cls(group, _field(root / "proc/vmstat", "oom_kill") or 0)

    def evidence_since(self, before: OomCount) -> str | None:
        """Return the evidence of an out-of-memory kill since `before`, or None."""
        if self.group > before.group:
            return "possibly out of memory: the OOM killer was active in this control group"
        if self.machine > before.machine:
            return "possibly out of memory: the OOM killer was active on this machine"
        return None


def process_start(pid: int) -> str | None:
    """Return when a process started, in clock ticks since boot, or None if there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
            after_name = stat.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    # Fields after the name start at number 3; 22 is the start time. A zombie no longer acts.
    return None if after_name[0] in "ZX" else after_name[19]


def boot_id() -> str:
    """Return an id of this machine since its last start; containers on it have the same."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()
