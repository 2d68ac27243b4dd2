"""A hang explains itself: who is missing, in what the others wait for it, and where it is.

Processes tell for whom they wait (observe/telemetry/waiting.py). Those waits are arrows between
ranks; the FIRST CAUSE of a long wait is whoever is found at the end of the arrows and waits for
nobody. It is named in one line and asked for its stacks, once for as long as somebody waits because
of it. When the arrows lead back to where they began, nobody is missing: the operations do not fit
together, and all in that circle show where they are.

A worker waits for a server's answer; that answer may wait for another worker. Where the server says
so, its word stands for the arrow from the worker to the server.

Threads: the launcher's main thread only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from paceline.launcher.processes.process import RankProcess
from paceline.observe.telemetry.waiting import AGAIN_S, Waiting
from paceline.runtime.process_names import Seat

_SILENT_S = 3 * AGAIN_S
Way = tuple["_Wait", ...]


@dataclass(frozen=True)
class _Wait:
    """One arrow: `rank` waits for others since `since_s`."""

    rank: int
    operation: str
    for_ranks: tuple[int, ...]
    since_s: float
    told_by: int | None
    heard_s: float  # when it was told last


class HangWatch:
    """All long waits of a job; `look` is called now and then and says what has become a hang."""

    def __init__(
        self,
        seats: Mapping[int, Seat],
        find: Callable[[int], RankProcess | None],
        say: Callable[[str], None],
        after_s: float,
    ) -> None:
        self._seats, self._find, self._say, self.after_s = seats, find, say, after_s
        self._waits: dict[tuple[int, str, int | None], _Wait] = {}
        self._now_s = 0.0
        self._suspects: set[frozenset[int]] = set()  # causes as they were at the last look
        self._shown: set[frozenset[int]] = set()

    def heard(self, event: Waiting, now_s: float) -> None:
        """Take in that somebody waits, waits for others than before, or waits no longer."""
        key = (event.rank, event.operation, event.told_by)
        self._waits.pop(key, None)
        if event.for_ranks:
            since_s = now_s - event.waited_s
            self._waits[key] = _Wait(
                event.rank, event.operation, event.for_ranks, since_s, event.told_by, now_s
            )

    def look(self, now_s: float) -> None:
        """Explain the hangs that are new; each cause has to be the same at two looks."""
        self._now_s = now_s
        causes: dict[frozenset[int], Way] = {}
        for wait in sorted(self._present(), key=lambda wait: wait.since_s):
            if now_s - wait.since_s >= self.after_s:
                for cause, way in self._causes(wait):
                    causes.setdefault(cause, way)
        self._shown &= causes.keys()
        for cause in (causes.keys() & self._suspects) - self._shown:
            self._shown.add(cause)
            self._explain(cause, causes[cause], now_s)
        self._suspects = set(causes)

    def _present(self) -> list[_Wait]:
        """Return the waits of those who still run, and were heard of lately.

        A process that is stopped, or keeps the GIL, cannot say that its wait is over.
        """
        return [
            wait
            for wait in self._waits.values()
            if self._can_speak(wait.rank if wait.told_by is None else wait.told_by)
            and self._now_s - wait.heard_s < _SILENT_S
            and not self._has_ended(wait.rank)
        ]

    def _can_speak(self, rank: int) -> bool:
        process = self._find(rank)
        return process is None or (process.is_running and not process.is_frozen())

    def _has_ended(self, rank: int) -> bool:
        process = self._find(rank)
        return process is not None and not process.is_running

    def _of(self, rank: int) -> list[_Wait]:
        mine = [wait for wait in self._present() if wait.rank == rank]
        if any(wait.told_by is not None for wait in mine):
            mine = [w for w in mine if w.told_by is not None or not self._are_servers(w.for_ranks)]
        return mine

    def _are_servers(self, ranks: Iterable[int]) -> bool:
        return all(rank in self._seats and self._seats[rank].is_server for rank in ranks)

    def _causes(self, first: _Wait) -> Iterator[tuple[frozenset[int], Way]]:
        """Follow the arrows; yield each cause, a rank or a circle of them, and the way there."""
        if first not in self._of(first.rank):  # a server knows better
            return
        ways: list[Way] = [(first,)]
        seen = {first.rank}
        is_circle = True
        circle: Way = ()
        while ways:
            way = ways.pop(0)
            for rank in way[-1].for_ranks:
                onward = self._of(rank)
                if not onward and not self._has_ended(rank):
                    is_circle = False
                    yield frozenset((rank,)), way
                at = next((k for k, wait in enumerate(way) if wait.rank == rank), None)
                if at is not None:
                    circle = circle or way[at:]
                elif rank not in seen:
                    seen.add(rank)
                    ways.extend((*way, wait) for wait in onward)
        if is_circle and circle:
            yield frozenset(wait.rank for wait in circle), circle

    # -- words --------------------------------------------------------------------------------

    def _explain(self, cause: frozenset[int], way: Way, now_s: float) -> None:
        ranks = sorted(cause)
        processes = [process for rank in ranks if (process := self._find(rank)) is not None]
        able = [process for process in processes if not process.is_frozen()]
        if len(ranks) == 1:
            story = self._story(way, "it", now_s)
            self._say(f"{self._name(ranks[0])} is missing: {story}; {self._state(ranks[0])}")
        else:
            states = "; ".join(f"{self._name(rank)}: {self._state(rank)}" for rank in ranks)
            self._say(
                f"nobody is missing, but {self._story(way, self._name(way[0].rank), now_s)}: these"
                f" operations do not fit together; {states}"
            )
        for process in able:
            process.ask_for_stacks()

    def _story(self, way: Way, end: str, now_s: float) -> str:
        """Write "rank 0 has waited 30 s for rank 1 in recv, which waits for rank 2 in ..."."""
        targets = [*(self._name(wait.rank) for wait in way[1:]), end]
        words = f"{self._name(way[0].rank)} has waited {now_s - way[0].since_s:.0f} s for "
        words += ", which waits for ".join(
            f"{whom} in {wait.operation}{self._through(wait)}"
            for wait, whom in zip(way, targets, strict=True)
        )
        return words

    def _through(self, wait: _Wait) -> str:
        return "" if wait.told_by is None else f" at {self._name(wait.told_by)}"

    def _state(self, rank: int) -> str:
        process = self._find(rank)
        if process is None:
            return "it was not started by this launcher, so look where it runs"
        words = f"{process.describe_state()}, pid {process.pid}"
        if process.is_frozen():
            return words
        if not process.shows_stacks:
            return f"{words}; it has not come to pl.init(), so its stacks cannot be shown"
        return f"{words}; its stacks follow"

    def _name(self, rank: int) -> str:
        return str(self._seats.get(rank, f"rank {rank}"))


_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_HEAD = re.compile(r"(Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$")
_FRAME = re.compile(r'  File "(.*)", line \d+ in ')
_IDLE = re.compile(r'  File ".*/concurrent/futures/thread.py", line \d+ in _worker$')
# What calls a script in a fork of the template (launcher/processes/run_script.py), and what Python
# itself leaves out.
_CALLERS = re.compile(
    r'  File "(?:<frozen importlib\._bootstrap(?:_external)?>|<string>'
    rf'|{re.escape(_OURS)}launcher/(?:as_script|template_program)\.py)", line \d+ in '
)


class StackBlocks:
    """Lines go in, lines come out; a block of our own threads and a script's callers do not."""

    def __init__(self) -> None:
        self._block: list[str] = []  # held back until it is known whose it is

    def feed(self, line: str) -> Iterator[str]:
        """Take a line of stderr; yield what is to be shown by now."""
        if _CALLERS.match(line):
            return
        head = _HEAD.match(line)
        if head is not None or (self._block and line and not line.startswith("  ")):
            yield from self.finish()
        if head is not None and head[1] == "Thread" or (self._block and line.startswith("  ")):
            self._block.append(line)
        elif line or not self._block:  # blank lines stand between blocks
            yield line

    @property
    def is_holding(self) -> bool:
        return bool(self._block)

    def finish(self) -> Iterator[str]:
        """End a block; yield it unless its thread is one of ours."""
        block, self._block = self._block, []
        if block and not _is_ours(block) and not _IDLE.match(block[1] if block[1:] else ""):
            yield from block


def _is_ours(block: list[str]) -> bool:
    """A thread that Python started, and whose function is paceline's."""
    files = [found[1] for line in block if (found := _FRAME.match(line))]
    outer = [file for file in files if not file.endswith("/threading.py")]
    return files[-1:] != outer[-1:] and bool(outer) and outer[-1].startswith(_OURS)
