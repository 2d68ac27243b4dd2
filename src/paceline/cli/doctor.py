"""`paceline doctor`: what this machine and installation look like, and what is wrong with them.

The report is plain aligned text, meant to be pasted into a bug report: it holds versions, sizes and
limits, no environment variables and nothing secret. Exit code 1 when something is broken.

Each examination yields findings and changes nothing. A finding is a name and what was found.
`advice` says what to do when that is a problem; a problem that is `broken` means that jobs cannot
run on this machine as it is. Nothing here imports torch: versions come from the metadata of the
installed distributions.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import platform
import re
import resource
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from paceline.errors import PacelineError
from paceline.launcher.job_directory import JobDirectory
from paceline.runtime.config import runtime_dir
from paceline.runtime.formatting import memory_size
from paceline.runtime.machine import cgroup_dirs, memory, usable_cores

_SIOCGIFADDR = 0x8915
_MIN_OPEN_FILES = 256
_MIN_SHM_BYTES = 64 << 20
# Two interpreters that import torch on a busy machine; the job itself takes less than a second.
_SELF_TEST_LIMIT_S = 60.0


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    found: str
    advice: str = ""
    broken: bool = False


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def paceline_version() -> str:
    """Return our own version; a source tree that was never installed has none."""
    return installed_version("paceline") or "(not installed: running from a source tree)"


def versions() -> Iterator[Finding]:
    """Ourselves, the interpreter, and the distributions that we need."""
    yield Finding("paceline", paceline_version())
    old = sys.version_info < (3, 10)
    yield Finding("python", f"{platform.python_version()} ({sys.executable})", broken=old)
    yield Finding("system", f"{platform.system()} {platform.release()} {platform.machine()}")
    for name, wanted in _requirements():
        version = installed_version(name)
        if version is None:
            yield Finding(name, "missing", f"pip install '{name}{wanted}'", broken=True)
        elif not _satisfies(version, wanted):
            yield Finding(name, version, f"pip install '{name}{wanted}'", broken=True)
        else:
            yield Finding(name, version)


def _requirements() -> list[tuple[str, str]]:
    """Return (distribution, version range) of what paceline needs to run."""
    try:
        lines = metadata.requires("paceline") or []
    except metadata.PackageNotFoundError:
        lines = ["torch", "numpy", "msgspec", "rich", "typer"]
    found = [re.match(r"([\w.-]+)\s*([^;]*)(;.*extra)?", line) for line in lines]
    return [(m[1], m[2].strip()) for m in found if m is not None and not m[3]]


def _satisfies(version: str, wanted: str) -> bool:
    """Compare release numbers with a range like ">=2.6,<2.14"; other operators are let pass."""
    have = tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])
    for operator, bound in re.findall(r"(>=|<)\s*([\d.]+)", wanted):
        limit = tuple(int(part) for part in bound.strip(".").split("."))
        if (operator == ">=" and have < limit) or (operator == "<" and have >= limit):
            return False
    return True


def core_and_compiler() -> Iterator[Finding]:
    """The C++ core as built, and what could build it."""
    probe = [sys.executable, "-c", "import paceline._core as c; print(c.__file__)"]
    loaded = subprocess.run(probe, capture_output=True, text=True, timeout=60, check=False)
    if loaded.returncode == 0:
        yield Finding("C++ core", Path(loaded.stdout.strip()).name)
    else:
        last = (loaded.stderr.strip().splitlines() or ["no message"])[-1]
        yield Finding("C++ core", last, "build it: pip install -e . (needs g++ 11+)", broken=True)
    for tool in ("c++", "g++", "clang++", "cmake", "ninja"):
        path = shutil.which(tool)
        if path is not None:
            told = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
            yield Finding(tool, (told.stdout.splitlines() or ["no version"])[0])
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        yield Finding("compiler", "none", "needed to build from source: g++ 11+ or clang 14+")


def cores_and_memory() -> Iterator[Finding]:
    """What this process may use, inside whatever container it is in."""
    total, usable = os.cpu_count() or 1, usable_cores()
    yield Finding("cores", f"{usable} usable of {total}")
    found = memory()
    free = memory_size(found.available_bytes)
    yield Finding("memory", f"{free} free of {memory_size(found.total_bytes)}")
    limit = "none" if found.limit_bytes is None else memory_size(found.limit_bytes)
    groups = cgroup_dirs("memory")
    yield Finding("memory limit", f"{limit} ({groups[0] if groups else 'no control group'})")


def shared_memory() -> Iterator[Finding]:
    """memfd carries tensors between ranks; /dev/shm is what data loaders use."""
    try:
        fd = os.memfd_create("paceline-doctor")
        os.ftruncate(fd, 1 << 20)
        with mmap.mmap(fd, 1 << 20) as view:
            view[:4] = b"test"
        os.close(fd)
        yield Finding("memfd", "works")
    except OSError as error:
        advice = "the engine needs memfd_create: Linux 3.17+, and a sandbox that allows it"
        yield Finding("memfd", str(error.strerror), advice, broken=True)
    try:
        shm = os.statvfs("/dev/shm")
    except OSError as error:
        yield Finding("/dev/shm", str(error.strerror), "data loaders with workers need it")
        return
    size, free = shm.f_blocks * shm.f_frsize, shm.f_bavail * shm.f_frsize
    advice = (
        "data loaders may fail; in a container raise --shm-size" if free < _MIN_SHM_BYTES else ""
    )
    yield Finding("/dev/shm", f"{memory_size(free)} free of {memory_size(size)}", advice)


def network() -> Iterator[Finding]:
    """Interfaces with their addresses, and whether loopback can be listened on."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            state = Path(f"/sys/class/net/{name}/operstate")
            words = [_address(probe, name) or "no IPv4 address"]
            if state.exists():
                words.append(state.read_text().strip())
            yield Finding(f"interface {name}", ", ".join(words))
    try:
        with socket.create_server(("127.0.0.1", 0)):
            yield Finding("loopback", "can listen on 127.0.0.1")
    except OSError as error:
        advice = "bring it up: ip link set lo up"
        yield Finding("loopback", str(error.strerror), advice, broken=True)


def _address(probe: socket.socket, interface: str) -> str | None:
    request = struct.pack("256s", interface.encode()[:15])
    try:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
    except OSError:
        return None
    return socket.inet_ntoa(answer[20:24])


def limits() -> Iterator[Finding]:
    """Limits of this shell that jobs run into, and the place for job directories."""
    open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = 0 <= open_files < _MIN_OPEN_FILES
    advice = f"raise it: ulimit -n {_MIN_OPEN_FILES * 16}" if few else ""
    yield Finding("open files", _limit(resource.RLIMIT_NOFILE), advice, broken=few)
    yield Finding("processes", _limit(resource.RLIMIT_NPROC))
    yield Finding("locked memory", _limit(resource.RLIMIT_MEMLOCK))
    yield Finding("address space", _limit(resource.RLIMIT_AS))
    base = Path(runtime_dir())
    try:
        with JobDirectory(base):
            yield Finding("job directory", str(base))
    except PacelineError as error:
        yield Finding("job directory", str(base), str(error), broken=True)


def _limit(kind: int) -> str:
    words = [
        "unlimited" if v == resource.RLIM_INFINITY else str(v) for v in resource.getrlimit(kind)
    ]
    return f"{words[0]} (hard limit {words[1]})"


_SECTIONS: tuple[tuple[str, Callable[[], Iterator[Finding]]], ...] = (
    ("versions", versions),
    ("core", core_and_compiler),
    ("machine", cores_and_memory),
    ("shared memory", shared_memory),
    ("network", network),
    ("limits", limits),
)


def doctor(*, run_self_test: bool) -> int:
    """Print the report; return 1 when something is broken, else 0."""
    problems: list[Finding] = []
    for title, examine in _SECTIONS:
        problems += _section(title, examine())
    if run_self_test:
        problems += _section("self-test", self_test())
    sys.stdout.write("\n")
    for finding in problems:
        grade = "broken" if finding.broken else "note"
        sys.stdout.write(f"{grade}: {finding.name}: {finding.found}. {finding.advice}\n")
    is_broken = any(finding.broken for finding in problems)
    if not is_broken:
        hint = "" if run_self_test else "; `paceline doctor --run` tries the engine"
        sys.stdout.write(f"ok: nothing is broken{hint}\n")
    return 1 if is_broken else 0


def _section(title: str, findings: Iterable[Finding]) -> list[Finding]:
    """Print one section as it comes; return the findings that need attention."""
    sys.stdout.write(f"{title}\n")
    problems = []
    for finding in findings:
        mark = "!" if finding.broken else " "
        sys.stdout.write(f"{mark} {finding.name:<16} {finding.found}\n")
        sys.stdout.flush()
        if finding.broken or finding.advice:
            problems.append(finding)
    return problems


def self_test() -> Iterator[Finding]:
    """Run a real job of two ranks on the engine and check its numbers."""
    command = [
        sys.executable,
        "-m",
        "paceline",
        "run",
        "-n",
        "2",
        "-m",
        "paceline.launcher.selftest",
    ]
    started_s = time.monotonic()
    try:
        job = subprocess.run(
            command, capture_output=True, text=True, timeout=_SELF_TEST_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        found = f"no end after {_SELF_TEST_LIMIT_S:.0f} s"
        yield Finding("2 ranks", found, f"run it yourself: {' '.join(command[1:])}", broken=True)
        return
    took = f"{time.monotonic() - started_s:.1f} s"
    for line in job.stdout.splitlines():
        if line.startswith("[0] "):
            yield Finding("", line[4:])
    if job.returncode == 0:
        yield Finding("2 ranks", f"passed in {took}")
    else:
        for line in job.stderr.splitlines()[-20:]:
            yield Finding("", line)
        advice = "the lines above say which rank failed and where"
        yield Finding("2 ranks", f"failed with code {job.returncode} after {took}", advice, True)
