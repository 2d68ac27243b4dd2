"""The ranked plan: predictions of all candidates, the recommendation, and a reason for each.

Rows are ordered by the time for a sample. The recommendation is the fastest row whose effect on the
loss is known; a row that equals one process with the global batch is preferred if it is at most 5 %
slower. Candidates that do not fit into memory are listed with what is missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.errors import UsageError
from paceline.planner.automatic.budget import within_budget
from paceline.planner.candidates import Candidate, candidate, enumerate_candidates, with_servers
from paceline.planner.cluster import Cluster
from paceline.planner.predict import Prediction, predict
from paceline.planner.profile import ModelProfile
from paceline.planner.quantities import NO_STRAGGLER, Straggler
from paceline.planner.servers import ServerChoice, choose_servers
from paceline.planner.statistical_cost import StatisticalCost, statistical_cost
from paceline.planner.step_costs import DEFAULT_CONSTANTS, Constants
from paceline.runtime.formatting import data_size, percent

_PREFER_EXACT = 1.05


@dataclass(frozen=True)
class PlanRow:
    """One candidate in the table."""

    prediction: Prediction
    cost: StatisticalCost
    reason: str

    @property
    def candidate(self) -> Candidate:
        return self.prediction.candidate


@dataclass(frozen=True)
class Plan:
    """What the planner recommends, and everything that it considered."""

    rows: tuple[PlanRow, ...]  # the fastest first
    best: PlanRow
    servers: ServerChoice | None
    too_large: tuple[tuple[Candidate, float], ...]  # and how many bytes are missing


def make_plan(
    profile: ModelProfile,
    cluster: Cluster,
    *,
    paces: Sequence[str] = (),
    straggler: Straggler = NO_STRAGGLER,
    constants: Constants = DEFAULT_CONSTANTS,
    copies: int = 1,
    bandwidth_cv: float = 0.0,
    max_wire_bytes_per_s: float | None = None,
    measured: dict[str, float] | None = None,
) -> Plan:
    """Predict all candidates (or those of `paces`) and rank them.

    `max_wire_bytes_per_s`: only candidates whose hosts send at most so much. Raises UsageError if
    nothing fits into memory or into that budget.
    """

    def predicted(one: Candidate) -> Prediction:
        return predict(
            one,
            profile,
            cluster,
            straggler=straggler,
            constants=constants,
            copies=copies,
            bandwidth_cv=bandwidth_cv,
        )

    given = _named(paces, cluster) if paces else enumerate_candidates(profile, cluster)
    predictions = [predicted(one) for one in given]
    fitting, too_large = _split_by_memory(predictions, cluster)
    if not fitting:
        raise UsageError(_fits_nowhere(profile, cluster, too_large))
    allowed = within_budget(fitting, max_wire_bytes_per_s)
    ordered = sorted(allowed, key=lambda one: -one.samples_per_s)
    plain = next((one for one in fitting if str(one.candidate.pace) == "allreduce"), ordered[0])
    rows = tuple(
        PlanRow(one, statistical_cost(one.candidate, measured), reason_of(one, plain))
        for one in ordered
    )
    served = None
    if cluster.num_workers > 1 and any(one.candidate.num_servers for one in predictions):
        pace = (
            "ps"
            if not paces
            else next(str(one.candidate.pace) for one in predictions if one.candidate.num_servers)
        )
        served = choose_servers(
            lambda count: predicted(candidate(pace, count)), min(max(cluster.num_workers, 2), 64)
        )
    return Plan(rows, _recommended(rows), served, tuple(too_large))


def _named(paces: Sequence[str], cluster: Cluster) -> Iterable[Candidate]:
    for text in paces:
        one = candidate(text)
        if one.num_servers:
            yield from with_servers(text, cluster)
        else:
            yield one


def _split_by_memory(
    predictions: Sequence[Prediction], cluster: Cluster
) -> tuple[list[Prediction], list[tuple[Candidate, float]]]:
    fitting, too_large = [], []
    for one in predictions:
        missing = (
            max(
                host.workers * one.memory_bytes - host.memory_bytes
                for host in cluster.hosts
                if host.memory_bytes
            )
            if any(host.memory_bytes for host in cluster.hosts)
            else 0.0
        )
        if missing > 0:
            too_large.append((one.candidate, missing))
        else:
            fitting.append(one)
    return fitting, too_large


def _fits_nowhere(
    profile: ModelProfile, cluster: Cluster, too_large: Sequence[tuple[Candidate, float]]
) -> str:
    least, missing = min(too_large, key=lambda one: one[1])
    smallest = min(host.memory_bytes for host in cluster.hosts if host.memory_bytes)
    fixed = profile.activation_bytes
    workers, most = cluster.num_workers, cluster.most_workers
    shards = next(
        (k for k in range(2, 4097) if most * (profile.state_bytes / k + fixed) <= smallest), None
    )
    hint = (
        f"fsdp={shards} would fit: use at least {shards} workers with as much memory each"
        if shards and shards > workers
        else f"use --mesh fsdp={shards}"
        if shards
        else "no number of shards helps: its activations alone do not fit; use smaller batches"
    )
    return (
        f"the model fits on no host in any way: it needs {data_size(profile.memory_bytes)} per"
        f" process; {least.label} comes closest and lacks {data_size(missing)} on a host of"
        f" {data_size(smallest)}; {hint}"
    )


def _recommended(rows: Sequence[PlanRow]) -> PlanRow:
    known = [row for row in rows if row.cost.source != "unknown"] or list(rows)
    fastest = known[0]
    for row in known:
        if fastest.prediction.samples_per_s <= row.prediction.samples_per_s * _PREFER_EXACT and (
            row.candidate.is_exact
        ):
            return row
    return fastest


def reason_of(one: Prediction, plain: Prediction) -> str:
    """Return one line: what the step waits for, and what the candidate changes about it."""
    busy = one.busy_s[one.limit] / one.step_s
    words = f"{one.limit} {percent(min(busy, 1.0))} busy"
    if one.candidate != plain.candidate:
        if plain.sent_bytes and one.sent_bytes < plain.sent_bytes * 0.95:
            words += f"; sends 1/{plain.sent_bytes / max(one.sent_bytes, 1):.3g} of allreduce"
        elif one.sent_bytes > plain.sent_bytes * 1.05:
            words += (
                f"; sends {one.sent_bytes / max(plain.sent_bytes, 1):.3g} x allreduce"
                if (plain.sent_bytes)
                else "; sends what allreduce shares in memory"
            )
    return words
