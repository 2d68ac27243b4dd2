"""Quiesce: a moment without updates in flight, at paces where workers never wait for each other.

Under a free-running pace each worker is at a different step. The first worker REQUESTS a save when
it is due; any worker does so when it is asked to stop. The other workers receive the request at the
end of a step, ARRIVE and wait. When all workers still in the job have arrived, the first worker
reads the state of the servers and lets all workers GO. So the state of the servers matches the
counters of each worker: every counted sample is in the parameters, and no other sample is.

At a pace with a bound (ssp), a worker that stops would soon block workers that have not received
the request. There a request names a step that no worker has reached, and each worker arrives after
that step.

A worker may never arrive: its steps are done and it waits for the others, or it evaluates. After
some time the save is abandoned and training continues; if it was the last save before a stop, the
workers that have arrived save without it.

Messages go through the job's store. A thread polls for the next request, so that a step costs
nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from paceline.control.wait_notice import WaitNotice
from paceline.errors import PacelineError
from paceline.runtime.console import warn
from paceline.runtime.job import Job

_LISTEN_S = 0.2
_POLL_S = 0.005
_PATIENCE_S = 30.0
_GONE = ("left", "lost")


class SaveRequest(msgspec.Struct, frozen=True):
    """A worker asks all workers to save."""

    step: int  # after which to save; the name of the checkpoint
    stops: bool  # and to exit


class QuiescePoint:
    """One worker's side of a quiesce. Main thread, and a polling thread."""

    def __init__(self, job: Job, name: str) -> None:
        self._job, self._name = job, name
        self._agent = job.rendezvous.agent
        self._number = 0  # of the next save
        self._pending: SaveRequest | None = None
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="paceline quiesce", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop polling."""
        self._is_closed.set()

    def publish_departure(self, state: Any) -> None:
        """Store the counters of this worker, which exits, for later saves of other workers."""
        self._agent.store_set(self._departure(self._job.env.rank), msgspec.json.encode(state))

    def departed_states(self, ranks: Sequence[int]) -> dict[int, Any]:
        """Return the counters of workers that have exited, by rank."""
        agent, key = self._agent, self._departure
        known = [rank for rank in ranks if agent.store_check([key(rank)])]
        return {rank: msgspec.json.decode(agent.store_get(key(rank))) for rank in known}

    @property
    def pending(self) -> SaveRequest | None:
        """A received request that this worker has not joined yet."""
        return self._pending

    def request(self, step: int, *, stops: bool) -> SaveRequest:
        """Request a save; return the request of another worker if that was first."""
        mine = msgspec.msgpack.encode(SaveRequest(step, stops))
        first = self._agent.store_compare_set(self._key("call"), b"", mine)
        self._pending = msgspec.msgpack.decode(first, type=SaveRequest)
        return self._pending

    def join(self, request: SaveRequest, capture: Callable[[], None]) -> list[int]:
        """Wait until all workers have arrived, capture, and continue; return the ranks that take
        part: none, if the save was abandoned.

        The first worker captures last: the servers then have the updates of all workers.
        """
        job, agent = self._job, self._agent
        is_first = job.world.rank == 0
        if not is_first:
            capture()
        agent.store_set(self._key(f"arrived/{job.env.rank}"), b"1")
        if is_first:
            members = self._await_all(request)
            if members:
                capture()
            agent.store_set(self._key("go"), msgspec.msgpack.encode(members))
        else:
            members = self._await_go()
        self._number, self._pending = self._number + 1, None
        return members

    def _key(self, what: str) -> str:
        return f"paceline/{self._name}/{self._number}/{what}"

    def _departure(self, rank: int) -> str:
        return f"paceline/{self._name}/farewell/{rank}"

    def _here(self) -> list[int]:
        """Return the ranks of the workers that have not left."""
        newest = self._agent.membership or self._job.fabric.membership
        presence = self._agent.presence
        gone = [rank for rank, one in presence.items() if one.state in _GONE]
        return [rank for rank in newest.workers if rank not in gone]

    def _await_all(self, request: SaveRequest) -> list[int]:
        rank, patient_until_s = self._job.env.rank, time.monotonic() + _PATIENCE_S
        notice = WaitNotice(
            f"rank {rank} waits for the other workers to finish their step and save", "saving"
        )
        while True:
            here = self._here()
            if self._agent.store_check([self._key(f"arrived/{one}") for one in here]):
                return here
            if time.monotonic() > patient_until_s:
                break
            if notice.check():
                notice.ranks = tuple(self._absent(here))
            time.sleep(_POLL_S)
        arrived = [one for one in here if self._agent.store_check([self._key(f"arrived/{one}")])]
        late = ", ".join(str(one) for one in here if one not in arrived)
        what = "saved without it" if request.stops else "the save was abandoned; training continues"
        warn(
            f"rank {late} did not join the save within {_PATIENCE_S:.0f} s (its steps are done, or"
            f" it is busy with something else): {what}"
        )
        return arrived if request.stops else []

    def _absent(self, here: list[int]) -> list[int]:
        return [one for one in here if not self._agent.store_check([self._key(f"arrived/{one}")])]

    def _await_go(self) -> list[int]:
        notice = WaitNotice(
            f"rank {self._job.env.rank} waits for the first worker to save",
            "saving",
            self._job.world.ranks[:1],
        )
        while not self._agent.store_check([self._key("go")]):
            notice.check()
            if self._job.world.ranks[0] not in self._here():
                raise PacelineError(
                    f"rank {self._job.env.rank}: the first worker left during a save; start the job"
                    " again to resume from the last checkpoint"
                )
            time.sleep(_POLL_S)
        members: list[int] = msgspec.msgpack.decode(self._agent.store_get(self._key("go")))
        return members

    def _poll(self) -> None:
        while not self._is_closed.wait(_LISTEN_S):
            number, key = self._number, self._key("call")
            try:
                if self._pending is None and self._agent.store_check([key]):
                    request = msgspec.msgpack.decode(self._agent.store_get(key), type=SaveRequest)
                    if number == self._number:
                        self._pending = request
            except PacelineError:
                return  # the job ends, or the coordinator is gone: the main thread notices it too
