"""config.json: every value that a run was given, and where it came from.

    {"pace": {"value": "ssp:3", "origin": "command line"}, ...}

Origins: "command line", "environment NAME", "script" (it decides; null until it has),
"default", and "found" for facts about the machine. Variables that were set with --env are listed by
name only: a value may be a password.
"""

from __future__ import annotations

import importlib.metadata
import platform
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType

import msgspec

from paceline.launcher.spec import RunSpec
from paceline.runtime.config import EngineConfig
from paceline.runtime.machine import usable_cores

COMMAND_LINE, DEFAULT, SCRIPT, FOUND = "command line", "default", "script", "found"


class Setting(msgspec.Struct, frozen=True):
    """One value and its origin."""

    value: object
    origin: str


def configuration(
    spec: RunSpec,
    environ: Mapping[str, str],
    directory: Path,
    cwd: Path,
    settled: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Setting]:
    """Resolve everything that is known about a run, in the order in which to read it; `settled` is
    what the script had to decide itself."""
    asked = _Asked(spec, environ)
    settings = {
        "script": Setting(spec.target, COMMAND_LINE),
        "arguments": Setting(list(spec.arguments), COMMAND_LINE),
        "workers": asked.option("num_workers", spec.num_workers, or_else="mesh"),
        "servers": asked.option("servers", spec.num_servers),
        "data_workers": asked.option("data_workers", list(spec.data_workers)),
        "replicas": asked.option("replicas", spec.servers.replicas),
        "pace": asked.either(spec.pace, spec.pace_in(environ), "PACELINE_PACE"),
        "precision": asked.either(spec.precision, spec.precision_in(environ), "PACELINE_PRECISION"),
        "mesh": asked.either(spec.mesh, spec.mesh_in(environ), "PACELINE_MESH"),
        "trace": asked.either(
            spec.trace, spec.trace_in(environ), "PACELINE_TRACE", otherwise=DEFAULT
        ),
        "threads_per_worker": asked.threads(),
        "threads_per_server": asked.option("server_threads", spec.servers.threads or 2),
        **_elastic(asked),
        "grace_s": asked.option("grace_s", spec.grace_s),
        "detach": asked.option("detach", spec.is_detached),
        "metrics_port": asked.option("metrics_port", spec.metrics_port),
        "log_dir": asked.log_dir(directory),
        "env": asked.option("env", sorted(spec.env)),
        **_engine(asked),
        **_found(cwd),
    }
    for name, value in settled.items():
        if name in settings and settings[name].value is None:
            settings[name] = Setting(value, SCRIPT)
    return settings


def encode(settings: Mapping[str, Setting]) -> bytes:
    """Write config.json, a line for each setting."""
    lines = [
        b"  " + msgspec.json.encode(name) + b": " + msgspec.json.encode(setting)
        for name, setting in settings.items()
    ]
    return b"{\n" + b",\n".join(lines) + b"\n}\n"


class _Asked:
    """What was asked for, by option or variable."""

    def __init__(self, spec: RunSpec, environ: Mapping[str, str]) -> None:
        self.spec, self.environ = spec, environ

    def option(self, name: str, value: object, *, or_else: str = "") -> Setting:
        """Tell an option that was given (or follows from another one) from its default."""
        is_given = name in self.spec.given or or_else in self.spec.given
        return Setting(value, COMMAND_LINE if is_given else DEFAULT)

    def either(
        self, option: object, resolved: object, variable: str, *, otherwise: str = SCRIPT
    ) -> Setting:
        """An option, a variable, or what the script says."""
        if option is not None:
            return Setting(str(option), COMMAND_LINE)
        value = None if resolved is None else str(resolved)
        return Setting(value, self.variable(variable) or otherwise)

    def variable(self, name: str) -> str:
        """Say who set a variable of the ranks; "" when nobody did."""
        if name in self.spec.env:
            return COMMAND_LINE
        return f"environment {name}" if self.environ.get(name) else ""

    def threads(self) -> Setting:
        if self.spec.threads_per_worker is not None:
            return Setting(self.spec.threads_per_worker, COMMAND_LINE)
        origin = self.variable("OMP_NUM_THREADS")
        if origin:
            return Setting({**self.environ, **self.spec.env}["OMP_NUM_THREADS"], origin)
        return Setting(max(1, usable_cores() // self.spec.num_workers), DEFAULT)

    def log_dir(self, directory: Path) -> Setting:
        if "log_dir" in self.spec.given:
            return Setting(str(directory), COMMAND_LINE)
        exported = self.environ.get("PACELINE_LOG_DIR")
        return Setting(str(directory), "environment PACELINE_LOG_DIR" if exported else DEFAULT)


def _elastic(asked: _Asked) -> dict[str, Setting]:
    plan = asked.spec.elastic
    if plan is None:
        return {"elastic": Setting(False, DEFAULT)}
    return {
        "elastic": Setting(True, COMMAND_LINE),
        "min_workers": asked.option("min_workers", plan.min_workers),
        "max_workers": asked.option("max_workers", plan.max_workers),
        "max_servers": asked.option("max_servers", plan.max_servers),
        "on_loss": asked.option("on_loss", plan.on_loss),
        "restarts": asked.option("restarts", plan.restarts),
    }


def _engine(asked: _Asked) -> dict[str, Setting]:
    config = EngineConfig.from_environ({**asked.environ, **asked.spec.env})
    settings = {}
    for field in fields(config):
        origin = asked.variable(f"PACELINE_{field.name.upper()}")
        settings[field.name] = Setting(getattr(config, field.name), origin or DEFAULT)
    return settings


def _found(cwd: Path) -> dict[str, Setting]:
    facts = {
        "paceline_version": version_of("paceline"),
        "python_version": platform.python_version(),
        "torch_version": version_of("torch"),
        "host": socket.gethostname(),
        "cores": usable_cores(),
        "directory": str(cwd),
        "git_commit": git_commit(cwd),
    }
    return {name: Setting(value, FOUND) for name, value in facts.items()}


def version_of(distribution: str) -> str | None:
    """Return the version of what is installed, without importing it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


_COMMIT = re.compile(r"[0-9a-f]{40,64}\Z")


def git_commit(directory: Path) -> str | None:
    """Return the commit that is checked out at a directory, or None where there is none."""
    with suppress(OSError, ValueError):
        for place in (directory, *directory.parents):
            if (place / ".git").exists():
                return _checked_out(_git_dir(place / ".git"))
    return None


def _git_dir(dot_git: Path) -> Path:
    """Follow the file that stands for the directory in worktrees and submodules."""
    if dot_git.is_dir():
        return dot_git
    target = dot_git.read_text().removeprefix("gitdir:").strip()
    return (dot_git.parent / target).resolve()


def _checked_out(git_dir: Path) -> str | None:
    head = (git_dir / "HEAD").read_text().strip()
    if not head.startswith("ref:"):
        return _known(head)
    reference = head.removeprefix("ref:").strip()
    common = git_dir
    if (git_dir / "commondir").exists():  # of a worktree: branches are with the main one
        common = (git_dir / (git_dir / "commondir").read_text().strip()).resolve()
    if ".." in reference:
        return None
    if (common / reference).is_file():
        return _known((common / reference).read_text().strip())
    for line in (common / "packed-refs").read_text().splitlines():
        commit, _, name = line.partition(" ")
        if name == reference:
            return _known(commit)
    return None


def _known(text: str) -> str | None:
    return text if _COMMIT.match(text) else None
