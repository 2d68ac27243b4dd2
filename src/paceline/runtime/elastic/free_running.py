"""Changes of the membership at a free-running pace: no worker waits for another.

A worker enters another membership between two steps of its own. The first worker that has the
training state sends it to each newcomer, over a group of the two.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.comm.fabric import Fabric
from paceline.comm.group import Group
from paceline.control.client.agent import Agent
from paceline.control.member import Member, Membership
from paceline.errors import PeerError, PeerLost
from paceline.observe.telemetry.events import Note
from paceline.runtime.elastic.membership_watcher import MembershipWatcher
from paceline.state import transfer
from paceline.state.protocol import Change
from paceline.state.stateful_parts import StatefulParts


class FreeRunningChanges:
    """One worker's part in such changes."""

    def __init__(
        self, fabric: Fabric, agent: Agent, parts: StatefulParts, watcher: MembershipWatcher
    ) -> None:
        self._fabric, self._agent, self._parts, self._watcher = fabric, agent, parts, watcher

    def enter_newest(self) -> tuple[int, ...] | None:
        """Enter the newest membership; return the workers that are lost, None: nothing new."""
        newest, fabric = self._agent.membership, self._fabric
        if newest is None or newest.generation <= fabric.membership.generation:
            return None
        if fabric.rank not in newest.ranks:
            self._watcher.retire()
        before = fabric.membership
        fabric.enter_generation(newest, self._watcher.vanished())
        newest = fabric.membership
        joined = [rank for rank in newest.workers if rank not in before.workers]
        if fabric.rank == _source(newest, joined):
            for rank in joined:
                self._send_state(newest.member(rank))
        losses = self._watcher.losses
        gone = [rank for rank in before.ranks if losses.pop(rank, None) is not None]
        return tuple(rank for rank in gone if rank in before.workers)

    def join(self, membership: Membership) -> Change:
        """Receive the training state as a newcomer; return the change that this worker is."""
        fabric = self._fabric
        fabric.enter_generation(membership, self._watcher.vanished())
        membership = fabric.membership
        source = _source(membership, [fabric.rank])
        if source is None:
            raise PeerLost(f"rank {fabric.rank}: no worker is left that could send its state")
        change = Change(
            generation=membership.generation,
            before=tuple(rank for rank in membership.workers if rank != fabric.rank),
            after=membership.workers,
            lost=(),
            joined=(fabric.rank,),
            uncounted=False,
        )
        group = self._pair(source, fabric.rank)
        states, _ = transfer.receive(group, 0)
        self._parts.load(states, change)
        group.close()
        return change

    def _send_state(self, newcomer: Member) -> None:
        states = self._parts.states()
        try:
            group = self._pair(self._fabric.rank, newcomer.rank)
            transfer.send(group, [1], states, None)
            group.close()
        except PeerError:
            # It was lost again before it had joined; the next membership will not list it.
            if newcomer.rank in (self._agent.membership or self._fabric.membership).ranks:
                self._agent.report(
                    Note(self._fabric.rank, f"worker {newcomer.number} left while it was joining")
                )

    def _pair(self, source: int, newcomer: int) -> Group:
        other = newcomer if self._fabric.rank == source else source
        self._fabric.link(self._fabric.membership.member(other))
        name = f"gift {source} {newcomer}"
        return Group(self._fabric, (source, newcomer), name=name, generation=1)


def _source(membership: Membership, joined: Sequence[int]) -> int | None:
    """Return the first worker that has the training state."""
    return next((rank for rank in membership.workers if rank not in joined), None)
