"""`paceline run --dry-run`: prints what would run and where, and starts nothing."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping

from paceline.launcher.environment import HostSettings, JobAddresses, process_environ
from paceline.launcher.hosts.host_environment import sent_environ
from paceline.launcher.hosts.placement import Placement
from paceline.launcher.run_directory import ROOT, run_directory
from paceline.launcher.spec import RunSpec
from paceline.runtime.config import inherited_environ
from paceline.runtime.machine import usable_cores
from paceline.runtime.process_names import ProcessName

_WHERE = JobAddresses(
    job_id="<random>", coordinator="127.0.0.1:<port>", secret_file="<file>", master_port=0
)


def dry_run(spec: RunSpec) -> int:
    """Print the command and the added environment of every process, and its host."""
    inherited = inherited_environ()
    placement = spec.placement
    if placement is None:
        lines = _processes_here(spec, inherited)
    else:
        lines = [*_hosts(spec, placement, inherited), *_processes_of(spec, placement, inherited)]
    lines += _settings(spec, inherited)
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


# -- one host -----------------------------------------------------------------------------------


def _processes_here(spec: RunSpec, inherited: Mapping[str, str]) -> list[str]:
    lines: list[str] = []
    passed_on: set[str] = set()
    cores = usable_cores()
    for process in spec.process_names:
        environ = process_environ(inherited, spec, process, _WHERE, cores=cores)
        passed_on |= environ.keys()
        added = {k: v for k, v in environ.items() if inherited.get(k) != v}
        lines += _process(spec, process, spec.command(process).argv, added)
    removed = sorted(set(inherited) - passed_on)
    return [*lines, f"not passed on: {' '.join(removed)}"] if removed else lines


def _process(
    spec: RunSpec, process: ProcessName, argv: list[str], added: dict[str, str]
) -> list[str]:
    if "MASTER_PORT" in added:
        added["MASTER_PORT"] = spec.env.get("MASTER_PORT", "<port>")
    variables = [f"    {name}={_quoted(added[name])}" for name in sorted(added)]
    return [f"[{process.label}] {line}" for line in (shlex.join(argv), *variables)]


# -- several hosts ------------------------------------------------------------------------------


def _hosts(spec: RunSpec, placement: Placement, inherited: Mapping[str, str]) -> list[str]:
    python = spec.remote_python_in(inherited)
    lines = [f"host {line}" for line in placement.lines()] + placement.notes()
    lines.append(f"python on other hosts: {python}")
    if spec.activate is not None:
        lines.append(f"before it, in the shell of each other host: {spec.activate}")
    if spec.sync:
        lines.append("the project is copied to the other hosts")
    if spec.encryption_in(inherited) == "off":
        lines.append("connections between hosts are NOT encrypted")
    return lines


def _processes_of(spec: RunSpec, placement: Placement, inherited: Mapping[str, str]) -> list[str]:
    """Return the processes as they run on other hosts; addresses and cores are found there."""
    where = JobAddresses(
        job_id="<random>", coordinator="<address>:<port>", secret_file="<file>", master_port=0
    )
    python = spec.remote_python_in(inherited)
    first = placement.hosts[placement.host_of(spec.process_names[0])].name
    is_given = spec.threads_per_worker is not None or "OMP_NUM_THREADS" in {**inherited, **spec.env}
    lines: list[str] = []
    for process in spec.process_names:
        place = placement.place(process)
        name = placement.hosts[place.host_index].name
        host = HostSettings(
            place=place,
            address=f"<address of {name}>",
            master_address=f"<address of {first}>",
            cores=1,
        )
        sent = sent_environ(inherited, spec, process, where, host)
        if process.is_worker and not is_given:
            sent["OMP_NUM_THREADS"] = f"<cores of {name} / {place.local_world_size}>"
        argv = [python, *spec.command(process).argv[1:]]
        lines.append(f"[{process.label}] on host {name}:")
        lines += _process(spec, process, argv, sent)
    return [*lines, "other variables are those of each host; send more with --env NAME=VALUE"]


# -- both ---------------------------------------------------------------------------------------


def _settings(spec: RunSpec, inherited: Mapping[str, str]) -> list[str]:
    lines: list[str] = []
    pace, precision = spec.pace_in(inherited), spec.precision_in(inherited)
    if pace is not None:
        lines.append(f"pace: {pace}, which overrides the script's")
    if precision is not None:
        lines.append(f"precision: {precision}, which overrides the script's")
    trace = spec.trace_in(inherited)
    if trace is not None:
        lines.append(f"trace: {trace.text}")
    mesh = spec.mesh_in(inherited)
    if mesh is not None:
        lines.append(f"mesh: {mesh}, which overrides the script's")
    devices = spec.devices_in(inherited)
    if devices is not None:
        lines.append(f"devices of each host's workers: {devices}")
    directory = run_directory(spec, inherited, "<id>")
    if directory is not None:
        name = (
            str(directory) if directory.parent != ROOT else f"{ROOT}/<date and time>-<script>-<id>"
        )
        lines.append(f"logs: {name}/{_log_names(spec)}")
    return lines


def _log_names(spec: RunSpec) -> str:
    words = [f"rank-0.log to rank-{spec.num_workers - 1}.log"]
    if spec.num_servers:
        words.append(f"server-0.log to server-{spec.num_servers - 1}.log")
    if spec.data_workers:
        words.append(f"data-worker-0.log to data-worker-{sum(spec.data_workers) - 1}.log")
    return " and ".join(words)


def _quoted(value: str) -> str:
    return value if value.startswith("<") or ":<" in value else shlex.quote(value)
