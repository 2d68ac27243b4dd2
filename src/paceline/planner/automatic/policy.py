"""Which paces `auto` may choose: none that changes what is trained, unless the user allows it.

    exact     the result equals one process with the global batch: allreduce, and ps with servers
    codecs    the default: also gradients rounded to bf16 or int8, in lockstep; auto reports it
    stale     also workers that do not wait for each other: ssp, async (with servers)
    local     also local steps with an average every H steps: local, diloco

A pace whose effect on the loss is unknown (statistical_cost.py) is never chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from paceline.errors import UsageError
from paceline.pace.parse import PaceSpec, parse
from paceline.planner.automatic.budget import STRONG_CODECS
from paceline.planner.candidates import PLANNED, Candidate
from paceline.planner.statistical_cost import statistical_cost

_CODECS = ("bf16", "int8")  # within the noise of our measurements
_STALE = ("ssp:3", "async")
_LOCAL = ("local:8", "local:16", "diloco:50", "diloco:100")
MEASURED_AT = "allreduce"  # the pace of the first steps: exact, and possible in every job


class Servers(NamedTuple):
    """The parameter servers that a job has."""

    number: int = 0
    is_colocated: bool = False  # one beside each worker
    num_hosts: int = 0  # hosts without workers


def require_planned(pace: PaceSpec) -> None:
    """Raise UsageError for a pace that the cost model does not cover."""
    if pace.name not in PLANNED:
        raise UsageError(
            f"pace {pace} cannot be planned, so --max-wire cannot fit it into a budget: the cost"
            f" model covers {', '.join(PLANNED)}; leave out --max-wire, or choose one of these"
        )


def allowed_candidates(
    allow: str, servers: Servers, num_hosts: int, *, has_budget: bool
) -> list[Candidate]:
    """Return what auto may choose from, the pace of the first steps first.

    With a budget, codecs that cost some loss in our tables are included: fewer bytes were asked
    for.
    """
    found = [make_candidate(text, servers) for text in _texts(allow, servers, num_hosts)]
    if has_budget and allow != "exact" and num_hosts > 1:
        found += [
            make_candidate(f"{name}[compress={codec}]", servers)
            for name in (("allreduce", "ps") if servers.number else ("allreduce",))
            for codec in STRONG_CODECS
        ]
    return [one for one in found if statistical_cost(one).source != "unknown"]


def _texts(allow: str, servers: Servers, num_hosts: int) -> Iterator[str]:
    lockstep = ("allreduce", "ps") if servers.number else ("allreduce",)
    yield from lockstep
    if allow != "exact" and num_hosts > 1:  # within a host nothing is sent
        for name in lockstep:
            for codec in _CODECS:
                yield f"{name}[compress={codec}]"
    if "stale" in allow and servers.number:
        yield from _STALE
    if "local" in allow:
        yield from _LOCAL


def make_candidate(text: str, servers: Servers) -> Candidate:
    """Return a pace as a candidate with the servers of the job."""
    spec = parse(text)
    if not spec.needs_servers:
        return Candidate(spec)
    return Candidate(spec, servers.number or 1, servers.is_colocated)
