"""What to run: a `RunSpec`, checked once when it is made.

Every error is a ConfigError of one line with what was given and what to type instead; the command
line prints it and exits with code 2. Nothing here starts a process.
"""

from __future__ import annotations

import importlib.machinery
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import ConfigError, UsageError
from paceline.launcher.engines.ray.request import RayRequest
from paceline.launcher.hosts.host_list import HostSlots
from paceline.launcher.hosts.placement import Placement
from paceline.launcher.job_size import MAX_WORKERS, ElasticPlan, ServerPlan, check_data_workers
from paceline.launcher.planned_pace import check_planned
from paceline.launcher.preemption.notice import NoticeSource
from paceline.launcher.processes.run_script import Command
from paceline.observe.telemetry.trace import TracedSteps
from paceline.options.table import require_precision
from paceline.pace.parse import Schedule, parse_schedule
from paceline.planner.quantities import parse_rate
from paceline.runtime.config import (
    HOROVOD,
    encryption,
    requested_devices,
    requested_max_wire,
    requested_mesh,
    requested_pace,
    requested_precision,
    requested_trace,
    uses_template,
)
from paceline.runtime.device_request import DeviceRequest, parse_devices
from paceline.runtime.emulated_links import EmulatedLinks
from paceline.runtime.mesh import Mesh
from paceline.runtime.process_names import ProcessName, process_names

# From SIGTERM to SIGKILL; with it the whole end of a job stays below 5 s.
STOP_GRACE_S = 3.0
# The same for workers that save a checkpoint when they are stopped.
SAVE_GRACE_S = 30.0
_LONGEST_GRACE_S = 3600.0

# The launcher sets these; a rank that gets another value with --env would hang.
_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
RESERVED = frozenset(
    (
        *_RANKS,
        *(f"PACELINE_{name}" for name in _RANKS),
        *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE"),
        *("PACELINE_ROLE", "PACELINE_COORDINATOR", "PACELINE_JOB", "PACELINE_SECRET_FILE"),
        *("PACELINE_SERVERS", "PACELINE_NUMBER", "PACELINE_JOINS", "PACELINE_ELASTIC"),
        *("PACELINE_ON_LOSS", "PACELINE_PARTITIONS", "PACELINE_REPLICAS"),
        *("PACELINE_DATA_WORKERS", "PACELINE_PODS", "PACELINE_POD_JOB"),
        "PACELINE_POD_SECRET_FILE",
    )
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """One job: `num_workers` copies of a script or module with its arguments, and parameter servers
    and data workers for them. Without `hosts` it runs on this host.
    """

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    is_in_image: bool = False  # the target is not on this machine, and cannot be checked
    num_workers: int
    threads_per_worker: int | None = None
    servers: ServerPlan = ServerPlan()
    data_workers: tuple[int, ...] = ()  # for each stage
    pace: Schedule | None = None
    precision: str | None = None
    max_wire: str | None = None  # what a host may send, such as "200mbit"
    mesh: Mesh | None = None
    trace: TracedSteps | None = None  # which steps
    devices: DeviceRequest | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    log_dir: Path | None = None  # None: keep nothing; see run_directory.py
    metrics_port: int | None = None  # of the Prometheus endpoint; 0: any free port
    elastic: ElasticPlan | None = None  # None: the first loss ends the job
    grace_s: float = STOP_GRACE_S
    is_detached: bool = False
    has_template: bool = True  # processes may be forked from a template
    hosts: tuple[HostSlots, ...] = ()
    engine: str = "ssh"  # what the hosts are, and how agents get there; see launcher/engines
    ray: RayRequest | None = None  # with the engine "ray", which finds the hosts later
    servers_on: tuple[str, ...] = ()  # names of hosts; (): those with workers
    sync: bool = False  # copy the project to the other hosts
    encrypt: bool = True  # between hosts
    remote_python: str | None = None  # interpreter on the other hosts
    activate: str | None = None  # a line for the shell of each other host, run before
    preemption_notice: str = ""  # a source of notices; see launcher/preemption
    preemption_deadline_s: float | None = None  # of notices without a time; None: the engine's
    given: frozenset[str] = (
        frozenset()
    )  # options on the command line, by their names in cli/run_options.py

    def __post_init__(self) -> None:
        _check_count("-n", self.num_workers, at_most=MAX_WORKERS)
        if self.threads_per_worker is not None:
            _check_count("--threads-per-worker", self.threads_per_worker, at_most=4096)
        if self.is_module and not self.is_in_image:
            _check_module(self.target)
        elif not self.is_in_image:
            _check_script(self.target)
        for text in (self.target, *self.arguments, *self.env.values()):
            if "\0" in text:
                raise ConfigError("an argument contains a NUL byte; remove it")
        for option, value, variable in (
            ("--threads-per-worker", self.threads_per_worker, "OMP_NUM_THREADS"),
            ("--pace", self.pace, "PACELINE_PACE"),
            ("--precision", self.precision, "PACELINE_PRECISION"),
            ("--max-wire", self.max_wire, "PACELINE_MAX_WIRE"),
            ("--mesh", self.mesh, "PACELINE_MESH"),
            ("--trace", self.trace, "PACELINE_TRACE"),
            ("--devices", self.devices, "PACELINE_DEVICES"),
        ):
            if value is not None and variable in self.env:
                raise ConfigError(
                    f"{option} and --env {variable}=... set the same value; give only one of them"
                )
        if self.precision is not None:
            require_precision(self.precision)
        check_planned(self.pace, self.max_wire, self.mesh)
        if self.mesh is not None:
            self.mesh.require(self.num_workers, "--mesh")
        if not 0 <= self.grace_s <= _LONGEST_GRACE_S:
            raise ConfigError(
                f"--grace {self.grace_s:g}: expected seconds from 0 to {_LONGEST_GRACE_S:g}, for"
                " example --grace 30"
            )
        if self.metrics_port is not None and not 0 <= self.metrics_port <= 65535:
            raise ConfigError(
                f"--metrics-port {self.metrics_port}: expected a number from 0 (any free one) to"
                " 65535, for example --metrics-port 9400"
            )
        self.servers.check_pace(self.pace, self.num_workers)
        check_data_workers(self.data_workers)
        if self.data_workers and self.elastic is not None:
            raise ConfigError(
                "--data-workers in an elastic job: data workers do not support a changing number of"
                " workers; leave out --data-workers (and use num_workers of the DataLoader), or"
                " --min, --max, --on-loss, --replicas, --max-servers and --detach"
            )
        check_host_options(self)
        if self.preemption_notice:
            NoticeSource.parse(self.preemption_notice)

    @property
    def notice_source(self) -> NoticeSource | None:
        """What each host looks at for a notice that it goes away; None: nothing."""
        return NoticeSource.parse(self.preemption_notice) if self.preemption_notice else None

    @property
    def num_servers(self) -> int:
        return self.servers.count

    @property
    def placement(self) -> Placement | None:
        """The host of each process that the job starts with; None: all run on this host."""
        if not self.hosts:
            return None
        return Placement.fill(
            self.hosts,
            self.num_workers,
            self.num_servers,
            sum(self.data_workers),
            servers_on=self.servers_on,
            colocated=self.servers.is_colocated,
            replicas=self.servers.replicas,
            unit_size=1 if self.mesh is None else self.mesh.unit_size,
        )

    @property
    def process_names(self) -> list[ProcessName]:
        """The names of all processes that the job starts with, workers first."""
        return process_names(self.num_workers, self.num_servers, sum(self.data_workers))

    def pace_in(self, inherited: Mapping[str, str]) -> Schedule | None:
        """Return the pace that the ranks get: the option's, else the environment's.

        Raises ConfigError if it is unknown, or does not fit the servers of the job.
        """
        if self.pace is not None:
            return self.pace
        text = requested_pace({**inherited, **self.env})
        try:
            pace = None if text is None else parse_schedule(text)
            self.servers.check_pace(pace, self.num_workers)
        except UsageError as error:
            raise ConfigError(f"PACELINE_PACE: {error}") from error
        return pace

    def precision_in(self, inherited: Mapping[str, str]) -> str | None:
        """Return the precision that the ranks get, as `pace_in` returns the pace."""
        text = self.precision or requested_precision({**inherited, **self.env})
        try:
            return None if text is None else require_precision(text)
        except UsageError as error:
            raise ConfigError(f"PACELINE_PRECISION: {error}") from error

    def max_wire_in(self, inherited: Mapping[str, str]) -> str | None:
        """Return the budget that the ranks get, as `pace_in` returns the pace."""
        text = self.max_wire or requested_max_wire({**inherited, **self.env})
        if text is not None:
            parse_rate(text, "PACELINE_MAX_WIRE")
        return text

    def mesh_in(self, inherited: Mapping[str, str]) -> Mesh | None:
        """Return the mesh that the ranks get, as `pace_in` returns the pace."""
        if self.mesh is not None:
            return self.mesh
        text = requested_mesh({**inherited, **self.env})
        try:
            mesh = None if text is None else Mesh.parse(text)
            if mesh is not None:
                mesh.require(self.num_workers)
        except UsageError as error:
            raise ConfigError(f"PACELINE_MESH: {error}") from error
        return mesh

    def trace_in(self, inherited: Mapping[str, str]) -> TracedSteps | None:
        """Return the steps to trace, as `pace_in` returns the pace."""
        if self.trace is not None:
            return self.trace
        text = requested_trace({**inherited, **self.env})
        return None if text is None else TracedSteps.parse(text, "PACELINE_TRACE")

    def devices_in(self, inherited: Mapping[str, str]) -> DeviceRequest | None:
        """Return the devices of the workers, as `pace_in` returns the pace."""
        if self.devices is not None:
            return self.devices
        text = requested_devices({**inherited, **self.env})
        return None if text is None else parse_devices(text, "PACELINE_DEVICES")

    def uses_template_in(self, inherited: Mapping[str, str]) -> bool:
        """Return whether processes may be forked from a template: no option forbids it."""
        return self.has_template and uses_template({**inherited, **self.env})

    def emulated_links_in(self, inherited: Mapping[str, str]) -> EmulatedLinks | None:
        """Return the links that the engine emulates between the workers; None: there are none."""
        return EmulatedLinks.of_job({**inherited, **self.env}, has_hosts=bool(self.hosts))

    def encryption_in(self, inherited: Mapping[str, str]) -> str:
        """Return "on", "off" or "always": the option, else PACELINE_ENCRYPT."""
        return encryption({**inherited, **self.env}) if self.encrypt else "off"

    def remote_python_in(self, inherited: Mapping[str, str]) -> str:
        """Return the interpreter for other hosts: --python, else PYTHON of the environment, else
        that of --activate, else the path of this one."""
        found = self.remote_python or inherited.get("PYTHON", "").strip()
        return found or ("python" if self.activate is not None else sys.executable)

    def names_remote_python(self, inherited: Mapping[str, str]) -> bool:
        """Return whether the interpreter for other hosts was given, and is not this one's path."""
        return bool(self.remote_python or inherited.get("PYTHON", "").strip() or self.activate)

    def command(self, name: ProcessName) -> Command:
        """Return what a process of this name runs."""
        kind = "server" if name.is_server else "module" if self.is_module else "script"
        return Command(kind, self.target, self.arguments, self.env.get(HOROVOD) == "1")


def parse_env(settings: Iterable[str]) -> dict[str, str]:
    """Return repeated `--env NAME=VALUE` as a mapping; raises ConfigError for anything else."""
    env: dict[str, str] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not _NAME.match(name):
            raise ConfigError(
                f"--env {setting!r}: write --env NAME=VALUE, for example --env LR=0.1"
            )
        if name in RESERVED:
            raise ConfigError(f"--env {name}: the launcher sets {name} for each rank; leave it out")
        env[name] = value
    return env


def check_host_options(spec: RunSpec) -> None:
    """Refuse options that do not go together with the hosts of a job, or without hosts."""
    if not spec.hosts:
        for option, is_given in (
            ("--servers-on", bool(spec.servers_on)),
            ("--sync", spec.sync),
            ("--no-encrypt", not spec.encrypt),
            ("--python", spec.remote_python is not None),
            ("--activate", spec.activate is not None),
        ):
            if is_given:
                raise ConfigError(
                    f"{option} without hosts: the job runs on this host; add --hosts a:4,b:4 or"
                    f" --hostfile FILE, or leave out {option}"
                )
        return
    if spec.sync and spec.engine != "ssh":
        raise ConfigError(
            "--sync is for hosts with ssh: the nodes of Slurm share their directories, and `ray job"
            " submit --working-dir` copies one to the nodes of Ray; leave out --sync"
        )
    if spec.servers_on and spec.servers.is_colocated:
        raise ConfigError(
            "--servers-on and -s colocated: a colocated server is on the host of its worker; give"
            " only one of them"
        )
    if spec.servers_on and not spec.num_servers:
        raise ConfigError("--servers-on without servers: add -s 1, or leave out --servers-on")
    for option, text in (("--python", spec.remote_python), ("--activate", spec.activate)):
        if text is not None and (not text.strip() or not text.isprintable()):
            raise ConfigError(
                f"{option} {text[:60]!r}: expected one line of text, for example"
                f" {option} "
                + ("/opt/venv/bin/python" if option == "--python" else "'. /opt/venv/bin/activate'")
            )
    for variable, instead in (
        ("PACELINE_BIND", "the launcher finds the address of each host"),
        ("PACELINE_HOST_ID", "each host has its own"),
    ):
        if variable in spec.env:
            raise ConfigError(f"--env {variable}=... with hosts: {instead}; leave it out")
    if not spec.encrypt and "PACELINE_ENCRYPT" in spec.env:
        raise ConfigError(
            "--no-encrypt and --env PACELINE_ENCRYPT=... set the same value; give only one of them"
        )
    spec.placement  # noqa: B018 - it checks the slots, and the names of --servers-on


def _check_count(option: str, count: int, *, at_most: int) -> None:
    if not 1 <= count <= at_most:
        raise ConfigError(
            f"{option} {count}: expected a number from 1 to {at_most}, for example {option} 2"
        )


def _check_script(target: str) -> None:
    path = Path(target)
    if not os.access(path.parent, os.X_OK) and path.parent.is_dir():
        raise ConfigError(
            f"{target}: this user may not enter the directory {path.parent.absolute()}; check its"
            " permissions (chmod o+x), or those of the image"
        )
    if path.is_dir():
        raise ConfigError(
            f"{target}: is a directory; name the script in it, or use -m for a package"
        )
    if not path.exists():
        hint = ""
        if not target.endswith(".py") and Path(target + ".py").is_file():
            hint = f"; did you mean {target}.py?"
        elif _module_exists(target):
            hint = f"; for the module of that name type -m {target}"
        raise ConfigError(f"{target}: no such script in {os.getcwd()}{hint}")
    if not os.access(path, os.R_OK):
        raise ConfigError(f"{target}: cannot be read; check its permissions (chmod u+r {target})")


def _check_module(target: str) -> None:
    if target.endswith(".py"):
        raise ConfigError(f"-m {target}: expected a module name; for a script leave out -m")
    if not _module_exists(target):
        raise ConfigError(
            f"-m {target}: no module named {target.split('.')[0]!r}; install it, or run from the"
            " directory that contains it"
        )


def _module_exists(target: str) -> bool:
    """Look only for the top-level name: finding a submodule would import its parents."""
    top = target.split(".")[0]
    if not top.isidentifier():
        return False
    if top in sys.builtin_module_names:
        return True
    return importlib.machinery.PathFinder.find_spec(top, [os.getcwd(), *sys.path]) is not None
