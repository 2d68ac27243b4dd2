"""The chronicle: what happened to the members of a job, as lines for people and as a summary.

    14:02:07 worker 3 (host b, pid 4242) lost: killed by signal 9; 3 workers go on
    14:02:07 step 412 exchanged again with 3 workers (0.1 s)
    14:02:08 worker 3 (host b, pid 4260) joined at step 415, 0.8 s after the loss

Plain data with the clock passed in; no terminal here. A line for everything when it happens, and at
the end of the job one line for each loss with all that followed from it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from paceline.control.member import Member, Membership
from paceline.control.transport.messages import LossKind, Presence
from paceline.launcher.elastic.bounds import ElasticPlan
from paceline.observe.telemetry.events import Filled, Happening, Moved, Promoted, Resumed

_HOT = 1.5  # times the share that would be fair
_MOST_TOLD = 5  # losses that are told whole at the end


@dataclass
class _Loss:
    member: Member
    at_s: float
    words: str  # who, and why
    ranks: frozenset[int]  # of its whole unit
    followed_by: list[str] = field(default_factory=list)


class Chronicle:
    """Knows all members that ever were. Not thread-safe: lives in the launcher's loop."""

    def __init__(self, plan: ElasticPlan, unit_size: int = 1) -> None:
        self._plan = plan
        self._unit_size = unit_size
        self.members: dict[int, Member] = {}  # by rank
        self.membership: Membership | None = None
        self.step = 0  # the highest that was reported
        self._lost: list[_Loss] = []
        self.gone: set[int] = set()  # ranks whose loss was told
        self._vacant: dict[tuple[str, int], _Loss] = {}  # by place, until it is taken again
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

    def lost(self, rank: int, why: str, kind: LossKind, now_s: float) -> str | None:
        """Tell of a member's loss and what becomes of the job; None when that was told before.

        Those who are only retired with their unit are told with the one who was lost.
        """
        if rank in self.gone:
            return None
        member = self.members[rank]
        self.gone.add(rank)
        if not kind.is_own:
            return None
        mates = self._mates(member)
        self.gone.update(mate.rank for mate in mates)
        words = stamped(f"{self.name(rank)} lost: {why}{_with_unit(mates)}")
        loss = _Loss(member, now_s, words, frozenset({rank, *(mate.rank for mate in mates)}))
        self._lost.append(loss)
        for one in (member, *mates):
            self._vacant[one.role, one.number] = loss
        self._gap = self._gap or (now_s, self.step)
        what_now = self._what_now(member)
        return loss.words + (f"; {what_now}" if what_now else "")

    def _mates(self, lost: Member) -> list[Member]:
        """Those of its unit, which goes with it."""
        if lost.role != "worker":
            return []
        first = lost.rank - lost.number % self._unit_size  # their ranks are in a row
        ranks = range(first, first + self._unit_size)
        return [self.members[rank] for rank in ranks if rank != lost.rank and rank in self.members]

    def _what_now(self, lost: Member) -> str:
        """Say how the job goes on after a loss, as far as that is certain."""
        if lost.role == "server":
            return "others have copies of its tables" if self._has_copies(lost.rank) else ""
        if self._plan.on_loss == "replace":
            return "the others hold their step until another has taken its place"
        workers = self.membership.workers if self.membership is not None else ()
        left = len(set(workers) - self.gone)
        if left < self._plan.min_workers:
            return ""
        return f"{left} worker{' goes' if left == 1 else 's go'} on"

    def _has_copies(self, rank: int) -> bool:
        """Say whether all that a server held is also held by another that is not lost."""
        if self.membership is None:
            return False
        held = [holders for holders in self.membership.holders if rank in holders]
        return bool(held) and all(set(holders) - self.gone for holders in held)

    def resumed(self, event: Resumed) -> str:
        """Tell that the workers go on, and with which step."""
        count = f"{event.num_workers} worker{'s' if event.num_workers != 1 else ''}"
        if event.repeats:
            words = f"step {event.step} exchanged again with {count} ({event.took_s:.1f} s)"
        else:
            words = f"{count} from step {event.step} on ({event.took_s:.1f} s)"
        for loss in self._lost:
            if loss.ranks & set(event.lost):
                loss.followed_by.append(words)
        return stamped(words)

    def joined(self, rank: int, now_s: float) -> str:
        """Tell of a newcomer, and how long its place was empty."""
        member = self.members[rank]
        loss = self._vacant.pop((member.role, member.number), None)
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
        return stamped(f"{self.name(news.rank)} is {news.state}: {news.words}")

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
            text = (
                f"paceline: {len(self._lost)} {noun} ({_who(loss.member for loss in self._lost)})"
            )
            text += f", {self._replaced} replaced"
            if self._still_s:
                text += f"; {self._still_s:.1f} s until the next step, altogether"
            lines.append(text)
            lines += ["; ".join([loss.words, *loss.followed_by]) for loss in self._lost][
                -_MOST_TOLD:
            ]
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


def _with_unit(mates: Iterable[Member]) -> str:
    numbers = sorted(mate.number for mate in mates)
    if not numbers:
        return ""
    noun = f"worker{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
    return f"; {noun} of its unit go{'es' if len(numbers) == 1 else ''} with it"


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
