"""Supervision: what the launcher does for any elastic job, whatever becomes of its members.

It starts the coordinator and the first processes, makes newcomers for places that lack one (a rank
is reserved at the coordinator, then the process is started and watched like anybody's), and looks
at every process a few times per second: is it stopped, has it ended? What an end means, and what
follows from the coordinator's news, is decided in runtime/job.py.

A script that crashes before it has joined would be replaced for ever: after a few attempts in a row
its place is given up, with those of its unit.

Threads: everything runs in the launcher's loop on the main thread, as in launcher/local.py.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Coroutine, Mapping
from typing import Any, Protocol

from paceline.control.client.operator import News
from paceline.control.membership.decisions import Wanted
from paceline.errors import LaunchError, PacelineError
from paceline.launcher.elastic.bounds import ElasticPlan
from paceline.launcher.elastic.coordinator_process import Control, Coordination, policy_of
from paceline.launcher.elastic.event_log import stamped
from paceline.launcher.elastic.job_facts import record
from paceline.launcher.environment import SERVER_PATIENCE_S
from paceline.launcher.job_resources import Foreground
from paceline.launcher.local import LocalJob
from paceline.launcher.processes.exit_signs import Lookout
from paceline.launcher.processes.process import RankProcess
from paceline.launcher.spec import RunSpec
from paceline.observe.display.display import Display
from paceline.observe.display.lines import printable
from paceline.runtime import coordinator_main as coordinate
from paceline.runtime.config import EngineConfig, bind_address
from paceline.runtime.process_names import Seat

MAX_FAILED_STARTS = 3
_PAUSE_S = 0.5  # after a failed start, and more after each further one

Place = tuple[int, int]  # whether of a server, and its number
_LOOK_S = 0.25
_SETTLE_S = 1.0  # for what was under way when the job was over


class House(Protocol):
    """What a newcomer needs of the job."""

    async def reserve(self, place: Place) -> int: ...
    async def start(self, seat: Seat) -> None: ...


class Nursery:
    """Makes newcomers."""

    def __init__(self, house: House) -> None:
        self._house = house
        self._on_way: set[Place] = set()  # places for which no rank is reserved yet
        self._failed: Counter[Place] = Counter()  # in a row, by the first place of a unit
        self.unit_size = 1  # workers that come together
        self.is_closed = False

    def may_fill(self, place: Place) -> bool:
        """Say whether a newcomer for this place can be made, and is not being made already."""
        given_up = self._failed[self._first(place)] >= MAX_FAILED_STARTS
        return not (self.is_closed or given_up or place in self._on_way)

    async def fill(self, place: Place) -> None:
        """Make a newcomer for a place; raises LaunchError, and what the coordinator refuses."""
        self._on_way.add(place)
        try:
            await asyncio.sleep(_PAUSE_S * self._failed[self._first(place)])
            rank = await self._house.reserve(place)
        finally:
            self._on_way.discard(place)
        if self.is_closed:
            return
        seat = Seat(rank, place[1], is_server=bool(place[0]), is_newcomer=True)
        await self._house.start(seat)

    def failed(self, place: Place) -> bool:
        """Note that a newcomer ended before it had joined; true when its place is given up."""
        self._failed[self._first(place)] += 1
        return self._failed[self._first(place)] >= MAX_FAILED_STARTS

    def joined(self, place: Place) -> None:
        self._failed.pop(self._first(place), None)

    def _first(self, place: Place) -> Place:
        role, number = place
        return place if role else (role, number - number % self.unit_size)


class SupervisedJob(LocalJob):
    """The hands of an elastic job. `_on_news`, `_on_failed_start` and the rest are
    runtime/job.py's."""

    def __init__(
        self,
        spec: RunSpec,
        environ: Mapping[str, str],
        display: Display,
        job_id: str = "",
        holding: Foreground | None = None,
    ) -> None:
        super().__init__(spec, environ, display, job_id, holding)
        assert spec.elastic is not None
        self._plan: ElasticPlan = spec.elastic
        self._nursery = Nursery(self)
        self._host.others = lambda: {None if self._control is None else self._control.pid}
        self._control: Control | None = None
        self._lookout = Lookout()
        self._started: set[int] = set()  # ranks of all processes of ours
        self._tasks: set[asyncio.Task[None]] = set()
        self._looking: asyncio.Task[None] | None = None
        self._is_ending = False
        self._over = ""

    def _on_news(self, news: News) -> None:
        raise NotImplementedError

    def _on_failed_start(self, seat: Seat, why: str) -> None:
        raise NotImplementedError

    def _on_look(self, now_s: float) -> None:
        """Called a few times per second, until the job ends."""

    # -- start -------------------------------------------------------------------------------

    async def _open_control(self, secret: bytes, config: EngineConfig) -> str:
        # A worker may join from another host (`paceline join`), if the user says where to listen.
        host = bind_address({**self._environ, **self._spec.env})
        coordination = Coordination(host, self._holding.coordinator_port, self._tell)
        self._control = Control(coordination, secret, self._job_id, self._on_news)
        has_servers = bool(self._spec.num_servers)
        arguments = coordinate.arguments(
            job_id=self._job_id,
            secret_file=str(self._secret_path),
            journal=str(self._directory.path / "journal"),
            policy=policy_of(self._spec, self._plan, config, self._spec.mesh_in(self._environ)),
            join_timeout_s=SERVER_PATIENCE_S if has_servers else config.join_timeout_s,
        )
        coordination.start(arguments, self._environ)
        return coordination.address

    async def _close_control(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        self._host.expect_no_more()
        if self._control is not None:
            await self._control.close()

    async def _start(self, seat: Seat) -> RankProcess:
        process = await super()._start(seat)
        self._know(process)
        return process

    def _know(self, process: RankProcess) -> None:
        record(self._directory.path, process.seat, process.pid)
        self._started.add(process.seat.rank)
        self._seats[process.seat.rank] = process.seat
        self._lookout.know(process)

    # -- newcomers ---------------------------------------------------------------------------

    def _want(self, wanted: Wanted) -> None:
        place = (wanted.role == "server", wanted.number)
        if self._nursery.may_fill(place):
            self._spawn(self._fill(place))

    async def _fill(self, place: Place) -> None:
        try:
            await self._nursery.fill(place)
        except LaunchError as error:
            self._on_failed_start(Seat(-1, place[1], bool(place[0])), str(error))

    async def reserve(self, place: Place) -> int:
        assert self._control is not None
        role = "server" if place[0] else "worker"
        return (await self._control.reserve(role, place[1])).rank

    async def start(self, seat: Seat) -> None:
        process = await self._start(seat)
        self._board.seat(process.seat)
        self._board.set_state(process.seat.rank, "starting")
        if self._is_ending:  # it comes too late for the others' SIGTERM
            self._crew.tell_to_stop([process])

    # -- look --------------------------------------------------------------------------------

    async def _look_around(self) -> None:
        """Look at every process a few times per second, and tell the coordinator."""
        assert self._control is not None
        while True:
            self._host.look()
            now_s = time.monotonic()
            for rank, stopped_s in self._lookout.look(self._crew.running, now_s).items():
                self._control.report_seen(rank, stopped_s)
            if not self._is_ending:
                self._on_look(now_s)
            await asyncio.sleep(_LOOK_S)

    def _on_child(self) -> None:
        super()._on_child()
        try:
            if self._control is not None and not self._is_ending:
                self._control.look()
        except LaunchError as error:
            self._end_job(str(error))

    # -- tasks and words ---------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._changed.set()
        if not task.cancelled() and isinstance(task.exception(), PacelineError):
            self._tell(str(task.exception()))

    async def _finish_tasks(self) -> None:
        """Let the last loss be settled, for the report; newcomers on their way come too late."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=_SETTLE_S)
            for task in late:
                task.cancel()

    def _tell(self, text: str) -> None:
        self._show(stamped(text))

    def _show(self, line: str) -> None:
        self._display.say(printable(line.encode()))

    def _end_job(self, why: str) -> None:
        if not self._is_ending:  # else it ends already, and this follows from that
            self._over = self._over or why
            self._changed.set()
