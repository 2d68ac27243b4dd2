"""Sweeps: a simulation for each pace, number of workers, bandwidth and placement; CSV rows."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import msgspec

from paceline.errors import ConfigError
from paceline.planner.candidates import Candidate
from paceline.planner.cluster import even_cluster
from paceline.planner.quantities import parse_rate, rate_text
from paceline.planner.simulation.run import Scenario, Simulated, simulate

AXES = ("workers", "bandwidth", "per-host")
COLUMNS = (
    *("pace", "servers", "workers", "bandwidth", "per_host", "step_s", "samples_per_s"),
    *("efficiency", "waiting", "exchanging", "mean_staleness", "p99_staleness", "failures"),
    *("failure_share", "sent_bytes", "limit"),
)


def parse_sweep(text: str) -> tuple[str, list[float]]:
    """Parse "workers=8,64,512", "bandwidth=1gbit,10gbit" or "per-host=1,8"."""
    axis, equals, values = text.partition("=")
    hint = "write workers=8,64,512, bandwidth=1gbit,10gbit or per-host=1,8"
    if axis not in AXES or not equals or not values:
        raise ConfigError(f"--sweep {text[:60]!r}: {hint}")
    parts = values.split(",")
    if axis == "bandwidth":
        return axis, [parse_rate(part, "--sweep bandwidth:") for part in parts]
    if not all(part.strip().isdecimal() and 0 < int(part) <= 100_000 for part in parts):
        raise ConfigError(f"--sweep {text[:60]!r}: expected numbers from 1 to 100000; {hint}")
    return axis, [float(part) for part in parts]


class SweepRow(msgspec.Struct, frozen=True):
    """One point of a sweep."""

    workers: int
    bytes_per_s: float
    per_host: int
    result: Simulated


def sweep(
    candidates: Sequence[Candidate],
    scenario: Scenario,
    workers: Sequence[float],
    bandwidths: Sequence[float],
    per_hosts: Sequence[float],
) -> Iterator[SweepRow]:
    """Yield the simulations of all points.

    A host has more cores if it has more workers. Servers and their hosts grow with the workers, in
    the ratio of the scenario. The failures of a job grow with its workers as well.
    """
    base = scenario.cluster
    plan = scenario.failures
    points = itertools.product(
        workers or [base.num_workers],
        bandwidths or [base.link.bytes_per_s],
        per_hosts or [base.most_workers],
    )
    for count, rate, per_host in points:
        ratio = count / base.num_workers
        mtbf_s = plan.mtbf_s / ratio if plan.mtbf_s else None
        cluster = even_cluster(
            int(count),
            base.link._replace(bytes_per_s=rate),
            per_host=int(per_host),
            cores=max(1, round(base.hosts[0].cores * per_host / base.most_workers)),
        )
        spare = round(base.server_hosts * ratio)
        cluster = msgspec.structs.replace(
            cluster, server_hosts=max(1, spare) if base.server_hosts else 0
        )
        changed = replace(scenario, cluster=cluster, failures=replace(plan, mtbf_s=mtbf_s))
        for one in candidates:
            servers = max(1, round(one.num_servers * ratio)) if one.num_servers else 0
            result = simulate(replace(one, num_servers=servers), changed)
            yield SweepRow(int(count), rate, int(per_host), result)


def as_csv(rows: Sequence[SweepRow]) -> str:
    """Return the rows as CSV with a header."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        one = row.result
        writer.writerow(
            [
                str(one.candidate.pace),
                one.candidate.num_servers,
                row.workers,
                rate_text(row.bytes_per_s),
                row.per_host,
                *(f"{value:.6g}" for value in (one.step_s, one.samples_per_s, one.efficiency)),
                *(f"{value:.6g}" for value in (one.waiting, one.exchanging, one.mean_staleness)),
                f"{one.high_staleness:.6g}",
                one.failures.failures,
                f"{one.failure_share:.6g}",
                f"{one.sent_bytes:.6g}",
                one.limit,
            ]
        )
    return text.getvalue()
