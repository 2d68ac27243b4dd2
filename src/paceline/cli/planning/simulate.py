"""`paceline simulate`: simulates a model on a cluster that you may not have."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from paceline.errors import ConfigError
from paceline.observe.report.family_plot import family_plot
from paceline.planner.candidates import Candidate, candidate
from paceline.planner.cluster import Cluster, even_cluster, read_cluster
from paceline.planner.profile import read_profile
from paceline.planner.quantities import NO_STRAGGLER, parse_link, parse_straggler, parse_time
from paceline.planner.simulation.failures import FailurePlan
from paceline.planner.simulation.run import Scenario, Simulated, simulate
from paceline.planner.simulation.sweep import AXES, SweepRow, as_csv, parse_sweep, sweep
from paceline.planner.text_table import text_table
from paceline.runtime.console import say
from paceline.runtime.formatting import data_size, percent, rate, short_duration, short_number

_MOST_WORKERS = 100_000
_EVENTS_PER_S = 5e5  # simulated on one core
_HEADER = (
    *("pace", "step", "samples/s", "efficiency", "waiting", "exchange", "staleness (99 %)"),
    *("sent/step", "failures (lost)", "limit"),
)


class SimulateOptions(msgspec.Struct, frozen=True):
    """The options as typed."""

    model: Path
    workers: int
    link: str
    cluster: Path | None
    per_host: int
    cores: int
    servers: int
    paces: str
    steps: int
    straggler: str | None
    mtbf: str | None
    checkpoint_every: str | None
    checkpoint_cost: str
    restart: str
    elastic: bool
    seed: int
    sweeps: tuple[str, ...]
    output: Path | None
    plot: Path | None


def run_simulation(options: SimulateOptions) -> int:
    """Simulate, print a table, and write the CSV file and the plot if they are wanted."""
    scenario = _scenario(options)
    candidates = [_candidate(text, options) for text in split_paces(options.paces)]
    axes = dict(parse_sweep(text) for text in options.sweeps)
    if len(axes) != len(options.sweeps):
        raise ConfigError(f"--sweep: give each of {', '.join(AXES)} once")
    if options.plot and not axes:
        raise ConfigError("--plot draws a sweep: add --sweep workers=8,64,512")
    _print_head(scenario, options)
    _announce(candidates, scenario, axes)
    if axes:
        rows = list(sweep(candidates, scenario, *(axes.get(name, []) for name in AXES)))
        _print_sweep(rows)
        _write(options.output, as_csv(rows))
        _write(options.plot, _plot(rows, next(name for name in AXES if name in axes)))
        return 0
    results = [simulate(one, scenario) for one in candidates]
    results.sort(key=lambda one: -one.samples_per_s)
    sys.stdout.write(text_table(_HEADER, [_cells(one) for one in results]))
    cluster = scenario.cluster
    point = (cluster.num_workers, cluster.link.bytes_per_s, cluster.most_workers)
    _write(options.output, as_csv([SweepRow(*point, one) for one in results]))
    return 0


def _announce(
    candidates: Sequence[Candidate], scenario: Scenario, axes: Mapping[str, Sequence[float]]
) -> None:
    """Print how long it takes, if it takes long: free-running workers are simulated one by one."""
    others = [len(values) for name, values in axes.items() if name != "workers"]
    counts = axes.get("workers") or [scenario.cluster.num_workers]
    free = sum(one.pace.is_free_running for one in candidates)
    events = free * sum(counts) * scenario.steps * math.prod(others)
    if events > _EVENTS_PER_S:
        say(
            f"simulating {short_number(events)} steps of single workers (ssp, async): about"
            f" {short_duration(math.ceil(events / _EVENTS_PER_S))}"
        )


def split_paces(text: str) -> list[str]:
    """Return the paces of a list; commas in brackets belong to a pace."""
    found, depth, begin = [], 0, 0
    for at, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and not depth:
            found.append(text[begin:at])
            begin = at + 1
    found.append(text[begin:])
    paces = [one.strip() for one in found if one.strip()]
    if not paces:
        raise ConfigError(f"--paces {text!r}: name at least one pace, such as allreduce,ssp:3")
    return paces


def _scenario(options: SimulateOptions) -> Scenario:
    if not 1 <= options.workers <= _MOST_WORKERS:
        raise ConfigError(
            f"--workers {options.workers}: expected a number from 1 to {_MOST_WORKERS}"
        )
    if options.steps < 1:
        raise ConfigError(f"--steps {options.steps}: expected at least 1")
    every = options.checkpoint_every
    failures = FailurePlan(
        _positive(options.mtbf, "--mtbf"),
        _positive(every, "--checkpoint-every"),
        parse_time(options.checkpoint_cost, "--checkpoint-cost"),
        parse_time(options.restart, "--restart"),
        options.elastic,
    )
    straggler = NO_STRAGGLER if options.straggler is None else parse_straggler(options.straggler)
    if straggler.workers > options.workers:
        raise ConfigError(
            f"--straggler {straggler.text}: {straggler.workers} workers are slow, but there are"
            f" {options.workers}"
        )
    return Scenario(
        read_profile(options.model), _cluster(options), options.steps, straggler, failures,
        options.seed,
    )  # fmt: skip


def _positive(text: str | None, option: str) -> float | None:
    if text is None:
        return None
    time_s = parse_time(text, option)
    if time_s <= 0:
        raise ConfigError(f"{option} {text!r}: expected a time above 0, such as 6h")
    return time_s


def _cluster(options: SimulateOptions) -> Cluster:
    if options.cluster is not None:
        return read_cluster(options.cluster)
    if options.per_host < 1:
        raise ConfigError(f"--per-host {options.per_host}: expected at least 1")
    cluster = even_cluster(
        options.workers, parse_link(options.link), per_host=options.per_host, cores=options.cores
    )
    return msgspec.structs.replace(cluster, server_hosts=options.servers)


def _candidate(text: str, options: SimulateOptions) -> Candidate:
    # Without servers of their own, one server stands beside each worker.
    if options.servers:
        return candidate(text, options.servers)
    return candidate(text, options.workers, is_colocated=True)


def _print_head(scenario: Scenario, options: SimulateOptions) -> None:
    cluster, profile = scenario.cluster, scenario.profile
    words = [
        f"{profile.name}: {data_size(profile.parameters_bytes)} of gradients, a step computes"
        f" {short_duration(profile.compute_s)} (sd {percent(profile.cv)})",
        f"{cluster.num_workers} workers on {cluster.num_hosts} hosts, link {cluster.link.text}",
        f"{scenario.steps} steps, seed {scenario.seed}",
    ]
    if options.servers:
        words.append(f"{options.servers} servers on hosts of their own")
    if options.straggler:
        words.append(f"stragglers {options.straggler}")
    interval_s = scenario.failures.interval_s
    if interval_s:
        words.append(f"a checkpoint every {short_duration(interval_s)}")
    sys.stdout.write("; ".join(words) + "\n\n")


def _cells(one: Simulated) -> list[str]:
    stale = "-"
    if one.most_staleness:
        stale = f"{short_number(one.mean_staleness)} ({short_number(one.high_staleness)})"
    failures = f"{one.failures.failures} ({percent(one.failure_share)})"
    return [
        one.candidate.label,
        short_duration(one.step_s),
        rate(one.samples_per_s),
        percent(one.efficiency),
        percent(one.waiting),
        percent(one.exchanging),
        stale,
        data_size(one.sent_bytes),
        failures if one.failure_share else "-",
        one.limit,
    ]


def _print_sweep(rows: Sequence[SweepRow]) -> None:
    cells = [
        [_cells(row.result)[0], str(row.workers), f"{row.bytes_per_s * 8 / 1e9:g}"]
        + [str(row.per_host), *_cells(row.result)[1:]]
        for row in rows
    ]
    header = (_HEADER[0], "workers", "Gbit/s", "per host", *_HEADER[1:])
    sys.stdout.write(text_table(header, cells))


def _plot(rows: Sequence[SweepRow], axis: str) -> str:
    """Return a plot with a line for each pace, and for each value of the other axes."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        gbit = row.bytes_per_s * 8 / 1e9
        at = {"workers": row.workers, "bandwidth": gbit, "per-host": row.per_host}
        name = str(row.result.candidate.pace)
        if axis != "bandwidth" and len({one.bytes_per_s for one in rows}) > 1:
            name += f", {gbit:g} Gbit/s"
        if axis != "per-host" and len({one.per_host for one in rows}) > 1:
            name += f", {row.per_host} per host"
        lines.setdefault(name, []).append((at[axis], 100 * row.result.efficiency))
    labels = {"bandwidth": "bandwidth of a link (Gbit/s)", "per-host": "workers on each host"}
    label = labels.get(axis, axis)
    return family_plot(
        lines,
        title="Efficiency relative to workers that only compute",
        x_label=label,
        y_label="efficiency (%)",
    )


def _write(path: Path | None, text: str) -> None:
    if path is None:
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
    sys.stdout.write(f"wrote {path}\n")
