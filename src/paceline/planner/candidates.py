"""Candidates: the configurations of a job that the planner compares, family by family."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.compress.registry import CodecSpec, parse_codec
from paceline.errors import UsageError
from paceline.pace.parse import PaceSpec, parse
from paceline.planner.cluster import Cluster
from paceline.planner.profile import ModelProfile

_CODECS = ("bf16", "int8", "topk:0.01+int8")
_BLOCKS = ("local:8", "local:32", "diloco:50", "diloco:500")
_MOST_SERVERS = 64
_SERVED = ("ps", "ssp:3", "async")
# Paces whose exchange the formulas describe. The others are variants of these with other rules.
PLANNED = ("allreduce", "ps", "ssp", "async", "local", "diloco", "bmuf", "post_local")
BLOCKED = ("local", "diloco", "bmuf", "post_local")


@dataclass(frozen=True)
class Candidate:
    """One way to run the job."""

    pace: PaceSpec
    num_servers: int = 0
    is_colocated: bool = False  # one server beside each worker
    mesh: str = ""

    @property
    def codec(self) -> CodecSpec:
        return parse_codec(self.pace.options.get("compress", "none"))

    @property
    def is_exact(self) -> bool:
        """Whether it equals one process with the global batch."""
        return self.pace.name in ("allreduce", "ps") and not self.codec.is_on

    @property
    def steps_per_round(self) -> int:
        """Steps between two exchanges."""
        return int(self.pace.value) if self.pace.name in BLOCKED else 1

    @property
    def label(self) -> str:
        """As a row of the table: "ps, 2 servers"."""
        words = [str(self.pace)]
        if self.mesh:
            words.append(self.mesh)
        if self.is_colocated:
            words.append("colocated")
        elif self.num_servers:
            words.append(f"{self.num_servers} server{'s' * (self.num_servers > 1)}")
        return ", ".join(words)

    def command(self, num_workers: int, where: str, script: str, servers_on: str = "") -> str:
        """Return what to type; `servers_on`: the option for servers on hosts of their own."""
        words = ["paceline run"]
        words += [f"--mesh {self.mesh}"] if self.mesh else [f"-n {num_workers}"]
        if where:
            words.append(where)
        if self.is_colocated:
            words.append("-s colocated")
        elif self.num_servers:
            words.append(f"-s {self.num_servers}{servers_on and ' '}{servers_on}")
        if str(self.pace) != "allreduce":
            text = str(self.pace)
            words.append(f'--pace "{text}"' if "[" in text else f"--pace {text}")
        return " ".join([*words, script])


def candidate(text: str, num_servers: int = 0, *, is_colocated: bool = False) -> Candidate:
    """Return the candidate of a pace; UsageError for one that cannot be planned."""
    spec = parse(text)
    if spec.name not in PLANNED:
        raise UsageError(
            f"pace {spec.name} cannot be planned: the cost model covers {', '.join(PLANNED)};"
            " measure it with `paceline compare`"
        )
    if not spec.needs_servers:
        return Candidate(spec)
    return Candidate(spec, num_servers or 1, is_colocated)


def with_servers(pace: str, cluster: Cluster) -> Iterator[Candidate]:
    """Yield a pace with the numbers of servers that are worth a row: 1, 2, 4 ... and colocated.

    Without hosts of their own, as many servers as workers are the same as colocated ones.
    """
    n, count = cluster.num_workers, 1
    while count < n + bool(cluster.server_hosts) and count <= _MOST_SERVERS:
        yield candidate(pace, count)
        count *= 2
    yield candidate(pace, n, is_colocated=True)


def enumerate_candidates(profile: ModelProfile, cluster: Cluster) -> Iterator[Candidate]:
    """Yield every candidate of every family for this model and cluster."""
    n = cluster.num_workers
    yield candidate("allreduce")
    if n == 1:
        return
    if cluster.num_hosts > 1:  # within a host nothing is sent, so a codec only costs
        for codec in _CODECS:
            yield candidate(f"allreduce[compress={codec}]")
    for pace in _SERVED:
        yield from with_servers(pace, cluster)
    for pace in _BLOCKS:
        yield candidate(pace)
    if cluster.num_hosts > 1:
        yield candidate("local:8[compress=int8]")
    for mesh in meshes(n, profile.num_layers):
        yield Candidate(parse("allreduce"), mesh=mesh)


def meshes(num_workers: int, num_layers: int) -> list[str]:
    """Return the meshes worth a row: shards of the state (fsdp), of layers (pp), of matrices (tp).

    Divisors of the number of workers only; pp needs as many blocks as stages.
    """
    found = []
    for parts in _divisors(num_workers):
        rest = num_workers // parts
        front = f"dp={rest}," if rest > 1 else ""
        found.append(f"{front}fsdp={parts}")
        if num_layers >= parts:
            found += [f"{front}pp={parts}", f"{front}tp={parts}"]
    return found


def _divisors(count: int) -> Sequence[int]:
    every = [parts for parts in range(2, count + 1) if count % parts == 0]
    return every if len(every) <= 3 else [every[0], every[len(every) // 2], every[-1]]
