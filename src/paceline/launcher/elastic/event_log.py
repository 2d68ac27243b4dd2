"""The event log: what happened to the members of a job, as lines for people and as a summary.

    14:02:07 worker 3 (host b, pid 4242) lost: killed by signal 9; continuing with 3 workers
    14:02:07 step 412 exchanged again with 3 workers (0.1 s)
    14:02:08 worker 3 (host b, pid 4260) joined at step 415, 0.8 s after the loss

Plain data; callers pass the clock and print the lines. There is a line for every event when it
happens, and at the end of the job one line for each loss with everything that followed from it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from paceline.control.member import Member, Membership
from paceline.control.messages import LossKind, Presence
from paceline.launcher.job_size import ElasticPlan
from paceline.observe.telemetry.events import (
    BackupCaughtUp,
    MembershipEvent,
    PartitionsMoved,
    Promoted,
    Resumed,
)

_HOT = 1.5  # times an equal share
_MAX_SHOWN = 5  # losses with a line in the summary


@dataclass
class _Loss:
    member: Member
    at_s: float
    words: str  # the process, and why it was lost
    ranks: frozenset[int]  # of its whole unit
    followed_by: list[str] = field(default_factory=list)


class EventLog:
    """Knows all past and present members. Not thread-safe: used in the launcher's loop."""

    def __init__(self, plan: ElasticPlan, unit_size: int = 1) -> None:
        self._plan = plan
        self._unit_size = unit_size
        self.members: dict[int, Member] = {}  # by rank
        self.membership: Membership | None = None
        self.step = 0  # the highest reported one
        self._lost: list[_Loss] = []
        self.lost_ranks: set[int] = set()
        self._open: dict[tuple[str, int], _Loss] = {}  # slots that wait for a replacement
        self._gap: tuple[float, int] | None = (
            None  # a loss, and the step at that time, until the next step
        )
        self._paused_s = 0.0
        self._replaced = self._added = 0

    def take(self, membership: Membership) -> None:
        """Set the current membership."""
        self.membership = membership
        self.members.update((member.rank, member) for member in membership.members)

    def name(self, rank: int) -> str:
        member = self.members[rank]
        return _member_words(member.role, member.number, member.where)

    def lost(self, rank: int, why: str, kind: LossKind, now_s: float) -> str | None:
        """Return a line about a loss and what follows from it; None if there was one before.

        Workers that are retired with their unit are in the line of the lost worker.
        """
        if rank in self.lost_ranks:
            return None
        member = self.members[rank]
        self.lost_ranks.add(rank)
        if not kind.is_own:
            return None
        peers = self._unit_peers(member)
        self.lost_ranks.update(peer.rank for peer in peers)
        words = stamped(f"{self.name(rank)} lost: {why}{_with_unit(peers)}")
        loss = _Loss(member, now_s, words, frozenset({rank, *(peer.rank for peer in peers)}))
        self._lost.append(loss)
        for one in (member, *peers):
            self._open[one.role, one.number] = loss
        self._gap = self._gap or (now_s, self.step)
        next_words = self._next_words(member)
        return loss.words + (f"; {next_words}" if next_words else "")

    def _unit_peers(self, lost: Member) -> list[Member]:
        """Return the other workers of its unit, which are retired with it."""
        if lost.role != "worker":
            return []
        first = lost.rank - lost.number % self._unit_size  # their ranks are in a row
        ranks = range(first, first + self._unit_size)
        return [self.members[rank] for rank in ranks if rank != lost.rank and rank in self.members]

    def _next_words(self, lost: Member) -> str:
        """Return how the job continues after a loss, as far as that is certain."""
        if lost.role == "server":
            return "other servers have its tables" if self._has_copies(lost.rank) else ""
        if self._plan.on_loss == "replace":
            return "the other workers hold their step until a replacement joins"
        workers = self.membership.workers if self.membership is not None else ()
        left = len(set(workers) - self.lost_ranks)
        if left < self._plan.min_workers:
            return ""
        return f"continuing with {_workers(left)}"

    def _has_copies(self, rank: int) -> bool:
        """Return whether other servers that are not lost hold every partition of a server."""
        if self.membership is None:
            return False
        held = [holders for holders in self.membership.holders if rank in holders]
        return bool(held) and all(set(holders) - self.lost_ranks for holders in held)

    def resumed(self, event: Resumed) -> str:
        """Return a line about the step at which the workers continue after a change."""
        count = _workers(event.num_workers)
        if event.repeats:
            words = f"step {event.step} exchanged again with {count} ({event.took_s:.1f} s)"
        else:
            words = f"{count} from step {event.step} ({event.took_s:.1f} s)"
        for loss in self._lost:
            if loss.ranks & set(event.lost):
                loss.followed_by.append(words)
        return stamped(words)

    def joined(self, rank: int, now_s: float) -> str:
        """Return a line about a newcomer, and how long its slot was open."""
        member = self.members[rank]
        loss = self._open.pop((member.role, member.number), None)
        where = f" at step {self.step}" if member.role == "worker" and self.step else ""
        words = f"{self.name(rank)} joined{where}"
        if loss is None:
            self._added += 1
            return stamped(words)
        took = f"{now_s - loss.at_s:.1f} s"
        if member.number == loss.member.number:
            self._replaced += 1
            loss.followed_by.append(f"replacement (pid {member.pid}) joined{where} ({took})")
        return stamped(f"{words}, {took} after the loss")

    def happened(self, event: MembershipEvent) -> str | None:
        """Return a line about partitions; members have lines of their own (above)."""
        if isinstance(event, Promoted):
            return stamped(f"server {event.server} is now primary of {_parts(event.partitions)}")
        if isinstance(event, BackupCaughtUp):
            return stamped(f"server {event.server} has a copy of {_parts(event.partitions)}")
        if isinstance(event, PartitionsMoved):
            route = f"from server {event.source} to server {event.target}"
            return stamped(f"{_parts(event.partitions)} moved {route}")
        return None

    def presence(self, news: Presence) -> str:
        """Return a line about a member that is silent, or back."""
        return stamped(f"{self.name(news.rank)} is {news.state}: {news.text}")

    def progressed(self, step: int, now_s: float) -> None:
        """Record that a worker has finished a step."""
        self.step = max(self.step, step)
        if self._gap is not None and step > self._gap[1]:
            self._paused_s += now_s - self._gap[0]
            self._gap = None

    def summary(self) -> list[str]:
        """Return the losses, replacements and additions of the job; empty if there were none."""
        lines = []
        if self._lost:
            noun = "loss" if len(self._lost) == 1 else "losses"
            members = _members(loss.member for loss in self._lost)
            text = f"paceline: {len(self._lost)} {noun} ({members})"
            text += f", {self._replaced} replaced"
            if self._paused_s:
                text += f"; {self._paused_s:.1f} s in all until the next step"
            lines.append(text)
            lines += ["; ".join([loss.words, *loss.followed_by]) for loss in self._lost][
                -_MAX_SHOWN:
            ]
        if self._added:
            lines.append(
                f"paceline: {self._added} joined in addition to those that started the job"
            )
        return lines


def hottest(busy_s: Mapping[int, float]) -> list[str]:
    """Return a line about the busiest of several servers, by its share of processor time."""
    total_s = sum(busy_s.values())
    if len(busy_s) < 2 or not total_s:
        return []
    server = max(busy_s, key=lambda number: busy_s[number])
    share = busy_s[server] / total_s
    words = "hot" if share > _HOT / len(busy_s) else "busiest"
    return [
        f"paceline: {words} server: {server}, with {100 * share:.0f} % of the processor time of"
        f" {len(busy_s)} servers"
    ]


def stamped(text: str) -> str:
    """Return a line with the time of day in front."""
    return f"{time.strftime('%H:%M:%S')} {text}"


def _workers(count: int) -> str:
    return f"{count} worker{'s' if count != 1 else ''}"


def _member_words(role: str, number: int, where: str) -> str:
    """Return the name of a process: "worker 3 (host b, pid 4242)"; `where` is host:pid."""
    host, _, pid = where.rpartition(":")
    return f"{role} {number} (host {host}, pid {pid})" if host else f"{role} {number}"


def _with_unit(peers: Iterable[Member]) -> str:
    numbers = sorted(peer.number for peer in peers)
    if not numbers:
        return ""
    noun = f"worker{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
    return f"; {noun} of its unit {'is' if len(numbers) == 1 else 'are'} retired with it"


def _parts(partitions: Iterable[int]) -> str:
    numbers = sorted(partitions)
    return f"partition{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _members(members: Iterable[Member]) -> str:
    counts = Counter((member.role, member.number) for member in members)
    words = [
        f"{role} {number}" + (f" {count} times" if count > 1 else "")
        for (role, number), count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    ]
    return ", ".join(words[:8]) + (", ..." if len(words) > 8 else "")
