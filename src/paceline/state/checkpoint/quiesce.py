"""A moment at which nothing is under way, where workers otherwise never wait for each other.

Under a free-running pace each worker is behind another step. Whoever wants to save CALLS: the first
worker when it is time, anybody who is asked to stop. The others hear of it at the end of a step,
ARRIVE and wait; when all who are still there have arrived, the first one reads what the servers
have, and lets everybody GO. So what the servers have and what each worker says it has done belong
together: no sample is counted that is not in the parameters, and none is missing.

Where nobody may be further ahead than some bound (ssp), one who stands still would soon hold up
those who have not heard yet. There a call names a step that nobody has come to so far, and all
arrive behind that step of their own.

A worker may be in the job and never arrive: it has done its steps and waits for the others, or it
evaluates. After some time the save is given up and all go on; if it was to be the last one, those
who are there save without it.

Words go through the job's store. A thread listens for the next call, so that a step costs nothing.
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


class Call(msgspec.Struct, frozen=True):
    """Somebody wants all workers to save."""

    step: int  # behind which; the name of the checkpoint
    stops: bool  # and to end


class Cut:
    """One worker's part in such moments. Main thread, and one that listens."""

    def __init__(self, job: Job, name: str) -> None:
        self._job, self._name = job, name
        self._agent = job.rendezvous.agent
        self._number = 0  # of the next one
        self._heard: Call | None = None
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="paceline cut", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no more."""
        self._is_closed.set()

    def say_farewell(self, own: Any) -> None:
        """Leave behind how far this worker has come: it leaves, and others may save later."""
        self._agent.store_set(self._farewell(self._job.env.rank), msgspec.json.encode(own))

    def farewells(self, ranks: Sequence[int]) -> dict[int, Any]:
        """Return what those have said who have left, by rank."""
        agent, key = self._agent, self._farewell
        said = [rank for rank in ranks if agent.store_check([key(rank)])]
        return {rank: msgspec.json.decode(agent.store_get(key(rank))) for rank in said}

    @property
    def heard(self) -> Call | None:
        """A call that has come and was not followed yet."""
        return self._heard

    def call(self, step: int, *, stops: bool) -> Call:
        """Call the others, or find that somebody has."""
        mine = msgspec.msgpack.encode(Call(step, stops))
        told = self._agent.store_compare_set(self._key("call"), b"", mine)
        self._heard = msgspec.msgpack.decode(told, type=Call)
        return self._heard

    def take(self, call: Call, capture: Callable[[], None]) -> list[int]:
        """Wait until all have arrived, capture, and go on; return who is in it, by rank: nobody, if
        it was given up.

        The first worker captures last: what servers have is then what all have made of it.
        """
        job, agent = self._job, self._agent
        is_first = job.world.rank == 0
        if not is_first:
            capture()
        agent.store_set(self._key(f"arrived/{job.env.rank}"), b"1")
        if is_first:
            members = self._await_all(call)
            if members:
                capture()
            agent.store_set(self._key("go"), msgspec.msgpack.encode(members))
        else:
            members = self._await_go()
        self._number, self._heard = self._number + 1, None
        return members

    def _key(self, what: str) -> str:
        return f"paceline/{self._name}/{self._number}/{what}"

    def _farewell(self, rank: int) -> str:
        return f"paceline/{self._name}/farewell/{rank}"

    def _here(self) -> list[int]:
        """Who has not left, by rank."""
        newest = self._agent.membership or self._job.fabric.membership
        presence = self._agent.presence
        gone = [rank for rank, word in presence.items() if word.state in _GONE]
        return [rank for rank in newest.workers if rank not in gone]

    def _await_all(self, call: Call) -> list[int]:
        rank, patient_until_s = self._job.env.rank, time.monotonic() + _PATIENCE_S
        notice = WaitNotice(
            f"rank {rank} waits for the other workers to end their step and save", "saving"
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
        come = [one for one in here if self._agent.store_check([self._key(f"arrived/{one}")])]
        late = ", ".join(str(one) for one in here if one not in come)
        what = "saved without it" if call.stops else "this save is given up, and training goes on"
        warn(
            f"rank {late} did not come to save within {_PATIENCE_S:.0f} s (its steps are"
            f" done, or it is busy with something else): {what}"
        )
        return come if call.stops else []

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
                    f"rank {self._job.env.rank}: the first worker left while all were saving"
                )
            time.sleep(_POLL_S)
        members: list[int] = msgspec.msgpack.decode(self._agent.store_get(self._key("go")))
        return members

    def _listen(self) -> None:
        while not self._is_closed.wait(_LISTEN_S):
            number, key = self._number, self._key("call")
            try:
                if self._heard is None and self._agent.store_check([key]):
                    call = msgspec.msgpack.decode(self._agent.store_get(key), type=Call)
                    if number == self._number:
                        self._heard = call
            except PacelineError:
                return  # the job is ending, or the coordinator is gone: the main thread hears of it
