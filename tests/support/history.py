"""Histories of calls, and what a store that keeps its promise can have answered (oracle O6).

Whoever tests records every call with the moments between which it took effect, if it did: INVOKED,
and RETURNED when its answer came (never, for a caller that died or gave up: such a call may have
taken effect at any moment since, or not at all). Two checks look at the record afterwards:

LINEARIZABLE, per key: there is one order of the calls, in which each takes effect between its two
    moments, that gives every answer which was given. Found by Wing and Gong's search with Lowe's
    memory of what was tried; the keys are independent, so each is searched alone.

STALE AT MOST s: whoever reads at clock c sees the updates of every live worker up to clock c - s,
    and its own; what a worker sees never goes back; and nobody is further ahead of a reader than
    the rule lets it be.

Moments are floats of any clock that all callers share: virtual seconds, or time.monotonic() of the
processes of one host. Records pass between processes as lines of JSON.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec


class Call(msgspec.Struct, frozen=True, omit_defaults=True):
    """One call: `value` is what was written or added, or what was read."""

    client: int
    key: str
    kind: str  # "add", "set" or "read"
    value: float | None
    invoked_s: float
    returned_s: float | None = None  # None: no answer

    def __str__(self) -> str:
        until = "never" if self.returned_s is None else f"{self.returned_s:.4f}"
        return (
            f"client {self.client}: {self.kind} {self.value} of {self.key!r}"
            f" [{self.invoked_s:.4f} .. {until}]"
        )


class History:
    """The calls of one or many clients, in the order in which they were invoked."""

    def __init__(self, calls: Iterable[Call] = ()) -> None:
        self.calls = list(calls)

    def begin(
        self, client: int, key: str, kind: str, now_s: float, value: float | None = None
    ) -> int:
        """Note that a call goes out; return its number, for `end`."""
        self.calls.append(Call(client, key, kind, value, now_s))
        return len(self.calls) - 1

    def end(self, number: int, now_s: float, value: float | None = None) -> None:
        """Note the answer of a call; `value` is what was read."""
        call = self.calls[number]
        read = call.value if value is None else value
        self.calls[number] = msgspec.structs.replace(call, value=read, returned_s=now_s)

    def save(self, path: Path) -> None:
        """Write one line for each call."""
        path.write_bytes(b"".join(msgspec.json.encode(call) + b"\n" for call in self.calls))

    @classmethod
    def load(cls, *paths: Path) -> History:
        """Read what several processes have written."""
        decode = msgspec.json.Decoder(Call).decode
        lines = [line for path in paths for line in path.read_bytes().splitlines()]
        return cls(sorted(map(decode, lines), key=lambda call: call.invoked_s))

    def by_key(self) -> dict[str, list[Call]]:
        found: dict[str, list[Call]] = defaultdict(list)
        for call in self.calls:
            found[call.key].append(call)
        return found


# -- linearizability ----------------------------------------------------------------------------

State = Any
Step = Callable[[State, Call], tuple[bool, State]]


def counter(state: float, call: Call) -> tuple[bool, float]:
    """Take a step of a number to which calls add, and which they read."""
    if call.kind == "add":
        assert call.value is not None
        return True, state + call.value
    return state == call.value, state


def register(state: float, call: Call) -> tuple[bool, float | None]:
    """Take a step of a cell that calls set and read."""
    if call.kind == "set":
        return True, call.value
    return state == call.value, state


def find_violations(
    calls: Iterable[Call], step: Step = counter, initial: Hashable = 0
) -> list[str]:
    """Say for each key why its calls have no order that explains the answers; [] when all have."""
    found = []
    for key, of_key in sorted(History(calls).by_key().items()):
        # A read that nobody got an answer to tells nothing.
        told = [c for c in of_key if c.returned_s is not None or c.kind != "read"]
        stuck = _search(told, step, initial)
        if stuck is not None:
            found.append(f"key {key!r} is not linearizable:\n{stuck}")
    return found


class _Entry:
    """The moment of a call's invocation or of its answer, in a list from which it can be lifted."""

    __slots__ = ("after", "answer", "before", "call", "number")

    def __init__(self, call: Call | None, number: int) -> None:
        self.call, self.number = call, number
        self.answer: _Entry | None = None  # of an invocation
        self.before: _Entry | None = None
        self.after: _Entry | None = None

    def lift(self) -> None:
        assert self.before is not None
        self.before.after = self.after
        if self.after is not None:
            self.after.before = self.before

    def put_back(self) -> None:
        assert self.before is not None
        self.before.after = self
        if self.after is not None:
            self.after.before = self


def _entries(calls: Sequence[Call]) -> _Entry:
    """Return the head of the list of moments; at equal ones invocations come first."""
    moments: list[tuple[float, int, int, _Entry]] = []
    for number, call in enumerate(calls):
        entry = _Entry(call, number)
        moments.append((call.invoked_s, 0, number, entry))
        if call.returned_s is not None:
            entry.answer = _Entry(None, number)
            moments.append((call.returned_s, 1, number, entry.answer))
    head = last = _Entry(None, -1)
    for *_, entry in sorted(moments, key=lambda moment: moment[:3]):
        last.after, entry.before = entry, last
        last = entry
    return head


def _search(calls: Sequence[Call], step: Step, initial: Hashable) -> str | None:
    """Look for an order; None when there is one, else where the best attempt got stuck."""
    head, state, taken = _entries(calls), initial, 0
    missing = sum(call.returned_s is not None for call in calls)
    tried: set[tuple[int, Hashable]] = set()
    chosen: list[tuple[_Entry, State]] = []
    best: tuple[int, list[Call], State] = (-1, [], initial)
    entry = head.after
    while missing:
        assert entry is not None
        if entry.call is not None:
            fits, following = step(state, entry.call)
            mark = (taken | 1 << entry.number, following)
            if fits and mark not in tried:
                tried.add(mark)
                chosen.append((entry, state))
                taken, state = mark
                entry.lift()
                if entry.answer is not None:
                    entry.answer.lift()
                    missing -= 1
                entry = head.after
            else:
                entry = entry.after
            continue
        if len(chosen) > best[0]:
            best = (len(chosen), [e.call for e, _ in chosen if e.call is not None], state)
        if not chosen:
            return _story(calls, best[1], best[2])
        entry, state = chosen.pop()
        taken &= ~(1 << entry.number)
        if entry.answer is not None:
            entry.answer.put_back()
            missing += 1
        entry.put_back()
        entry = entry.after
    return None


def _story(calls: Sequence[Call], ordered: Sequence[Call], state: State) -> str:
    left = [call for call in calls if call not in ordered]
    first = min((c.returned_s for c in left if c.returned_s is not None), default=math.inf)
    next_up = sorted((c for c in left if c.invoked_s <= first), key=lambda c: c.invoked_s)
    lines = [f"    in order: {call}" for call in ordered[-6:]]
    lines += [f"  the value is {state} then, and none of these can come next:"]
    return "\n".join(lines + [f"    {call}" for call in next_up[:8]])


# -- staleness ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sight:
    """What a worker saw when it read: for each worker, how many of its updates were applied."""

    worker: int
    clock: int  # how many steps the reader had committed
    seen: Mapping[int, int]
    invoked_s: float
    returned_s: float


Life = tuple[float, float]  # from joining until it left or was lost


def find_stale(
    sights: Iterable[Sight], bound: int | None, lives: Mapping[int, Sequence[Life]] | None = None
) -> list[str]:
    """Say which reads saw too little (or impossibly much) for that bound; [] when none did.

    `lives`: when each worker took part; without it all did all the time. Updates count from 1, and
    a worker's clock is the number of its updates. Bound None: only what holds without a bound.
    """
    found: list[str] = []
    newest: dict[int, Mapping[int, int]] = {}
    for sight in sorted(sights, key=lambda s: s.returned_s):
        reader = f"worker {sight.worker} at clock {sight.clock} ({sight.returned_s:.4f} s)"
        own = sight.seen.get(sight.worker, 0)
        if own < sight.clock:
            found.append(f"{reader} saw {own} of its own {sight.clock} updates")
        for other, count in newest.get(sight.worker, {}).items():
            if sight.seen.get(other, 0) < count:
                found.append(
                    f"{reader} saw {sight.seen.get(other, 0)} updates of worker {other}, but"
                    f" {count} before: what it sees went back"
                )
        newest[sight.worker] = sight.seen
        if bound is None:
            continue
        for other, count in sight.seen.items():
            if other == sight.worker or not _lived(lives, other, sight):
                continue
            if count < sight.clock - bound:
                found.append(
                    f"{reader} saw {count} updates of worker {other}: staler than {bound}, it had"
                    f" to wait for {sight.clock - bound}"
                )
            if count > sight.clock + bound + 1:
                found.append(
                    f"{reader} saw {count} updates of worker {other}, which may be at most"
                    f" {bound} + 1 ahead of it"
                )
    return found


def _lived(lives: Mapping[int, Sequence[Life]] | None, worker: int, sight: Sight) -> bool:
    if lives is None:
        return True
    return any(
        start <= sight.invoked_s and sight.returned_s <= end for start, end in lives.get(worker, ())
    )
