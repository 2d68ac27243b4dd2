"""Explains a hang: which process is missing, what the others wait for, and where it is.

Processes report for which ranks they wait (observe/telemetry/wait_reports.py). These waits are
edges of a graph. The FIRST CAUSE of a long wait is the process at the end of the edges that waits
for no other. The launcher names it in one line and asks it for its stacks, once for as long as a
process waits because of it. If the edges form a cycle, no process is missing: the operations do not
match, and all processes of the cycle print their stacks.

A worker waits for the answer of a server, and the server may wait for another worker. If the server
reports that, its report replaces the edge from the worker to the server.

Threads: the launcher's main thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from paceline.launcher.processes.process import RankProcess
from paceline.observe.telemetry.wait_reports import AGAIN_S, WaitReport
from paceline.runtime.process_names import ProcessName

_SILENT_S = 3 * AGAIN_S
Path = tuple["_Wait", ...]


@dataclass(frozen=True)
class _Wait:
    """One edge: `rank` has waited for `for_ranks` since `since_s`."""

    rank: int
    operation: str
    for_ranks: tuple[int, ...]
    since_s: float
    told_by: int | None
    heard_s: float  # the time of the last report


class HangWatch:
    """All long waits of a job; `check` is called regularly and logs new hangs."""

    def __init__(
        self,
        process_names: Mapping[int, ProcessName],
        find: Callable[[int], RankProcess | None],
        log: Callable[[str], None],
        after_s: float,
    ) -> None:
        self._process_names, self._find, self._log, self.after_s = process_names, find, log, after_s
        self._waits: dict[tuple[int, str, int | None], _Wait] = {}
        self._now_s = 0.0
        self._suspects: set[frozenset[int]] = set()  # causes at the last check
        self._shown: set[frozenset[int]] = set()

    def on_event(self, event: WaitReport, now_s: float) -> None:
        """Record that a process waits, waits for other ranks than before, or waits no longer."""
        key = (event.rank, event.operation, event.told_by)
        self._waits.pop(key, None)
        if event.for_ranks:
            since_s = now_s - event.waited_s
            self._waits[key] = _Wait(
                event.rank, event.operation, event.for_ranks, since_s, event.told_by, now_s
            )

    def check(self, now_s: float) -> None:
        """Explain new hangs; a cause has to be the same at two checks."""
        self._now_s = now_s
        causes: dict[frozenset[int], Path] = {}
        for wait in sorted(self._present(), key=lambda wait: wait.since_s):
            if now_s - wait.since_s >= self.after_s:
                for cause, path in self._causes(wait):
                    causes.setdefault(cause, path)
        self._shown &= causes.keys()
        for cause in (causes.keys() & self._suspects) - self._shown:
            self._shown.add(cause)
            self._explain(cause, causes[cause], now_s)
        self._suspects = set(causes)

    def _present(self) -> list[_Wait]:
        """Return the waits of running processes that were reported lately.

        A process that is stopped, or holds the GIL, cannot report that its wait is over.
        """
        return [
            wait
            for wait in self._waits.values()
            if self._can_report(wait.rank if wait.told_by is None else wait.told_by)
            and self._now_s - wait.heard_s < _SILENT_S
            and not self._has_ended(wait.rank)
        ]

    def _can_report(self, rank: int) -> bool:
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
        return all(
            rank in self._process_names and self._process_names[rank].is_server for rank in ranks
        )

    def _causes(self, first: _Wait) -> Iterator[tuple[frozenset[int], Path]]:
        """Follow the edges; yield each cause, a rank or a cycle of them, and the path to it."""
        if first not in self._of(first.rank):  # the report of a server replaces it
            return
        paths: list[Path] = [(first,)]
        seen = {first.rank}
        is_cycle = True
        cycle: Path = ()
        while paths:
            path = paths.pop(0)
            for rank in path[-1].for_ranks:
                onward = self._of(rank)
                if not onward and not self._has_ended(rank):
                    is_cycle = False
                    yield frozenset((rank,)), path
                at = next((k for k, wait in enumerate(path) if wait.rank == rank), None)
                if at is not None:
                    cycle = cycle or path[at:]
                elif rank not in seen:
                    seen.add(rank)
                    paths.extend((*path, wait) for wait in onward)
        if is_cycle and cycle:
            yield frozenset(wait.rank for wait in cycle), cycle

    # -- lines --------------------------------------------------------------------------------

    def _explain(self, cause: frozenset[int], path: Path, now_s: float) -> None:
        ranks = sorted(cause)
        processes = [process for rank in ranks if (process := self._find(rank)) is not None]
        able = [process for process in processes if not process.is_frozen()]
        if len(ranks) == 1:
            waits = self._describe(path, "it", now_s)
            self._log(f"{self._name(ranks[0])} is missing: {waits}; {self._state(ranks[0])}")
        else:
            waits = self._describe(path, self._name(path[0].rank), now_s)
            states = "; ".join(f"{self._name(rank)}: {self._state(rank)}" for rank in ranks)
            self._log(f"deadlock: {waits}: these operations do not match; {states}")
        for process in able:
            process.ask_for_stacks()

    def _describe(self, path: Path, end: str, now_s: float) -> str:
        """Return "rank 0 has waited 30 s for rank 1 in recv, which waits for rank 2 in ..."."""
        targets = [*(self._name(wait.rank) for wait in path[1:]), end]
        text = f"{self._name(path[0].rank)} has waited {now_s - path[0].since_s:.0f} s for "
        text += ", which waits for ".join(
            f"{target} in {wait.operation}{self._through(wait)}"
            for wait, target in zip(path, targets, strict=True)
        )
        return text

    def _through(self, wait: _Wait) -> str:
        return "" if wait.told_by is None else f" at {self._name(wait.told_by)}"

    def _state(self, rank: int) -> str:
        process = self._find(rank)
        if process is None:
            return "this launcher did not start it; check the host where it runs"
        text = f"{process.describe_state()}, pid {process.pid}"
        if process.is_frozen():
            return text
        if not process.shows_stacks:
            return f"{text}; it has not called pl.init(), so it cannot print its stacks"
        return f"{text}; its stacks follow"

    def _name(self, rank: int) -> str:
        return str(self._process_names.get(rank, f"rank {rank}"))
