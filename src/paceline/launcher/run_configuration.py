"""config.json: every setting of a run, and where it came from.

    {"pace": {"value": "ssp:3", "origin": "command line"}, ...}

Origins: "command line", "environment NAME", "script" (it decides; null until it has),
"default", and "found" for facts about the machine. Variables set with --env are listed by name
only: a value may be a password.
"""

from __future__ import annotations

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
from paceline.runtime.machine import installed_version, usable_cores

COMMAND_LINE, DEFAULT, SCRIPT, FOUND = "command line", "default", "script", "found"


class ConfigValue(msgspec.Struct, frozen=True):
    """One value and its origin."""

    value: object
    origin: str


def configuration(
    spec: RunSpec,
    environ: Mapping[str, str],
    directory: Path,
    cwd: Path,
    decided: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, ConfigValue]:
    """Return all settings of a run, in the order in which to read them; `decided` are the values
    that the script chose."""
    given = _Given(spec, environ)
    settings = {
        "script": ConfigValue(spec.target, COMMAND_LINE),
        "arguments": ConfigValue(list(spec.arguments), COMMAND_LINE),
        "workers": given.option("num_workers", spec.num_workers, or_else="mesh"),
        "servers": given.option("servers", spec.num_servers),
        "data_workers": given.option("data_workers", list(spec.data_workers)),
        "replicas": given.option("replicas", spec.servers.replicas),
        "pace": given.either(spec.pace, spec.pace_in(environ), "PACELINE_PACE"),
        "max_wire": given.either(
            spec.max_wire, spec.max_wire_in(environ), "PACELINE_MAX_WIRE", otherwise=DEFAULT
        ),
        "precision": given.either(spec.precision, spec.precision_in(environ), "PACELINE_PRECISION"),
        "mesh": given.either(spec.mesh, spec.mesh_in(environ), "PACELINE_MESH"),
        "trace": given.either(
            spec.trace, spec.trace_in(environ), "PACELINE_TRACE", otherwise=DEFAULT
        ),
        "devices": given.either(
            spec.devices, spec.devices_in(environ), "PACELINE_DEVICES", otherwise=DEFAULT
        ),
        "threads_per_worker": given.threads(),
        "threads_per_server": given.option("server_threads", spec.servers.threads or 2),
        **_elastic(given),
        "grace_s": given.option("grace_s", spec.grace_s),
        "detach": given.option("detach", spec.is_detached),
        **_hosts(given),
        "metrics_port": given.option("metrics_port", spec.metrics_port),
        "log_dir": given.log_dir(directory),
        "env": given.option("env", sorted(spec.env)),
        **_engine(given),
        **_found(cwd),
    }
    for name, value in decided.items():
        if name in settings and settings[name].value is None:
            settings[name] = ConfigValue(value, SCRIPT)
    return settings


def encode(settings: Mapping[str, ConfigValue]) -> bytes:
    """Return config.json, a line for each setting."""
    lines = [
        b"  " + msgspec.json.encode(name) + b": " + msgspec.json.encode(setting)
        for name, setting in settings.items()
    ]
    return b"{\n" + b",\n".join(lines) + b"\n}\n"


class _Given:
    """What was given by option or variable."""

    def __init__(self, spec: RunSpec, environ: Mapping[str, str]) -> None:
        self.spec, self.environ = spec, environ

    def option(self, name: str, value: object, *, or_else: str = "") -> ConfigValue:
        """Return an option that was given (or follows from `or_else`), or its default."""
        is_given = name in self.spec.given or or_else in self.spec.given
        return ConfigValue(value, COMMAND_LINE if is_given else DEFAULT)

    def either(
        self, option: object, resolved: object, variable: str, *, otherwise: str = SCRIPT
    ) -> ConfigValue:
        """Return an option, a variable, or what the script decides."""
        if option is not None:
            return ConfigValue(str(option), COMMAND_LINE)
        value = None if resolved is None else str(resolved)
        return ConfigValue(value, self.variable(variable) or otherwise)

    def variable(self, name: str) -> str:
        """Return the origin of a variable of the ranks; "" if it is not set."""
        if name in self.spec.env:
            return COMMAND_LINE
        return f"environment {name}" if self.environ.get(name) else ""

    def threads(self) -> ConfigValue:
        if self.spec.threads_per_worker is not None:
            return ConfigValue(self.spec.threads_per_worker, COMMAND_LINE)
        origin = self.variable("OMP_NUM_THREADS")
        if origin:
            return ConfigValue({**self.environ, **self.spec.env}["OMP_NUM_THREADS"], origin)
        return ConfigValue(max(1, usable_cores() // self.spec.num_workers), DEFAULT)

    def log_dir(self, directory: Path) -> ConfigValue:
        if "log_dir" in self.spec.given:
            return ConfigValue(str(directory), COMMAND_LINE)
        exported = self.environ.get("PACELINE_LOG_DIR")
        return ConfigValue(str(directory), "environment PACELINE_LOG_DIR" if exported else DEFAULT)


def _elastic(given: _Given) -> dict[str, ConfigValue]:
    plan = given.spec.elastic
    if plan is None:
        return {"elastic": ConfigValue(False, DEFAULT)}
    return {
        "elastic": ConfigValue(True, COMMAND_LINE),
        "min_workers": given.option("min_workers", plan.min_workers),
        "max_workers": given.option("max_workers", plan.max_workers),
        "max_servers": given.option("max_servers", plan.max_servers),
        "on_loss": given.option("on_loss", plan.on_loss),
        "restarts": given.option("restarts", plan.restarts),
    }


def _hosts(given: _Given) -> dict[str, ConfigValue]:
    spec = given.spec
    if not spec.hosts:
        return {}
    encrypt_origin = given.variable("PACELINE_ENCRYPT") or DEFAULT
    ray = {}
    if spec.ray is not None:
        ray = {
            "ray_address": given.option("on", spec.ray.address),
            "resources": given.option("resources", dict(spec.ray.resources)),
            "placement": given.option("placement", spec.ray.strategy),
            "wait_s": given.option("wait", spec.ray.wait_s),
        }
    if not spec.encrypt:
        encrypt_origin = COMMAND_LINE
    return {
        "hosts": given.option("hosts", [str(host) for host in spec.hosts], or_else="hostfile"),
        "servers_on": given.option("servers_on", list(spec.servers_on)),
        "sync": given.option("sync", spec.sync),
        "encrypt": ConfigValue(spec.encryption_in(given.environ), encrypt_origin),
        "python": given.option("python", spec.remote_python_in(given.environ)),
        "activate": given.option("activate", spec.activate),
        **ray,
    }


def _engine(given: _Given) -> dict[str, ConfigValue]:
    config = EngineConfig.from_environ({**given.environ, **given.spec.env})
    settings = {}
    for field in fields(config):
        origin = given.variable(f"PACELINE_{field.name.upper()}")
        settings[field.name] = ConfigValue(getattr(config, field.name), origin or DEFAULT)
    return settings


def _found(cwd: Path) -> dict[str, ConfigValue]:
    facts = {
        "paceline_version": installed_version("paceline"),
        "python_version": platform.python_version(),
        "torch_version": installed_version("torch"),
        "host": socket.gethostname(),
        "cores": usable_cores(),
        "directory": str(cwd),
        "git_commit": git_commit(cwd),
    }
    return {name: ConfigValue(value, FOUND) for name, value in facts.items()}


_COMMIT = re.compile(r"[0-9a-f]{40,64}\Z")


def git_commit(directory: Path) -> str | None:
    """Return the commit that is checked out at a directory, or None outside a repository."""
    with suppress(OSError, ValueError):
        for place in (directory, *directory.parents):
            if (place / ".git").exists():
                return _checked_out(_git_dir(place / ".git"))
    return None


def _git_dir(dot_git: Path) -> Path:
    """Return the git directory: in worktrees and submodules .git is a file with its path."""
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
