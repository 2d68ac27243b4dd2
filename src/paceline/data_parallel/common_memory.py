"""Parameters that all workers of a host write to, while workers come and go: a part.

Who is lost leaves the memory to the others: it lasts as long as anybody maps it. A newcomer cannot
map what belongs to somebody who is gone; so when one comes, all move to memory of the first worker
that is there then. Nobody writes meanwhile, and all have the same values, newcomers from a peer.

Which memory a worker maps is named by the change at which it moved there. If somebody else is lost
in the middle of a move, some may have moved and others not; they see it by these names, and move
together at the next change.
"""

from __future__ import annotations

from paceline.collectives.agreement import tell_all
from paceline.collectives.group import Group
from paceline.data_parallel.housing import Housing
from paceline.state.protocol import Change, Part

_OWN = -1  # of a newcomer, which nobody else maps


class CommonMemory(Part):
    """Keeps all workers in the same memory. Registered after the state of the model."""

    def __init__(self, workers: Group, housing: Housing, *, is_newcomer: bool) -> None:
        self._workers = workers
        self._housing = housing
        self._moved_at = _OWN if is_newcomer else 0  # a generation

    def resume(self, change: Change) -> None:
        """Move, unless all map the same."""
        told = tell_all(self._workers, self._moved_at)
        if any(one != told[0] for one in told):
            self._housing.share_anew()
            self._moved_at = change.generation
