"""The parts of one worker whose state newcomers receive (state/protocol.py)."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.errors import PeerError
from paceline.state.protocol import Change, Part, State


class StatefulParts:
    """The parts of one worker, in the order in which they were registered."""

    def __init__(self) -> None:
        self._parts: dict[str, Part] = {}
        self._staged: dict[str, Part] | None = None  # see `stage`
        self._early: dict[str, tuple[State, Change]] = {}  # of parts that do not exist yet

    def register(self, name: str, part: Part) -> None:
        """Let a part take part in changes; under the same name on all workers."""
        if self._staged is not None:
            self._staged[name] = part
            return
        self._parts[name] = part
        if name in self._early:
            part.load(*self._early.pop(name))

    def unregister(self, name: str) -> None:
        """Let a part take part in changes no more."""
        self._parts.pop(name, None)
        if self._staged is not None:
            self._staged.pop(name, None)

    def stage(self) -> None:
        """Stage all parts that are registered from now on, until the present step is passed.

        Until then not all workers have them. If other workers have passed the step, and this worker
        has not, it has all parts that they have, and its staged parts take part in that change.
        """
        self._staged = {}

    def unstage(self) -> None:
        """Let the staged parts take part."""
        staged, self._staged = self._staged or {}, None
        self._parts.update(staged)

    def pause(self) -> None:
        """Let all parts finish what is under way."""
        for part in self._parts.values():
            part.pause()

    def states(self) -> dict[str, State]:
        """Return the states of all parts."""
        return {name: part.state() for name, part in self._parts.items()}

    def load(self, states: Mapping[str, State], change: Change) -> None:
        """Load a peer's states; those of parts that the script has not made yet are kept."""
        for name, state in states.items():
            if name in self._parts:
                self._parts[name].load(state, change)
            else:
                self._early[name] = (state, change)

    def resume(self, change: Change) -> None:
        """Let all parts continue with other members; raises PeerError if one lost a peer in it.

        The other parts get the change all the same: the next change does not repeat its losses.
        """
        failure: PeerError | None = None
        for part in self._parts.values():
            try:
                part.resume(change)
            except PeerError as error:  # noqa: PERF203 - each part by itself
                failure = failure or error
        if failure is not None:
            raise failure
