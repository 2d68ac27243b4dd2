"""The chronicle: what happened to the members of a job, as lines for people and as a summary.

    14:02:07 worker 3 (host b, pid 4242) lost: killed by signal 9; 3 workers go on
    14:02:08 worker 3 (host b, pid 4260) joined at step 415, 0.8 s after the loss

Plain data with the clock passed in; no terminal here. One line when somebody is lost, one when
somebody has joined, and what members and the coordinator have to say in between.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping

from paceline.cluster.member import Member, Membership
from paceline.cluster.messages import Presence
from paceline.launcher.elastic.plan import ElasticPlan
from paceline.launcher.servers import ServerPlan
from paceline.telemetry.events import Filled, Happening, Moved, Promoted

_HOT = 1.5  # times the share that would be fair


class Chronicle:
    """Knows all members that ever were. Not thread-safe: lives in the launcher's loop."""

    def __init__(self, plan: ElasticPlan, servers: ServerPlan) -> None:
        self._plan, self._servers = plan, servers
        self.members: dict[int, Member] = {}  # by rank
        self.membership: Membership | None = None
        self.step = 0  # the highest that was reported
        self._lost: list[Member] = []
        self.gone: set[int] = set()  # ranks whose loss was told
        self._lost_s: dict[tuple[str, int], float] = {}  # by place: when, until it is taken again
        self._gap: tuple[float, int] | None = None  # from a loss, at that step, to the next step
        self._still_s = 0.0
        self._replaced = self._added = 0

    def take(self, membership: Membership) -> None:
        """Note the membership that counts from now on."""
        self.membership = membership
        self.members.update((member.rank, member) for member in membership.members)

    def name(self, rank: int) -> str:
        member = self.members[rank]
        return place_words(member.role, member.number, member.where)

    def lost(self, rank: int, why: str, now_s: float) -> str | None:
        """Tell of a member's loss and what becomes of the job; None when that was told before."""
        if rank in self.gone:
            return None
        member = self.members[rank]
        self.gone.add(rank)
        self._lost.append(member)
        self._lost_s[member.role, member.number] = now_s
        self._gap = self._gap or (now_s, self.step)
        what_now = self._what_now(member)
        return stamped(f"{self.name(rank)} lost: {why}" + (f"; {what_now}" if what_now else ""))

    def _what_now(self, lost: Member) -> str:
        """Say how the job goes on after a loss, as far as that is certain."""
        if lost.role == "server":
            return "others have copies of its tables" if self._servers.replicas > 1 else ""
        if self._plan.on_loss == "replace":
            return "the others hold their step until another has taken its place"
        workers = self.membership.workers if self.membership is not None else ()
        left = len(set(workers) - self.gone)
        if left < self._plan.min_workers:
            return ""
        return f"{left} worker{' goes' if left == 1 else 's go'} on"

    def joined(self, rank: int, now_s: float) -> str:
        """Tell of a newcomer, and how long its place was empty."""
        member = self.members[rank]
        lost_s = self._lost_s.pop((member.role, member.number), None)
        words = f"{self.name(rank)} joined"
        if member.role == "worker" and self.step:
            words += f" at step {self.step}"
        if lost_s is None:
            self._added += 1
            return stamped(words)
        self._replaced += 1
        return stamped(f"{words}, {now_s - lost_s:.1f} s after the loss")

    def happened(self, event: Happening) -> str | None:
        """Tell of what became of partitions; who came and went is told with more words above."""
        if isinstance(event, Promoted):
            return stamped(f"server {event.server} answers for {_parts(event.partitions)} now")
        if isinstance(event, Filled):
            return stamped(f"server {event.server} has a copy of {_parts(event.partitions)}")
        if isinstance(event, Moved):
            whence = f"from server {event.source} to server {event.target}"
            return stamped(f"{_parts(event.partitions)} moved {whence}")
        return None

    def presence(self, news: Presence) -> str:
        """Tell that a member is silent, or back."""
        return stamped(f"{self.name(news.rank)} is {news.state}: {news.detail}")

    def progressed(self, step: int, now_s: float) -> None:
        """Note that a worker has finished a step."""
        self.step = max(self.step, step)
        if self._gap is not None and step > self._gap[1]:
            self._still_s += now_s - self._gap[0]
            self._gap = None

    def summary(self) -> list[str]:
        """Say at the end who was lost, who came, and what that cost; nothing when nobody was."""
        lines = []
        if self._lost:
            noun = "loss" if len(self._lost) == 1 else "losses"
            text = f"paceline: {len(self._lost)} {noun} ({_who(self._lost)})"
            text += f", {self._replaced} replaced"
            if self._still_s:
                text += f"; {self._still_s:.1f} s until the next step, altogether"
            lines.append(text)
        if self._added:
            lines.append(f"paceline: {self._added} joined beyond those that the job began with")
        return lines


def hottest(busy_s: Mapping[int, float]) -> list[str]:
    """Name the server that had most to do, of several, by its share of their processor time."""
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
    """Put the time of day in front of a line."""
    return f"{time.strftime('%H:%M:%S')} {text}"


def place_words(role: str, number: int, where: str) -> str:
    """Name a process: "worker 3 (host b, pid 4242)"; `where` is host:pid."""
    host, _, pid = where.rpartition(":")
    return f"{role} {number} (host {host}, pid {pid})" if host else f"{role} {number}"


def _parts(partitions: Iterable[int]) -> str:
    numbers = sorted(partitions)
    return f"partition{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _who(members: Iterable[Member]) -> str:
    counts = Counter((member.role, member.number) for member in members)
    words = [
        f"{role} {number}" + (f" {count} times" if count > 1 else "")
        for (role, number), count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    ]
    return ", ".join(words[:8]) + (", ..." if len(words) > 8 else "")
