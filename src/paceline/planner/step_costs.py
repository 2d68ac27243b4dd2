"""StepCosts: what one step of a candidate consists of, on one cluster. No chance in it.

predict.py turns it into a mean and an interval; simulation/ plays it out with random delays. Every
resource (computation, cores, links, servers) is busy for some time in each step; the busiest is the
limiting one.

`Constants` are what our own code costs. bench/planner.py fits them to its calibration
configurations and tests them on the held-out ones; docs/guides/planning.md has both tables.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from paceline.planner import formulas
from paceline.planner.candidates import BLOCKED, Candidate
from paceline.planner.cluster import Cluster
from paceline.planner.codecs import CodecCost, cost_of
from paceline.planner.profile import ModelProfile
from paceline.planner.quantities import Link

if TYPE_CHECKING:  # the command line must not wait for numpy
    import numpy as np
    from numpy.typing import NDArray

LOCKSTEP, BLOCKS, FREE = "lockstep", "blocks", "free"
AnyFactor = TypeVar("AnyFactor", float, "NDArray[np.float64]")


@dataclass(frozen=True)
class Constants:
    """What our own code costs; "copies" are copies of the model's bytes on one core."""

    bucket_s: float = 0.3e-3  # of each exchange: notice, descriptor, wake up
    step_s: float = 0.5e-3  # of each step: the mask, the agreement, reports
    shared_copies: float = 0.7  # an all-reduce in shared memory, for each worker of the host
    server_copies: float = 0.5  # a server, for each push
    apply_copies: float = 2.0  # a server, to apply the optimizer
    round_copies: float = 16.0  # a worker, for an averaging round
    link_share: float = 0.93  # of a link's rate that our payload reaches
    sigma: float = 0.126  # error of this model: standard deviation of the logarithm of a time


DEFAULT_CONSTANTS = Constants()
# Measured links: what our payload reaches was measured.
ON_MEASURED_LINKS = replace(DEFAULT_CONSTANTS, link_share=1.0)


@dataclass(frozen=True)
class StepCosts:
    """The parts of a step. All times are for a worker of mean speed."""

    kind: str  # LOCKSTEP, BLOCKS or FREE
    before_s: float  # input and forward
    backward_s: float
    ready_s: tuple[float, ...] = ()  # of each bucket, since the start of backward
    takes_s: tuple[float, ...] = ()  # to exchange each bucket
    tail_s: float = 0.0  # after the exchange: optimizer, pull
    round_s: float = 0.0  # BLOCKS: an averaging round
    per_round: int = 1  # BLOCKS: steps from one round to the next
    served_s: float = 0.0  # FREE: how long one push occupies the servers
    bound: int | None = None  # FREE: of the clock rule
    sent_bytes: float = 0.0  # of a host in a step, to other hosts
    memory_bytes: float = 0.0  # of the largest process
    data_share: float = 1.0  # of the workers, those with batches of their own
    stretch: float = 1.0  # of computation, because exchanges need its cores; the times contain it
    busy_s: dict[str, float] = field(default_factory=dict)

    @property
    def compute_s(self) -> float:
        """Computation before the last gradient is ready; for BLOCKS the whole local step."""
        return self.before_s + self.backward_s

    def slowed(self, factor: AnyFactor) -> AnyFactor:
        """Return by what `compute_s` grows on a worker that computes so many times as long.

        Its exchanges need no more of the cores than those of others.
        """
        return 1 + (factor - 1) / self.stretch

    @property
    def alone_s(self) -> float:
        """FREE: a step without the time at the servers, if no other worker is there."""
        ready_s = [self.before_s + ready for ready in self.ready_s]
        return max(self.compute_s, formulas.in_order_s(ready_s, self.takes_s)) + self.tail_s


def contention(profile: ModelProfile, cluster: Cluster, copies: int = 1) -> float:
    """Return how much slower workers compute than in the measurement, for lack of cores.

    `copies` of the process were measured at the same time on one machine.
    """
    worst = 1.0
    for cores, _, workers in cluster.machine_loads():
        now = max(1.0, workers * profile.threads / cores)
        then = max(1.0, copies * profile.threads / cores)
        worst = max(worst, now / then)
    return worst / min(host.speed for host in cluster.hosts)


def step_costs(
    candidate: Candidate,
    profile: ModelProfile,
    cluster: Cluster,
    constants: Constants = DEFAULT_CONSTANTS,
    copies: int = 1,
) -> StepCosts:
    """Return the costs of a candidate. `copies`: see `contention`."""
    local = profile.scaled(contention(profile, cluster, copies))
    ways = _Ways(local, cluster, constants, cost_of(candidate.codec, cluster.num_hosts))
    if candidate.mesh:
        return ways.mesh(candidate.mesh)
    if candidate.pace.name in BLOCKED:
        return ways.blocks(candidate)
    if candidate.num_servers:
        return ways.served(candidate)
    return ways.allreduce()


@dataclass(frozen=True)
class _Ways:
    """The families, for one model on one cluster."""

    profile: ModelProfile  # with the contention of this cluster
    cluster: Cluster
    constants: Constants
    codec: CodecCost

    # -- what all of them need ----------------------------------------------------------------

    @property
    def copy_s(self) -> float:
        """One copy of the model's bytes, on one core."""
        return self.profile.parameters_bytes / self.cluster.copy_bytes_per_s

    @property
    def link_bytes_per_s(self) -> float:
        return self._link.bytes_per_s * self.constants.link_share

    @property
    def latency_s(self) -> float:
        return self._link.latency_s if self.cluster.num_hosts > 1 else 0.0

    @cached_property
    def _link(self) -> Link:
        return self.cluster.slowest_link()

    @cached_property
    def most_workers(self) -> int:
        """Workers of the fullest host."""
        return self.cluster.most_workers

    @cached_property
    def saturation(self) -> float:
        """Share of cores that computation keeps busy: 1 if none is left."""
        return max(
            min(1.0, workers * self.profile.threads / cores)
            for cores, _, workers in self.cluster.machine_loads()
        )

    def allreduce_s(self, num_bytes: float) -> float:
        """Return one all-reduce: shared memory in each host, a ring between the hosts."""
        most, hosts = self.most_workers, self.cluster.num_hosts
        inside_s = 0.0
        if most > 1:
            copies = self.constants.shared_copies * most
            inside_s = copies * num_bytes / self.cluster.copy_bytes_per_s
        between_s = 0.0
        if hosts > 1:
            sent = self.codec.ring_share(hosts) * num_bytes
            between_s = sent / self.link_bytes_per_s + 2 * (hosts - 1) * self.latency_s
        return max(inside_s, between_s) + self.constants.bucket_s

    def wire_cpu_s(self, sent_bytes: float) -> float:
        """Return the CPU time of sending so much and receiving as much, for each worker."""
        both = 2 * sent_bytes * self.cluster.wire_cpu_s_per_byte
        return both / self.most_workers

    def stretch(self, cpu_s: float) -> float:
        """Return how much longer computation takes because exchanges need its cores.

        `cpu_s` is CPU time of each worker's exchange. Where cores are idle it costs nothing.
        """
        return 1 + self.saturation * cpu_s / max(self.profile.compute_s, 1e-9)

    def busy(self, *, link_s: float, cpu_s: float) -> dict[str, float]:
        """Return how long each resource is busy in a step."""
        busy = {"computation": self.profile.compute_s, "link": link_s}
        if self.saturation >= 1:
            busy["cores"] = self.profile.compute_s + cpu_s
        return busy

    # -- families -----------------------------------------------------------------------------

    def allreduce(self) -> StepCosts:
        profile, hosts, most = self.profile, self.cluster.num_hosts, self.most_workers
        takes_s = tuple(self.allreduce_s(bucket.num_bytes) for bucket in profile.buckets)
        sent = self.codec.ring_share(hosts) * profile.parameters_bytes if hosts > 1 else 0.0
        shared_s = self.constants.shared_copies * self.copy_s if most > 1 else 0.0
        cpu_s = self.codec.passes * self.copy_s + self.wire_cpu_s(sent) + shared_s
        stretch = self.stretch(cpu_s)
        return StepCosts(
            LOCKSTEP,
            (profile.input_s + profile.forward_s) * stretch,
            profile.backward_s * stretch,
            tuple(bucket.ready_s * stretch for bucket in profile.buckets),
            takes_s,
            # Workers of one host share the optimizer's work.
            tail_s=profile.optimizer_s / max(1, most) + self.constants.step_s,
            sent_bytes=sent,
            memory_bytes=profile.memory_bytes,
            busy_s=self.busy(link_s=sum(takes_s) if hosts > 1 else 0.0, cpu_s=cpu_s),
            stretch=stretch,
        )

    def blocks(self, candidate: Candidate) -> StepCosts:
        """Return local steps with an averaging round every H steps; the round is not hidden."""
        profile, steps = self.profile, candidate.steps_per_round
        hosts = self.cluster.num_hosts
        takes_s = sum(self.allreduce_s(bucket.num_bytes) for bucket in profile.buckets)
        sent = self.codec.ring_share(hosts) * profile.parameters_bytes if hosts > 1 else 0.0
        passes = self.constants.round_copies + self.codec.passes
        cpu_s = passes * self.copy_s + self.wire_cpu_s(sent)
        kept = 1 if candidate.pace.name in ("local", "post_local") else 3
        return StepCosts(
            BLOCKS,
            profile.input_s + profile.forward_s,
            profile.backward_s + profile.optimizer_s,
            round_s=takes_s + cpu_s,
            per_round=steps,
            sent_bytes=sent / steps,
            memory_bytes=profile.memory_bytes + kept * profile.parameters_bytes,
            busy_s=self.busy(link_s=takes_s / steps if hosts > 1 else 0.0, cpu_s=cpu_s / steps),
        )

    def served(self, candidate: Candidate) -> StepCosts:
        """Return a step through servers: push during backward, apply at the commit, then pull.

        In lockstep the servers send back the average and later the parameters; free-running
        workers get the parameters only. Servers without hosts of their own are spread over the
        workers' hosts.
        """
        profile, cluster, k = self.profile, self.cluster, candidate.num_servers
        n, most, hosts = cluster.num_workers, self.most_workers, cluster.num_hosts
        is_free = candidate.pace.is_free_running
        model, copy = profile.parameters_bytes, cluster.copy_bytes_per_s
        is_apart = cluster.server_hosts > 0 and not candidate.is_colocated
        ports = min(k, cluster.server_hosts if is_apart else hosts)
        away = 1.0 if is_apart else 1 - 1 / hosts
        share = self.codec.first  # only what workers send is compressed

        def travel_s(num_bytes: float, senders: int) -> float:
            """Return one direction of some workers' bytes, by their links and by the servers'."""
            mine = min(senders, most) * num_bytes
            theirs = senders * num_bytes / ports
            return max(mine, theirs) * away / self.link_bytes_per_s

        senders = 1 if is_free else n
        add_s = self.constants.server_copies / k  # in copies, for one push
        # Beside workers, the servers' averages leave by the same links as the workers' pushes.
        pushed = share if is_apart or is_free else share + 1
        takes_s = tuple(
            max(
                travel_s(bucket.num_bytes * pushed, senders),
                add_s * senders * bucket.num_bytes / copy,
            )
            + (self.constants.bucket_s + 2 * self.latency_s)
            for bucket in profile.buckets
        )
        apply_s = self.constants.apply_copies * self.copy_s / k
        pull_s = travel_s(model, senders)
        back = 1 if is_free else 2
        sent = most * model * away * share
        if not is_apart:  # the servers' answers leave the same hosts
            sent += n * model * away * back / max(hosts, 1)
        cpu_s = self.wire_cpu_s(sent) + self.codec.passes * self.copy_s
        served_cpu_s = add_s * self.copy_s + apply_s * (1 if is_free else 1 / n)
        if not is_apart:
            cpu_s += served_cpu_s * k
        stretch = self.stretch(cpu_s)
        both = max(share, back) if is_apart else share + back
        busy = self.busy(link_s=travel_s(model * both, n), cpu_s=cpu_s)
        busy["server cores"] = served_cpu_s * n
        link_s = model * away * both / (ports * self.link_bytes_per_s)
        tail_s = pull_s + 2 * self.latency_s + self.constants.step_s
        served_s = max(served_cpu_s, link_s) if is_free else 0.0
        # What occupies the servers is not counted again in a worker's own pull.
        tail_s += -min(pull_s, served_s) if is_free else apply_s
        costs = StepCosts(
            FREE if is_free else LOCKSTEP,
            (profile.input_s + profile.forward_s) * stretch,
            profile.backward_s * stretch,
            tuple(bucket.ready_s * stretch for bucket in profile.buckets),
            takes_s,
            tail_s=tail_s,
            served_s=served_s,
            bound=int(candidate.pace.value) if candidate.pace.name == "ssp" else None,
            sent_bytes=sent,
            memory_bytes=profile.memory_bytes,
            busy_s=busy,
            stretch=stretch,
        )
        return _with_crowd(costs, n) if is_free else costs

    def mesh(self, text: str) -> StepCosts:
        """Return a step on a mesh of dp and one more axis."""
        sizes = {axis: int(size) for axis, size in (part.split("=") for part in text.split(","))}
        profile, dp = self.profile, sizes.pop("dp", 1)
        ((axis, k),) = sizes.items()
        compute_s, activations = profile.compute_s, float(profile.activation_bytes)
        if axis == "pp":
            compute_s /= k * (1 - formulas.bubble_share(k, 4 * k))
            moved = 2.0 * profile.hidden_bytes
        elif axis == "tp":
            compute_s /= k
            activations /= k
            moved = 4.0 * profile.num_layers * profile.hidden_bytes * 2 * (k - 1) / k
        else:  # fsdp: gather for forward and for backward, scatter gradients
            moved = 3.0 * (k - 1) / k * profile.parameters_bytes
        is_between = self.cluster.num_hosts > 1
        rate = self.link_bytes_per_s if is_between else self.cluster.copy_bytes_per_s
        shard = profile.parameters_bytes / k
        moving_s = moved / rate + formulas.ring_s(shard, dp, rate, self.latency_s)
        sent = moved + formulas.ring_bytes(shard, dp)
        return StepCosts(
            LOCKSTEP,
            0.0,
            compute_s,
            tail_s=moving_s + self.constants.step_s,
            sent_bytes=sent if is_between else 0.0,
            # The rest of a process (interpreter, libraries) is not divided.
            memory_bytes=max(
                profile.memory_bytes - profile.state_bytes * (1 - 1 / k),
                profile.state_bytes / k + activations,
            ),
            data_share=1.0 if axis == "fsdp" else 1 / k,
            busy_s=self.busy(link_s=moving_s if is_between else 0.0, cpu_s=0.0),
        )


def _with_crowd(costs: StepCosts, num_workers: int) -> StepCosts:
    """Return the costs with exchanges that share servers and links with those of other workers.

    While a worker exchanges, the others occupy them for a part of the time. How large it is depends
    on the step, which depends on it.
    """
    exchange_s = costs.alone_s - costs.compute_s
    step_s = costs.alone_s + costs.served_s
    others = 0.0
    for _ in range(8):
        others = (num_workers - 1) * costs.served_s / step_s
        step_s = costs.alone_s + costs.served_s + exchange_s * others
    return replace(costs, tail_s=costs.tail_s + exchange_s * others)
