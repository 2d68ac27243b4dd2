"""The chronicle: what happened to the members of a job, as lines for people and as a summary.

    14:02:07 worker 3 (host b, pid 4242) lost: killed by signal 9; 3 workers go on
    14:02:08 worker 3 (host b, pid 4260) joined at step 415, 0.8 s after the loss

Plain data with both clocks passed in; no terminal here. One line when somebody is lost, one when
somebody has joined, and what members and the coordinator have to say in between.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.cluster.member import Member
from paceline.cluster.messages import Loss


@dataclass
class _Gap:
    """The time from a loss to the next step that somebody reports."""

    since_s: float
    step: int


class Chronicle:
    """Turns events into lines. Not thread-safe: lives in the launcher's loop."""

    def __init__(self) -> None:
        self._lost: list[Loss] = []
        self._lost_s: dict[tuple[str, int], float] = {}  # by place: when, until it is taken again
        self._replaced = 0
        self._added = 0
        self._gap: _Gap | None = None
        self._still_s = 0.0
        self.step = 0  # the highest that was reported

    @property
    def losses(self) -> Sequence[Loss]:
        return self._lost

    def lost(self, loss: Loss, what_now: str, now_s: float) -> str:
        """Tell of a loss, and what becomes of the job."""
        self._lost.append(loss)
        self._lost_s[loss.role, loss.number] = now_s
        if self._gap is None:
            self._gap = _Gap(now_s, self.step)
        text = f"{place_words(loss.role, loss.number, loss.where)} lost: {loss.why}"
        return stamped(f"{text}; {what_now}" if what_now else text)

    def joined(self, member: Member, now_s: float) -> str:
        """Tell of a newcomer, and how long its place was empty."""
        lost_s = self._lost_s.pop((member.role, member.number), None)
        words = f"{place_words(member.role, member.number, member.where)} joined"
        if member.role == "worker" and self.step:
            words += f" at step {self.step}"
        if lost_s is None:
            self._added += 1
            return stamped(words)
        self._replaced += 1
        return stamped(f"{words}, {now_s - lost_s:.1f} s after the loss")

    def progressed(self, step: int, now_s: float) -> None:
        """Note that a worker has finished a step."""
        self.step = max(self.step, step)
        if self._gap is not None and step > self._gap.step:
            self._still_s += now_s - self._gap.since_s
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


def stamped(text: str) -> str:
    """Put the time of day in front of a line."""
    return f"{time.strftime('%H:%M:%S')} {text}"


def place_words(role: str, number: int, where: str) -> str:
    """Name a process: "worker 3 (host b, pid 4242)"; `where` is host:pid."""
    host, _, pid = where.rpartition(":")
    return f"{role} {number} (host {host}, pid {pid})" if host else f"{role} {number}"


def _who(losses: Iterable[Loss]) -> str:
    counts = Counter((loss.role, loss.number) for loss in losses)
    words = [
        f"{role} {number}" + (f" {count} times" if count > 1 else "")
        for (role, number), count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    ]
    return ", ".join(words[:8]) + (", ..." if len(words) > 8 else "")
