"""Pages of documentation as programs: their blocks of code, and ranks that run them.

The blocks of Python on a page are one script, from top to bottom. A block with a title (a file's
name behind the language) belongs to the script of that name instead. A block of `diff` is two
scripts, before and after. `sh` is what a person types; `console`, `text` and others are only shown.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.environs import base_environ, job_environs
from support.ranks import RanksFailed, _serve, started_processes

ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"^```(\w*)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"(?:^|\s+)#\s.*$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    language: str
    title: str
    text: str


@dataclass(frozen=True)
class Setup:
    """How a script is started: with so many workers, or alone (0)."""

    workers: int = 2
    servers: int = 0
    data_workers: Sequence[int] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    like_torchrun: bool = False  # also set what torch.distributed wants to know
    without: str = ""  # leave out the block that has this in it
    result: str = "None"  # an expression, evaluated at the end of the script on each rank


def blocks_of(page: str) -> list[Block]:
    """Return the blocks of a page, named from the root of the project."""
    text = (ROOT / page).read_text()
    found = [Block(*groups) for groups in _FENCE.findall(text)]
    assert len(found) * 2 == len(re.findall(r"^```", text, re.MULTILINE)), f"{page}: odd fences"
    return found


def scripts_of(page: str, without: str = "") -> dict[str, str]:
    """Return the scripts of a page by title; that of blocks without one is ""."""
    scripts: dict[str, str] = {}
    for block in blocks_of(page):
        if block.language == "python" and not (without and without in block.text):
            scripts[block.title] = scripts.get(block.title, "") + block.text
        elif block.language == "diff" and block.title:
            for sign, when in (("-", "before"), ("+", "after")):
                kept = [line[1:] for line in block.text.splitlines() if line[:1] in (sign, " ", "")]
                scripts[f"{when} {block.title}"] = "\n".join(kept) + "\n"
    return scripts


def commands_of(page: str) -> list[list[str]]:
    """Return what a person types, as words, without comments and the prompt."""
    commands = []
    for block in blocks_of(page):
        lines = _COMMENT.sub("", block.text).replace("\\\n", " ").splitlines()
        if block.language == "console":
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        elif block.language != "sh":
            continue
        commands += [words for line in lines if (words := _words(line))]
    return commands


def _words(line: str) -> list[str]:
    split = shlex.shlex(line, posix=True, punctuation_chars=";|&")
    split.whitespace_split = True
    return list(split)


def without_comments(text: str) -> str:
    """Return code as it would be in any language: comments and the space before them gone."""
    return _COMMENT.sub("", text).rstrip()


def run_script(text: str, setup: Setup) -> list[Any]:
    """Run a script on the ranks of a new job, in a new directory; return the result of each."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "script.py").write_text(text)
        call = (_run_here, (directory, setup.result))
        if not setup.workers:
            return _values([call], [{**base_environ(directory), **setup.env}])
        environs = job_environs(
            setup.workers, 1, setup.env, setup.servers, None, setup.data_workers
        )
        calls = [call] * setup.workers + [(_serve, ())] * setup.servers
        with environs as found:
            if setup.like_torchrun:
                found = [environ | _for_torch(rank, found) for rank, environ in enumerate(found)]
            values = _values(calls + [call] * sum(setup.data_workers), found)
        return values[: setup.workers]


def _for_torch(rank: int, all_of_them: Sequence[object]) -> dict[str, str]:
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29500 + os.getpid() % 10000)}
    return {"RANK": str(rank), "WORLD_SIZE": str(len(all_of_them)), **rendezvous}


def _values(calls: Sequence[Any], environs: Sequence[Mapping[str, str]]) -> list[Any]:
    with started_processes(calls, environs) as ranks:
        outcomes = ranks.wait(timeout_s=90)
    if any(outcome.error or outcome.status for outcome in outcomes):
        raise RanksFailed("a rank failed", outcomes)
    return [(outcome.value, outcome.output) for outcome in outcomes]


def _run_here(directory: str, result: str) -> Any:
    """In a rank: be the program `script.py` of that directory."""
    os.chdir(directory)
    sys.argv = ["script.py"]
    sys.path.insert(0, directory)
    main = types.ModuleType("__main__")
    path = Path(directory, "script.py")
    main.__file__ = str(path)
    sys.modules["__main__"] = main
    exec(compile(path.read_text(), str(path), "exec"), vars(main))
    return eval(result, vars(main))
