"""Which members are silent or lost: from heartbeats, reports of the launcher and of peers. No I/O.

A member that sends no heartbeat for `silent_s` is SILENT; all other members are notified. Whether
it is also lost depends on what else is known:

    the launcher sees its process stopped           lost when it was stopped for `lease_s`
    the launcher sees its process run               stuck or starved: lost after `stall_s`
    no launcher sees it (another host)              lost when it was silent for `lease_s`
    it has not reconnected to a new coordinator     lost after `absent_s`

Heartbeats come from a Python thread, which a busy machine may starve for seconds; the launcher's
reports keep such members in the job. They count only while the launcher itself is heard. If the
coordinator itself was stopped or starved, members are not blamed for it: `check` notices the gap
between two checks and extends all leases by it.

A member reports a peer as UNREACHABLE if it cannot connect although that peer sends heartbeats: the
network between the two is broken. After `accused_s` one of the two is lost: the one that has
trouble with more members, as reporter or as reported; of two equals, the one whose loss costs less
(`cost`). So one worker that is cut off does not take server after server with it. A reported member
that is silent is left to its lease.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from paceline.control.membership.policy import Policy
from paceline.control.messages import LossKind

_GAP_S = 1.0  # a longer pause between two checks is the coordinator's own
# How long the launcher's reports hold without a sign of life from it. It is on the coordinator's
# host: more likely starved than gone.
_LAUNCHER_S = 10.0
_FRESH_S = 1.5  # a heartbeat younger than this: not silent
FATAL_COST = 1 << 30  # the cost of a member without which the job is over


@dataclass
class _Lease:
    heard_s: float
    is_silent: bool = False
    is_absent: bool = False  # no connection since the coordinator was restarted
    stopped_s: float | None = None  # since when the launcher sees it stopped
    is_seen: bool = False  # the launcher can see its process


@dataclass(frozen=True)
class LeaseFinding:
    """A member's new state after a check: "silent", "back" or "lost"."""

    rank: int
    state: str
    detail: str
    kind: LossKind | None = None  # of a loss


class Leases:
    """The leases of all members. Deterministic: the time is an argument."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._leases: dict[int, _Lease] = {}
        self._unreachable: dict[tuple[int, int], tuple[float, str]] = {}  # (by, of): since, why
        self._launcher_s: float | None = None  # when the launcher was last heard
        self._checked_s: float | None = None

    def begin(self, rank: int, now_s: float, *, is_absent: bool = False) -> None:
        """Expect heartbeats from a member."""
        self._leases[rank] = _Lease(now_s, is_absent=is_absent)
        if self._checked_s is None:
            self._checked_s = now_s

    def end(self, rank: int) -> None:
        """Forget a member."""
        self._leases.pop(rank, None)
        for pair in [pair for pair in self._unreachable if rank in pair]:
            del self._unreachable[pair]

    def heard(self, rank: int, now_s: float) -> list[LeaseFinding]:
        """Note a message of a member."""
        lease = self._leases.get(rank)
        if lease is None:
            return []
        was_silent, lease.is_silent = lease.is_silent, False
        lease.heard_s, lease.is_absent = now_s, False
        return [LeaseFinding(rank, "back", "it sends heartbeats again")] if was_silent else []

    def launcher_heard(self, now_s: float | None) -> None:
        """Note a message of the launcher; None: its connection ended, its reports are void."""
        self._launcher_s = now_s
        if now_s is None:
            for lease in self._leases.values():
                lease.is_seen, lease.stopped_s = False, None

    def seen(self, rank: int, stopped_s: float | None) -> None:
        """Note that the launcher sees a process running (None), or stopped since `stopped_s`."""
        lease = self._leases.get(rank)
        if lease is not None:
            lease.is_seen, lease.stopped_s = True, stopped_s

    def report_unreachable(self, by: int, rank: int, why: str, now_s: float) -> None:
        """Note that member `by` cannot reach `rank`; an empty `why` takes the report back."""
        if not why:
            self._unreachable.pop((by, rank), None)
        elif by in self._leases and rank in self._leases and by != rank:
            self._unreachable.setdefault((by, rank), (now_s, why))

    def forget_reports(self, by: int) -> None:
        """Drop a member's reports: it entered a new generation, and repeats what still holds."""
        for pair in [pair for pair in self._unreachable if pair[0] == by]:
            del self._unreachable[pair]

    def check(self, now_s: float, cost: Callable[[int], int]) -> list[LeaseFinding]:
        """Return the members that are silent or lost now; `cost` orders members by how bad their
        loss is."""
        self._excuse_own_gap(now_s)
        found = []
        for rank, lease in self._leases.items():
            why = self._loss_reason(lease, now_s)
            if why is not None:
                found.append(LeaseFinding(rank, "lost", why, LossKind.SILENT))
            elif not lease.is_silent and now_s - lease.heard_s > self._policy.silent_s:
                lease.is_silent = True
                text = f"no heartbeat for {now_s - lease.heard_s:.1f} s"
                found.append(LeaseFinding(rank, "silent", text + self._process_state(lease, now_s)))
        if not any(finding.state == "lost" for finding in found):
            found += self._choose_unreachable(now_s, cost)
        return found

    def _excuse_own_gap(self, now_s: float) -> None:
        gap_s = 0.0 if self._checked_s is None else now_s - self._checked_s
        self._checked_s = now_s
        if gap_s > _GAP_S:
            for lease in self._leases.values():
                lease.heard_s = min(lease.heard_s + gap_s, now_s)
                if lease.stopped_s is not None:
                    lease.stopped_s += gap_s
            for pair, (since_s, why) in self._unreachable.items():
                self._unreachable[pair] = (since_s + gap_s, why)
            if self._launcher_s is not None:
                self._launcher_s += gap_s

    def _is_launcher_present(self, now_s: float) -> bool:
        return self._launcher_s is not None and now_s - self._launcher_s <= _LAUNCHER_S

    def _loss_reason(self, lease: _Lease, now_s: float) -> str | None:
        """Return why a member is lost; None if it is not."""
        if not self._policy.is_elastic:
            return None
        silent_s = now_s - lease.heard_s
        if lease.is_absent:
            limit_s, text = self._policy.absent_s, "it did not reconnect after a restart"
        elif lease.is_seen and self._is_launcher_present(now_s):
            if lease.stopped_s is not None:
                # A heartbeat since then is newer than the launcher's last report.
                stopped_s = min(now_s - lease.stopped_s, silent_s)
                text = f"its process has been stopped for {stopped_s:.1f} s"
                return text if stopped_s >= self._policy.lease_s else None
            limit_s, text = self._policy.stall_s, "its process runs, but is stuck"
        else:
            limit_s, text = self._policy.lease_s, "it may be stopped or cut off"
        return f"no heartbeat for {silent_s:.1f} s: {text}" if silent_s >= limit_s else None

    def _process_state(self, lease: _Lease, now_s: float) -> str:
        if not (lease.is_seen and self._is_launcher_present(now_s)):
            return ""
        return ": its process runs" if lease.stopped_s is None else ": its process is stopped"

    def _choose_unreachable(self, now_s: float, cost: Callable[[int], int]) -> list[LeaseFinding]:
        """Choose the lost one of members that cannot reach each other."""
        heard = [pair for pair in self._unreachable if self._is_heard(pair, now_s)]
        standing = [p for p in heard if now_s - self._unreachable[p][0] >= self._policy.accused_s]
        if not standing or not self._policy.is_elastic:
            return []
        # Newer reports count too: of several members that lost sight of one, one was the first.
        trouble = {
            rank: {other for pair in heard if rank in pair for other in pair if other != rank}
            for pair in standing
            for rank in pair
        }
        votes = {rank: sum(of == rank for _, of in heard) for rank in trouble}
        worst = max(
            trouble,
            key=lambda r: (cost(r) < FATAL_COST, len(trouble[r]), -cost(r), votes[r], r),
        )
        reporters = sorted(by for by, of in heard if of == worst)
        if reporters:
            why = self._unreachable[reporters[0], worst][1]
            text = f"{_ranks(reporters)} cannot reach it: {why}"
        else:
            text = f"it cannot reach {_ranks(trouble[worst])}"
        return [LeaseFinding(worst, "lost", text, LossKind.UNREACHABLE)]

    def _is_heard(self, pair: tuple[int, int], now_s: float) -> bool:
        return all(
            not self._leases[rank].is_absent and now_s - self._leases[rank].heard_s <= _FRESH_S
            for rank in pair
        )


def _ranks(ranks: Collection[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"
