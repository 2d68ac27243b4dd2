"""`paceline plan`: measures a script and the links, ranks all paces, and can run the best."""

from __future__ import annotations

import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from paceline.cli.planning.link_probe import ProbedHosts, read_probe
from paceline.cli.planning.profiling import measure_script
from paceline.cli.planning.simulate import split_paces
from paceline.errors import ConfigError, UsageError
from paceline.launcher.hosts.host_list import HostSlots, parse_hosts
from paceline.planner.cluster import Cluster, Host, local_cluster, read_cluster, with_links
from paceline.planner.copy_rate import copy_bytes_per_s
from paceline.planner.measured_profile import timed_steps
from paceline.planner.profile import ModelProfile, read_profile, write_profile
from paceline.planner.quantities import Link, parse_rate
from paceline.planner.ranking import Plan, PlanRow, make_plan
from paceline.planner.step_costs import DEFAULT_CONSTANTS, ON_MEASURED_LINKS
from paceline.planner.text_table import text_table
from paceline.runtime.console import say
from paceline.runtime.formatting import (
    data_size,
    duration_range,
    percent,
    rate,
    short_duration,
    short_number,
)
from paceline.runtime.machine import memory, usable_cores

_SHOWN = 12  # rows; --all shows the others


class PlanOptions(msgspec.Struct, frozen=True):
    """The options as typed."""

    script: str
    arguments: tuple[str, ...]
    is_module: bool
    num_workers: int | None
    hosts: str | None
    cluster: Path | None
    paces: str | None
    profile: Path | None
    save_profile: Path | None
    max_wire: str | None
    steps: int
    apply: bool
    shows_all: bool

    @property
    def target(self) -> list[str]:
        """The script as the words of a command."""
        return [*(["-m"] if self.is_module else []), self.script, *self.arguments]


def plan_job(options: PlanOptions) -> int:
    """Measure, predict, print; with --apply run the recommendation and compare."""
    begin_s = time.monotonic()
    if not options.is_module and not Path(options.script).is_file():
        raise ConfigError(f"there is no script {options.script!r}; name a Python file")
    if sum(one is not None for one in (options.num_workers, options.hosts, options.cluster)) > 1:
        raise ConfigError("-n, --hosts and --cluster say where the job runs; give one of them")
    if options.apply and options.cluster is not None:
        raise ConfigError("--apply runs on this machine or with --hosts, not on a cluster file")
    if options.steps < 3:
        raise ConfigError(f"--steps {options.steps}: at least 3 steps must be measured")
    max_wire = None if options.max_wire is None else parse_rate(options.max_wire, "--max-wire")
    paces = [] if options.paces is None else split_paces(options.paces)
    scratch = Path(tempfile.mkdtemp(prefix="paceline-plan-"))
    try:
        cluster, bandwidth_cv = _cluster(options)
        profile, copies = _profile(options, cluster, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if options.save_profile is not None:
        write_profile(profile, options.save_profile)
    plan = make_plan(
        profile,
        cluster,
        paces=paces,
        constants=DEFAULT_CONSTANTS if options.hosts is None else ON_MEASURED_LINKS,
        copies=copies,
        bandwidth_cv=bandwidth_cv,
        max_wire_bytes_per_s=max_wire,
    )
    _print_plan(plan, profile, cluster, options, time.monotonic() - begin_s)
    return _apply(plan.best, profile, cluster, options) if options.apply else 0


# -- what is there ----------------------------------------------------------------------------


def _cluster(options: PlanOptions) -> tuple[Cluster, float]:
    """Return the hosts with measured rates, and the relative error of the links."""
    copy_rate = copy_bytes_per_s()
    if options.cluster is not None:
        found = read_cluster(options.cluster)
        return msgspec.structs.replace(found, copy_bytes_per_s=copy_rate), 0.0
    here = memory()
    limits = (here.limit_bytes, here.total_bytes)
    limit = min((one for one in limits if one is not None), default=0)
    if options.hosts is None:
        found = local_cluster(options.num_workers or usable_cores(), usable_cores(), limit)
        return msgspec.structs.replace(found, copy_bytes_per_s=copy_rate), 0.0
    listed = parse_hosts(options.hosts)
    if len(listed) < 2:
        hosts = tuple(Host(one.name, usable_cores(), limit, one.slots) for one in listed)
        return Cluster(hosts, copy_bytes_per_s=copy_rate), 0.0
    probed = probe_hosts(listed)
    hosts = tuple(
        Host(one.name, *probed.hosts.get(at, (usable_cores(), limit)), one.slots)
        for at, one in enumerate(listed)
    )
    links = {
        (listed[low].name, listed[high].name): Link(bandwidth, latency_s)
        for low, high, bandwidth, latency_s, _ in probed.links
    }
    error = statistics.fmean(spread for *_, spread in probed.links)
    return with_links(Cluster(hosts, copy_bytes_per_s=copy_rate), links), error


def probe_hosts(hosts: Sequence[HostSlots]) -> ProbedHosts:
    """Measure the links of all pairs, and cores and memory, with a worker on each host."""
    say(f"measuring the links between {len(hosts)} hosts")
    names = ",".join(str(replace(one, slots=1)) for one in hosts)
    command = [sys.executable, "-m", "paceline", "run", "-n", str(len(hosts)), "--hosts", names]
    command += ["--log-dir", "none", "-m", "paceline.cli.planning.link_probe"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = read_probe(done.stdout.splitlines())
    if done.returncode or not found.links:
        last = "\n".join((done.stderr or done.stdout).strip().splitlines()[-8:])
        raise UsageError(f"the links could not be measured:\n{last}")
    return found


def _profile(options: PlanOptions, cluster: Cluster, scratch: Path) -> tuple[ModelProfile, int]:
    """Return the profile, and how many copies were measured at once."""
    if options.profile is not None:
        return read_profile(options.profile), 1
    copies = min(cluster.most_workers, max(1, usable_cores() * 2))
    threads = max(1, usable_cores() // copies)
    say(f"measuring {options.script}: {copies} cop{'ies' if copies > 1 else 'y'} at once")
    profile = measure_script(
        options.target, scratch, copies=copies, threads=threads, steps=options.steps
    )
    return profile, copies


# -- what is printed ----------------------------------------------------------------------------


def _print_plan(
    plan: Plan, profile: ModelProfile, cluster: Cluster, options: PlanOptions, took_s: float
) -> None:
    parts = [("input", profile.input_s), ("forward", profile.forward_s)]
    parts += [("backward", profile.backward_s), ("optimizer", profile.optimizer_s)]
    lines = [
        f"{profile.name}: {data_size(profile.parameters_bytes)} of gradients in"
        f" {len(profile.buckets)} buckets, {profile.batch} samples; a step computes"
        f" {short_duration(profile.compute_s)} (sd {percent(profile.cv)}): "
        + ", ".join(f"{name} {short_duration(time_s)}" for name, time_s in parts),
        f"{cluster.num_workers} workers on {cluster.num_hosts}"
        f" host{'s' * (cluster.num_hosts > 1)}, {cluster.hosts[0].cores} cores each"
        + (f", slowest link {cluster.slowest_link().text}" if cluster.num_hosts > 1 else ""),
        "",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    header = ("", "pace", "step (90 %)", "samples/s", "sent/step", "memory", "staleness", "limit",
              "loss", "")  # fmt: skip
    shown = plan.rows if options.shows_all else plan.rows[:_SHOWN]
    rows = [_cells(row, is_best=row is plan.best) for row in shown]
    sys.stdout.write(text_table(header, rows, left=2))
    if len(plan.rows) > len(shown):
        sys.stdout.write(f"  and {len(plan.rows) - len(shown)} slower ones: --all shows them\n")
    for one, missing in plan.too_large:
        sys.stdout.write(f"  {one.label} does not fit: {data_size(missing)} are missing\n")
    if plan.servers is not None:
        count = plan.servers.count
        sys.stdout.write(
            f"\nservers: {count} for {cluster.num_workers} workers: {plan.servers.derivation}\n"
        )
    best = plan.best.candidate
    where, servers_on = _where(
        options, cluster, has_servers=best.num_servers > 0 and not best.is_colocated
    )
    target = shlex.join(options.target)
    command = best.command(cluster.num_workers, where, target, servers_on)
    sys.stdout.write(
        f"\nrecommended: {command}\n"
        "loss: exact = equals one process with the global batch; table = our two tasks, see"
        " docs/choosing-a-pace.md; unknown = measure it with your model\n"
        f"planned in {short_duration(took_s)}\n"
    )
    sys.stdout.flush()


def _where(options: PlanOptions, cluster: Cluster, *, has_servers: bool) -> tuple[str, str]:
    """Return the options that name the hosts of the workers, and those of dedicated servers."""
    if options.hosts:
        return f"--hosts {options.hosts}", ""
    if options.cluster is None:
        return "", ""
    apart = cluster.server_names if has_servers else ()
    hosts = [f"{host.name}:{host.workers}" for host in cluster.hosts]
    hosts += [f"{name}:1" for name in apart]
    return f"--hosts {','.join(hosts)}", f"--servers-on {','.join(apart)}" if apart else ""


def _cells(row: PlanRow, *, is_best: bool) -> list[str]:
    one = row.prediction
    return [
        "*" if is_best else "",
        one.candidate.label,
        f"{short_duration(one.step_s)} ({duration_range(one.low_s, one.high_s)})",
        rate(one.samples_per_s),
        data_size(one.sent_bytes),
        data_size(one.memory_bytes),
        short_number(one.staleness) if one.staleness else "-",
        one.limit,
        str(row.cost),
        row.reason,
    ]


# -- running it ---------------------------------------------------------------------------------


def _apply(best: PlanRow, profile: ModelProfile, cluster: Cluster, options: PlanOptions) -> int:
    """Run the recommendation, then set predicted and measured side by side."""
    one = best.candidate
    directory = Path(tempfile.mkdtemp(prefix="paceline-run-"))
    command = [sys.executable, "-m", "paceline", "run", "--log-dir", str(directory)]
    command += ["--mesh", one.mesh] if one.mesh else ["-n", str(cluster.num_workers)]
    if options.hosts:
        command += ["--hosts", options.hosts]
    else:
        command += ["--threads-per-worker", str(profile.threads)]
    if one.is_colocated or one.num_servers:
        command += ["-s", "colocated" if one.is_colocated else str(one.num_servers)]
    command += ["--pace", str(one.pace), *options.target]
    code = subprocess.run(command, check=False).returncode
    _print_comparison(best, directory)
    return code


def _print_comparison(best: PlanRow, directory: Path) -> None:
    steps = [
        step.took_s for times in timed_steps(directory).values() for step in times if step.step > 3
    ]
    if not steps:
        sys.stdout.write("predicted and measured: the run has no timed steps\n")
        return
    one, found = best.prediction, statistics.fmean(steps)
    inside = "inside" if one.low_s <= found <= one.high_s else "outside"
    sys.stdout.write(
        f"{one.candidate.label}: predicted {short_duration(one.step_s)}"
        f" ({duration_range(one.low_s, one.high_s)}), measured"
        f" {short_duration(found)} over {len(steps)} steps: {found / one.step_s - 1:+.0%},"
        f" {inside} the interval; record in {directory}\n"
    )
