"""The weight of this worker's batch in the present step.

A loss is usually the mean over a batch. The mean of the workers' gradients is then the gradient of
the global batch only if all batches have the same size; otherwise each worker's gradient counts by
its samples:

    weight = samples here x workers / samples of all workers        (1.0 when all are equal)

`pl.shard` sets the weight before each batch; the gradient exchange watches it. Neither imports the
other.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from paceline.errors import UsageError


class Contribution:
    """The weight of the batch that this worker is about to compute. Main thread only."""

    def __init__(self) -> None:
        self.weight = 1.0
        self._watchers: list[weakref.WeakMethod[Callable[[float], None]]] = []
        self._announcers: list[Announcer] = []  # the newest announcement last
        self._committers: list[weakref.WeakMethod[Callable[[], None]]] = []

    def set(self, weight: float) -> None:
        """Announce the weight of the next batch; 0.0: it does not count."""
        if not 0.0 <= weight < float("inf"):
            raise UsageError(f"the weight of a batch must be a finite number >= 0 (got {weight!r})")
        if weight == self.weight:
            return
        self.weight = weight
        for watcher in self._watchers:
            on_change = watcher()
            if on_change is not None:
                on_change(weight)

    def watch(self, on_change: Callable[[float], None]) -> None:
        """Call a bound method at every change, for as long as its object lives."""
        self._watchers = [watcher for watcher in self._watchers if watcher() is not None]
        self._watchers.append(weakref.WeakMethod(on_change))

    def commit(self) -> None:
        """Announce that the batches since the last commit count, on all workers."""
        for watcher in self._committers:
            on_commit = watcher()
            if on_commit is not None:
                on_commit()

    def watch_commits(self, on_commit: Callable[[], None]) -> None:
        """Call a bound method after every step that counts, for as long as its object lives."""
        self._committers = [watcher for watcher in self._committers if watcher() is not None]
        self._committers.append(weakref.WeakMethod(on_commit))

    def announcer(self) -> Announcer:
        """Return an announcer for one pass over the data; several passes may be open at a time."""
        return Announcer(self)

    def _announce(self, announcer: Announcer) -> None:
        self._forget(announcer)
        self._announcers.append(announcer)
        self.set(announcer.weight)

    def _forget(self, announcer: Announcer) -> None:
        self._announcers = [other for other in self._announcers if other is not announcer]

    def _end(self, announcer: Announcer) -> None:
        self._forget(announcer)
        self.set(self._announcers[-1].weight if self._announcers else 1.0)


class Announcer:
    """The weights of one pass over the data. When it ends, those of the enclosing pass hold again
    (after an evaluation in the middle of an epoch), or 1.0 if there is none."""

    def __init__(self, contribution: Contribution) -> None:
        self._contribution = contribution
        self.weight = 1.0
        self.samples: int | None = None  # of that batch, if known

    def set(self, weight: float, samples: int | None = None) -> None:
        """Announce the weight of the next batch of this pass, and how many samples it has."""
        self.weight, self.samples = weight, samples
        self._contribution._announce(self)

    def close(self) -> None:
        """End the pass. May be called twice."""
        self._contribution._end(self)
