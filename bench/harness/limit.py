"""The limits of shared memory: compiles shm_limit.cc and its like and drives them as contenders."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from harness.ranks import ContenderFailed

MODES = ("two phases", "one pass", "owner writes", "owner streams")
_SOURCE = Path(__file__).resolve().parent.parent / "shm_limit.cc"


def compile_limit(scratch: Path, source: Path = _SOURCE) -> Path:
    """Build the program; raise ContenderFailed with the compiler's output."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise ContenderFailed("limit: no C++ compiler found (set CXX)")
    program = scratch / source.stem
    command = [compiler, "-O3", "-march=native", "-std=c++20", str(source), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if built.returncode != 0:
        raise ContenderFailed(f"limit: {source.name} does not compile here\n{built.stderr[:500]}")
    return program


class LimitRanks:
    """The running program: its ranks sleep between commands."""

    def __init__(self, program: Path, world: int) -> None:
        self.name, self.version = "limit", f"{program.name}.cc"
        self._process = subprocess.Popen(
            [str(program), str(world)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def turn(self, mode: int, num_bytes: int, warmup: int, samples: int) -> list[float]:
        """Return the seconds of each counted sample."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{mode} {num_bytes} {warmup + samples}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().split()
        if len(answer) != warmup + samples:
            raise ContenderFailed(f"limit: mode {mode} answered {answer[-1:] or 'nothing'}")
        return [float(text) for text in answer[warmup:]]

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
