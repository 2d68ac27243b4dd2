"""What travels: the bytes that each worker hands to other processes, and how long it waits.

A byte counts once for each process that it is handed to, whether that reads it in shared memory or
receives it over the network; frames and heartbeats do not count. The engine counts, a `Meter` keeps
what it said at every step, and `describe` writes it for people. What a step costs is measured from
the end of the first one on: before it, the workers hand each other the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from paceline.figures import data_size


class Traffic(msgspec.Struct, frozen=True):
    """What a worker has sent, up to its last step."""

    steps: int
    on_host: int  # bytes, as the next
    over_network: int
    per_step: float | None = None  # None: there was only one
    trained_s: float = 0.0  # from step to step
    waited_s: float = 0.0  # of it, for others

    @property
    def num_bytes(self) -> int:
        """All of them."""
        return self.on_host + self.over_network


class Meter:
    """Follows the engine's counts from step to step. Not thread-safe."""

    def __init__(self, sent: Callable[[], tuple[int, int]]) -> None:
        self._sent = sent
        self._steps = 0
        self._now = (0, 0)
        self._in_first = 0
        self._trained_s = self._waited_s = 0.0

    def step_done(self, took_s: float, waited_s: float) -> None:
        """Look at the counts behind a step."""
        self._steps += 1
        self._now = self._sent()
        if self._steps == 1:
            self._in_first = sum(self._now)
        self._trained_s += took_s
        self._waited_s += min(waited_s, took_s)

    @property
    def trained_s(self) -> float:
        """In all steps."""
        return self._trained_s

    @property
    def waited_s(self) -> float:
        """For others, in all steps."""
        return self._waited_s

    def traffic(self) -> Traffic | None:
        """Return what there is to tell; None before the first step."""
        if not self._steps:
            return None
        later = self._steps - 1
        per_step = (sum(self._now) - self._in_first) / later if later else None
        return Traffic(self._steps, *self._now, per_step, self._trained_s, self._waited_s)


def describe(workers: Sequence[Traffic]) -> list[str]:
    """Write for people what the workers of a job have sent; nothing when nobody sent anything."""
    sent = [worker.num_bytes for worker in workers]
    if not sum(sent):
        return []
    who = "1 worker" if len(sent) == 1 else f"{len(sent)} workers"
    what = f"{who} sent {_span(sent, data_size)}{' each' if len(sent) > 1 else ''}"
    steps = [worker.per_step for worker in workers if worker.per_step is not None]
    if steps:
        what += f" ({_span(steps, data_size)} per step)"
    if len(sent) > 1:
        what += f", {data_size(sum(sent))} in all"
    what += _where(workers)
    shares = [w.waited_s / w.trained_s for w in workers if w.trained_s > 0]
    if shares:
        what += f"; waited {_span(shares, _percent, '')} % of the time"
    return [what]


def _where(workers: Sequence[Traffic]) -> str:
    network = sum(worker.over_network for worker in workers)
    if not network:
        return ""  # the rule
    if not sum(worker.on_host for worker in workers):
        return ", over the network"
    return f", {data_size(network)} of it over the network"


def _span(values: Sequence[float], write: Callable[[float], str], unit: str = " ") -> str:
    """Write the lowest and the highest; one of them where they read alike, a unit only once."""
    low, high = write(min(values)), write(max(values))
    if low == high:
        return high
    if unit and low.split(unit)[-1] == high.split(unit)[-1]:
        low = low.split(unit)[0]
    return f"{low} to {high}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f}"
