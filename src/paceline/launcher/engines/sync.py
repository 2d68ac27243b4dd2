"""--sync: copies the project onto each host, by rsync over ssh, else by tar over ssh.

The copy is in ~/.cache/paceline/projects/<name>-<hash of where it comes from>: the same directory
for each job of the project, so the next copy sends only changes, and a job finds the checkpoints of
the one before. Files that were deleted here since the last copy are deleted there; files that jobs
wrote there stay.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import shlex
import shutil
import socket
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import LaunchError
from paceline.launcher.engines.project_files import ProjectFiles, find_project_files
from paceline.launcher.engines.ssh import REMEDY, SshEngine
from paceline.launcher.engines.ssh_failures import SSH_FAILED, explain_ssh
from paceline.launcher.hosts.host_list import HostSlots

_PARENT = ".cache/paceline/projects"
_LIST = ".paceline-sync"  # in the copy: the names of its files
# Fixed texts but for the directory, which has no character that a shell could change.
_PREPARE = "mkdir -p {0} && cd {0} && pwd -P && {{ command -v rsync || echo; }}"
_UNPACK = "cd {0} && tar -xf -"
# Without GNU's comm, deleted files stay: a copy is worth more than its tidiness.
_FINISH = (
    "cd {0} && cat >{1}.new && {{ [ ! -f {1} ] || LC_ALL=C comm -z -23 {1} {1}.new | xargs -0 -r"
    " rm -f --; }} && mv -f {1}.new {1}"
)


@dataclass(frozen=True)
class SyncResult:
    """Where the copy is on each host, and the hosts without one with the reason."""

    directories: dict[str, str]
    problems: dict[str, str]
    num_files: int
    num_bytes: int
    after_s: float


class _Failed(Exception):
    """Why there is no copy on a host."""


async def sync_project(
    engine: SshEngine,
    directory: Path,
    hosts: Sequence[HostSlots],
    *,
    has_rsync: bool | None = None,
) -> SyncResult:
    """Copy a project onto hosts at the same time; their agents run there. Raises ConfigError."""
    begun = time.monotonic()
    files = find_project_files(directory)
    if has_rsync is None:
        has_rsync = shutil.which("rsync") is not None
    copies = (_Copy(engine, host, files).make(has_rsync) for host in hosts)
    results = await asyncio.gather(*copies, return_exceptions=True)
    directories: dict[str, str] = {}
    problems: dict[str, str] = {}
    for host, result in zip(hosts, results, strict=True):
        if isinstance(result, str):
            directories[host.name] = result
            engine.set_directory(host, result)
        elif isinstance(result, _Failed | LaunchError):
            problems[host.name] = str(result)
        else:
            raise result
    after_s = time.monotonic() - begun
    return SyncResult(directories, problems, len(files.names), files.num_bytes, after_s)


def target_of(directory: Path) -> str:
    """Return where the copy of a project is, relative to the home directory on a host."""
    origin = f"{socket.gethostname()}:{os.getuid()}:{directory}"
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", directory.name)[:40].lstrip("-.") or "project"
    return f"{_PARENT}/{name}-{hashlib.sha256(os.fsencode(origin)).hexdigest()[:12]}"


class _Copy:
    """The copy on one host."""

    def __init__(self, engine: SshEngine, host: HostSlots, files: ProjectFiles) -> None:
        self._ssh, self._host, self._files = engine.ssh(host), host, files
        self._target = target_of(files.directory)

    async def make(self, has_rsync: bool) -> str:
        """Copy all files; return the absolute directory on the host."""
        answer = await self._there(_PREPARE.format(self._target))
        # Before them there may be the output of a login shell's start-up files.
        path, their_rsync = [*answer.decode(errors="surrogateescape").splitlines(), "", ""][-4:-2]
        if has_rsync and their_rsync:
            await self._rsync()
        else:
            await self._tar()
        await self._there(_FINISH.format(self._target, _LIST), self._files.list_bytes)
        return path

    async def _rsync(self) -> None:
        name = f"[{self._host.name}]" if ":" in self._host.name else self._host.name
        # --checksum would read every file; size and time decide, as rsync always does.
        options = ["--archive", "--no-owner", "--no-group", "--from0", "--files-from=-"]
        words = ["rsync", *options, "-e", _rsync_words(self._ssh)]
        source = f"{self._files.directory}/"
        target = f"{name}:{self._target}/"
        await self._run([*words, "--", source, target], self._files.list_bytes)

    async def _tar(self) -> None:
        text = f"exec sh -c {shlex.quote(_UNPACK.format(self._target))}"
        child = await _start([*self._ssh, "--", self._host.name, text])
        assert child.stdin is not None and child.stdout is not None and child.stderr is not None
        reading = asyncio.gather(child.stdout.read(), child.stderr.read())
        pipe = child.stdin.get_extra_info("pipe")
        descriptor = os.dup(pipe.fileno())
        child.stdin.close()
        with contextlib.suppress(BrokenPipeError):  # its exit code and stderr say why
            await asyncio.to_thread(_pack, self._files, descriptor)
        errors = (await reading)[1]
        self._check(await child.wait(), errors)

    async def _there(self, script: str, data: bytes = b"") -> bytes:
        """Run a shell script on the host; return its output."""
        text = f"exec sh -c {shlex.quote(script)}"
        return await self._run([*self._ssh, "--", self._host.name, text], data)

    async def _run(self, command: Sequence[str], data: bytes) -> bytes:
        child = await _start(command)
        output, errors = await child.communicate(data)
        self._check(child.returncode or 0, errors)
        return output

    def _check(self, exit_code: int, errors: bytes) -> None:
        if exit_code == 0:
            return
        words = errors.decode(errors="replace").strip()
        if exit_code == SSH_FAILED:
            raise _Failed(explain_ssh(self._host, words))
        last = words.splitlines()[0] if words else f"exit code {exit_code}"
        raise _Failed(
            f"cannot copy the project to host {self._host.name}, ~/{self._target}: {last}; free"
            " space there, or share the directory between the hosts and leave out --sync"
        )


async def _start(command: Sequence[str]) -> asyncio.subprocess.Process:
    try:
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise LaunchError(f"cannot start {command[0]}: {error.strerror}; {REMEDY}") from error


def _rsync_words(words: Sequence[str]) -> str:
    """Return a command as rsync's -e reads it: quotes, but no backslashes."""
    return " ".join(f"'{word}'" if " " in word else word for word in words)


def _pack(files: ProjectFiles, descriptor: int) -> None:
    """Write the files as a tar archive; those that vanish meanwhile are left out."""
    os.set_blocking(descriptor, True)
    with (
        os.fdopen(descriptor, "wb") as pipe,
        tarfile.open(fileobj=pipe, mode="w|", format=tarfile.GNU_FORMAT) as archive,
    ):
        for name in files.names:
            with contextlib.suppress(FileNotFoundError):
                archive.add(files.directory / name, arcname=name, recursive=False)
