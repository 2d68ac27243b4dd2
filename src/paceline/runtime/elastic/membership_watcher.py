"""What one worker knows of the job's members, and how it waits for the next membership.

Threads: the control thread notes announcements, and interrupts operations that wait for a lost
worker (`Fabric.interrupt`); everything else runs on the main thread.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import NoReturn

from paceline.comm.fabric import Fabric
from paceline.control.client.agent import Agent
from paceline.control.member import Membership
from paceline.control.messages import Changed, Loss, Presence
from paceline.control.wait_notice import WaitNotice
from paceline.errors import PeerError, PeerTimeout

_SLICE_S = 0.25
_REPORT_S = 0.5  # how often a peer is reported as unreachable that the coordinator has not lost
_CUT_OFF_S = 20.0  # without the coordinator no worker knows which ones continue: this one stops


class Retired(SystemExit):
    """This worker was asked to leave (`paceline scale`) and has left; the job continues."""


class MembershipWatcher:
    """The losses that were announced, for changes that this worker has not entered yet."""

    def __init__(self, fabric: Fabric, agent: Agent) -> None:
        self.losses: dict[int, Loss] = {}  # by rank
        self.has_seen_farewell = False
        self.on_retire: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._fabric = fabric
        self._agent = agent
        fabric.watch_announcements(lambda: agent.membership)
        agent.on_presence = self._on_presence
        agent.on_changed = self._on_changed

    # -- from the control thread --------------------------------------------------------------

    def _on_presence(self, presence: Presence) -> None:
        self.has_seen_farewell = self.has_seen_farewell or presence.state == "left"
        if presence.state == "lost":
            text = f"rank {self._fabric.rank}: rank {presence.rank} is lost: {presence.text}"
            self._fabric.interrupt(presence.rank, text)

    def _on_changed(self, changed: Changed) -> None:
        for loss in changed.lost:
            self.losses[loss.rank] = loss
            if loss.role == "worker":
                text = f"rank {self._fabric.rank}: worker {loss.number} is lost: {loss.why}"
                self._fabric.interrupt(loss.rank, text)

    # -- from the main thread -----------------------------------------------------------------

    def vanished(self) -> list[int]:
        """Return lost ranks that may still run, without workers that exit by themselves."""
        return [rank for rank, loss in self.losses.items() if not loss.kind.is_willing]

    def forget_losses(self, ranks: tuple[int, ...]) -> None:
        """Forget losses of workers that are not among these: the generation is entered."""
        for rank in [rank for rank in self.losses if rank not in ranks]:
            del self.losses[rank]

    def wait_for_change(self, error: PeerError | None) -> Membership:
        """Wait for a membership with other workers than the present ones."""
        started_s = reported_s = time.monotonic()
        culprit = None if error is None else error.rank
        notice = WaitNotice(
            f"rank {self._fabric.rank} waits for the job's next membership",
            "a change of the membership",
            [] if culprit is None else [culprit],
        )
        agent, fabric = self._agent, self._fabric
        while True:
            if agent.ending is not None:
                raise agent.ending from error
            newest = agent.membership
            if newest is not None and newest.workers_since > fabric.membership.workers_since:
                if fabric.rank not in newest.ranks:
                    self.retire()
                return newest
            now_s = time.monotonic()
            self._require_contact(now_s - started_s, error)
            if error is not None and culprit is not None and now_s - reported_s > _REPORT_S:
                reported_s = now_s  # again and again: a restarted coordinator has forgotten it
                agent.report_unreachable(culprit, str(error)[:300])
            agent.wait_for_generation(newest.generation if newest is not None else 0, _SLICE_S)
            notice.check()

    def retire(self) -> NoReturn:
        """Leave the job and exit cleanly."""
        for watcher in self.on_retire:
            on_retire = watcher()
            if on_retire is not None:
                on_retire()
        self._agent.leave(is_finished=False)
        raise Retired(0)

    def _require_contact(self, waited_s: float, error: PeerError | None) -> None:
        if waited_s > _CUT_OFF_S and not self._agent.is_attached:
            raise PeerTimeout(
                f"rank {self._fabric.rank}: neither its peers nor the coordinator can be reached"
                f" for {waited_s:.0f} s; stopping this side to avoid split-brain; check this host's"
                " network"
            ) from error
