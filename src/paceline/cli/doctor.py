"""`paceline doctor`: checks this machine and installation.

The report is plain aligned text for bug reports: it has versions, sizes and limits, no environment
variables and nothing secret. The exit code is 1 if something is broken.

Each section yields checks and changes nothing. `advice` says what to do about a problem; `broken`
means that jobs cannot run on this machine. Nothing here imports torch: versions come from the
metadata of the installed distributions.
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
from paceline.runtime.machine import cgroup_dirs, installed_version, memory, usable_cores

_SIOCGIFADDR = 0x8915
_MIN_OPEN_FILES = 256
_MIN_SHM_BYTES = 64 << 20
# Two interpreters that import torch on a busy machine; the job itself takes less than a second.
_SELF_TEST_LIMIT_S = 60.0
_DEVICE_LIMIT_S = 120.0


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    name: str
    found: str
    advice: str = ""
    broken: bool = False


def paceline_version() -> str:
    """Return the version of Paceline; a source tree that was never installed has none."""
    return installed_version("paceline") or "(not installed: running from a source tree)"


def versions() -> Iterator[Check]:
    """Paceline, the interpreter, and the required distributions."""
    yield Check("paceline", paceline_version())
    old = sys.version_info < (3, 10)
    yield Check("python", f"{platform.python_version()} ({sys.executable})", broken=old)
    yield Check("system", f"{platform.system()} {platform.release()} {platform.machine()}")
    for name, wanted in _requirements():
        version = installed_version(name)
        if version is None:
            yield Check(name, "missing", f"pip install '{name}{wanted}'", broken=True)
        elif not _satisfies(version, wanted):
            yield Check(name, version, f"pip install '{name}{wanted}'", broken=True)
        else:
            yield Check(name, version)


def _requirements() -> list[tuple[str, str]]:
    """Return (distribution, version range) of what Paceline requires."""
    try:
        lines = metadata.requires("paceline") or []
    except metadata.PackageNotFoundError:
        lines = ["torch", "numpy", "msgspec", "rich", "typer"]
    found = [re.match(r"([\w.-]+)\s*([^;]*)(;.*extra)?", line) for line in lines]
    return [(m[1], m[2].strip()) for m in found if m is not None and not m[3]]


def _satisfies(version: str, wanted: str) -> bool:
    """Compare release numbers with a range like ">=2.6,<2.14"; ignores other operators."""
    have = tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])
    for operator, bound in re.findall(r"(>=|<)\s*([\d.]+)", wanted):
        limit = tuple(int(part) for part in bound.strip(".").split("."))
        if (operator == ">=" and have < limit) or (operator == "<" and have >= limit):
            return False
    return True


def core_and_compiler() -> Iterator[Check]:
    """The C++ core, and the tools that can build it."""
    probe = [sys.executable, "-c", "import paceline._core as c; print(c.__file__)"]
    loaded = subprocess.run(probe, capture_output=True, text=True, timeout=60, check=False)
    if loaded.returncode == 0:
        yield Check("C++ core", Path(loaded.stdout.strip()).name)
    else:
        last = (loaded.stderr.strip().splitlines() or ["no message"])[-1]
        yield Check("C++ core", last, "build it: pip install -e . (needs g++ 11+)", broken=True)
    yield from _cipher()
    for tool in ("c++", "g++", "clang++", "cmake", "ninja"):
        path = shutil.which(tool)
        if path is not None:
            shown = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
            yield Check(tool, (shown.stdout.splitlines() or ["no version"])[0])
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        yield Check("compiler", "none", "needed to build from source: g++ 11+ or clang 14+")


def _cipher() -> Iterator[Check]:
    """What encrypts data between hosts."""
    # hashlib loads the interpreter's libcrypto, as a job does.
    show = "print(c.preferred_cipher(), 'from', c.cipher_library())"
    code = f"import hashlib, paceline._core as c; {show}"
    probe = [sys.executable, "-c", code]
    found = subprocess.run(probe, capture_output=True, text=True, timeout=60, check=False)
    if found.returncode == 0:
        shown = found.stdout.strip()
        is_slow = "libIPSec_MB.so.1 is not installed" in shown
        hint = "about 4 times as fast as OpenSSL 3.0 here: apt install libipsec-mb1"
        yield Check("encryption", shown, hint if is_slow else "")
    elif "OpenSSL" in found.stderr:
        yield Check("encryption", "no libcrypto", "install OpenSSL; jobs on one host need none")


def cores_and_memory() -> Iterator[Check]:
    """What this process may use, inside its container."""
    total, usable = os.cpu_count() or 1, usable_cores()
    yield Check("cores", f"{usable} usable of {total}")
    found = memory()
    free = memory_size(found.available_bytes)
    yield Check("memory", f"{free} free of {memory_size(found.total_bytes)}")
    limit = "none" if found.limit_bytes is None else memory_size(found.limit_bytes)
    groups = cgroup_dirs("memory")
    yield Check("memory limit", f"{limit} ({groups[0] if groups else 'no control group'})")


def shared_memory() -> Iterator[Check]:
    """memfd carries tensors between ranks; data loaders use /dev/shm."""
    try:
        fd = os.memfd_create("paceline-doctor")
        os.ftruncate(fd, 1 << 20)
        with mmap.mmap(fd, 1 << 20) as view:
            view[:4] = b"test"
        os.close(fd)
        yield Check("memfd", "works")
    except OSError as error:
        advice = "the engine needs memfd_create: Linux 3.17+, and a sandbox that allows it"
        yield Check("memfd", str(error.strerror), advice, broken=True)
    try:
        shm = os.statvfs("/dev/shm")
    except OSError as error:
        yield Check("/dev/shm", str(error.strerror), "data loaders with workers need it")
        return
    size, free = shm.f_blocks * shm.f_frsize, shm.f_bavail * shm.f_frsize
    advice = (
        "data loaders may fail; in a container raise --shm-size" if free < _MIN_SHM_BYTES else ""
    )
    yield Check("/dev/shm", f"{memory_size(free)} free of {memory_size(size)}", advice)


def network() -> Iterator[Check]:
    """Interfaces with their addresses, and whether a process can listen on loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            state = Path(f"/sys/class/net/{name}/operstate")
            words = [_address(probe, name) or "no IPv4 address"]
            if state.exists():
                words.append(state.read_text().strip())
            yield Check(f"interface {name}", ", ".join(words))
    try:
        with socket.create_server(("127.0.0.1", 0)):
            yield Check("loopback", "can listen on 127.0.0.1")
    except OSError as error:
        advice = "bring it up: ip link set lo up"
        yield Check("loopback", str(error.strerror), advice, broken=True)


def _address(probe: socket.socket, interface: str) -> str | None:
    request = struct.pack("256s", interface.encode()[:15])
    try:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
    except OSError:
        return None
    return socket.inet_ntoa(answer[20:24])


def limits() -> Iterator[Check]:
    """Limits of this shell that affect jobs, and the base of job directories."""
    open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = 0 <= open_files < _MIN_OPEN_FILES
    advice = f"raise it: ulimit -n {_MIN_OPEN_FILES * 16}" if few else ""
    yield Check("open files", _limit(resource.RLIMIT_NOFILE), advice, broken=few)
    yield Check("processes", _limit(resource.RLIMIT_NPROC))
    yield Check("locked memory", _limit(resource.RLIMIT_MEMLOCK))
    yield Check("address space", _limit(resource.RLIMIT_AS))
    base = Path(runtime_dir())
    try:
        with JobDirectory(base):
            yield Check("job directory", str(base))
    except PacelineError as error:
        yield Check("job directory", str(base), str(error), broken=True)


def _limit(kind: int) -> str:
    words = [
        "unlimited" if v == resource.RLIM_INFINITY else str(v) for v in resource.getrlimit(kind)
    ]
    return f"{words[0]} (hard limit {words[1]})"


_SECTIONS: tuple[tuple[str, Callable[[], Iterator[Check]]], ...] = (
    ("versions", versions),
    ("core", core_and_compiler),
    ("machine", cores_and_memory),
    ("shared memory", shared_memory),
    ("network", network),
    ("limits", limits),
)


def doctor(*, run_self_test: bool, with_device: bool = False) -> int:
    """Print the report; return 1 when something is broken, else 0."""
    problems: list[Check] = []
    for title, checks in _SECTIONS:
        problems += _section(title, checks())
    if with_device:
        problems += _section("device", device())
    if run_self_test:
        problems += _section("self-test", self_test())
    sys.stdout.write("\n")
    for check in problems:
        grade = "broken" if check.broken else "note"
        sys.stdout.write(f"{grade}: {check.name}: {check.found}. {check.advice}\n")
    is_broken = any(check.broken for check in problems)
    if not is_broken:
        hint = "" if run_self_test else "; `paceline doctor --run` also tests the engine"
        sys.stdout.write(f"ok: nothing is broken{hint}\n")
    return 1 if is_broken else 0


def _section(title: str, checks: Iterable[Check]) -> list[Check]:
    """Print one section; return the checks that need attention."""
    sys.stdout.write(f"{title}\n")
    problems = []
    for check in checks:
        mark = "!" if check.broken else " "
        sys.stdout.write(f"{mark} {check.name:<16} {check.found}\n")
        sys.stdout.flush()
        if check.broken or check.advice:
            problems.append(check)
    return problems


def device() -> Iterator[Check]:
    """The accelerators: copies, their order, and overlap (cli/device_check.py)."""
    command = [sys.executable, "-m", "paceline.cli.device_check"]
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=_DEVICE_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        found = f"no answer within {_DEVICE_LIMIT_S:.0f} s"
        yield Check("device", found, f"run it yourself: {' '.join(command[1:])}", broken=True)
        return
    for text in ended.stdout.splitlines():
        name, found, advice = text.split("\t")
        yield Check(name.removeprefix("!"), found, advice, broken=name.startswith("!"))
    if ended.returncode != 0:
        last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
        advice = f"run it yourself: {' '.join(command[1:])}"
        yield Check("device", f"ended with {ended.returncode}: {last}", advice, broken=True)


def self_test() -> Iterator[Check]:
    """Run a real job of two ranks on the engine and check its numbers."""
    command = [
        sys.executable,
        "-m",
        "paceline",
        "run",
        "-n",
        "2",
        "-m",
        "paceline.cli.selftest",
    ]
    started_s = time.monotonic()
    try:
        job = subprocess.run(
            command, capture_output=True, text=True, timeout=_SELF_TEST_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        found = f"not finished after {_SELF_TEST_LIMIT_S:.0f} s"
        yield Check("2 ranks", found, f"run it yourself: {' '.join(command[1:])}", broken=True)
        return
    took = f"{time.monotonic() - started_s:.1f} s"
    for line in job.stdout.splitlines():
        if line.startswith("[0] "):
            yield Check("", line[4:])
    if job.returncode == 0:
        yield Check("2 ranks", f"passed in {took}")
    else:
        for line in job.stderr.splitlines()[-20:]:
            yield Check("", line)
        advice = "the lines above show which rank failed and where"
        yield Check("2 ranks", f"failed with code {job.returncode} after {took}", advice, True)
