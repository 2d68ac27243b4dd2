"""A function in a real process of its own, with strace between it and the kernel.

The function prepares, and returns what is traced. `calls_of` lists the system calls of that;
`run_injected` runs it again and lets one of them fail, or kills the process as it makes it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.body import pack, receive, report, unpack
from support.ranks import Outcome, Ranks, started_processes

needs_strace = pytest.mark.skipif(
    shutil.which("strace") is None, reason="strace is not installed: nothing injects faults"
)
_MARK = "/proc/self/task"  # nothing else goes there
_CALL = re.compile(r"^(?:\d+ +)?(\w+)\((.*)$")


@dataclass(frozen=True)
class Call:
    """A system call of a traced function."""

    name: str
    number: int  # among those of its name, from 1
    rest: str  # arguments and result, as strace writes them


def _wait_and_call(packed: dict[str, Any], arguments: tuple[Any, ...]) -> Any:
    function = unpack(packed)
    prepared = function(*arguments)
    report("ready")
    assert receive() == "go"
    os.chdir(_MARK)  # the calls of interest begin here ...
    result = prepared()
    os.chdir(_MARK)  # ... and end here
    return result


@contextlib.contextmanager
def _traced(
    function: Callable[..., Callable[[], Any]], arguments: tuple[Any, ...], options: list[str]
) -> Iterator[Ranks]:
    environ = {"PATH": os.environ["PATH"]}
    with started_processes([(_wait_and_call, (pack(function), arguments))], [environ]) as ranks:
        assert ranks.receive(0) == "ready"
        command = ["strace", "-f", "-p", str(ranks.pids[0]), *options]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as strace:
            try:
                assert strace.stderr is not None
                line = strace.stderr.readline()
                assert "attached" in line, line + strace.stderr.read()
                ranks.send(0, "go")
                ranks.wait()
                yield ranks
            finally:
                strace.kill()


def calls_of(function: Callable[..., Callable[[], Any]], *arguments: Any) -> list[Call]:
    """Run what the function returns and give its system calls."""
    log = Path(f"/tmp/paceline-trace-{os.getpid()}")
    try:
        with _traced(function, arguments, ["-y", "-o", str(log)]) as ranks:
            ranks.values()
        lines = log.read_text().splitlines()
    finally:
        log.unlink(missing_ok=True)
    calls: list[Call] = []
    counts: dict[str, int] = {}
    for name, rest in (found.groups() for found in map(_CALL.match, lines) if found):
        counts[name] = counts.get(name, 0) + 1
        calls.append(Call(name, counts[name], rest))
    begin, end = (
        at for at, call in enumerate(calls) if call.name == "chdir" and _MARK in call.rest
    )
    return calls[begin + 1 : end]


def run_injected(
    call: Call, fault: str, function: Callable[..., Callable[[], Any]], *arguments: Any
) -> Outcome:
    """Run what the function returns; at that call: "signal=KILL" or "error=EIO"."""
    inject = f"inject={call.name}:{fault}:when={call.number}"
    options = ["-o", "/dev/null", "-e", f"trace={call.name}", "-e", inject]
    with _traced(function, arguments, options) as ranks:
        return ranks.wait()[0]
