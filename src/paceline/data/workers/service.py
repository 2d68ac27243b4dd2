"""The loop of a data worker: orders come, batches go.

    wait for anything -> take orders -> (a later stage: ask the stage before) -> make one -> send it

One thread, one batch at a time, in the order in which everything for it was there. Orders wait here
for their turn; how many there are, the askers decide (a bounded number each), so nothing piles up:
a stage makes only what the next one has asked for.

It ends when all who could ask it have left the job or were lost: the trainers, or the next stage.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from paceline import _core
from paceline.comm.group import Group
from paceline.control.member import Member
from paceline.data.workers import messages as m
from paceline.data.workers.connection import MakingLine, form
from paceline.data.workers.messages import pack, unpack
from paceline.data.workers.recipe import Ended, Failure, Recipe
from paceline.data.workers.supply import Pending, Supply, ready_key
from paceline.errors import PeerError, UsageError
from paceline.ps.replication.connector import Meetings
from paceline.runtime.console import say
from paceline.runtime.job import Job

_TICK_S = 0.1


def stage_members(job: Job, stage: int) -> list[Member]:
    """Return the data workers of a stage."""
    first = sum(job.env.data_workers[:stage])
    membership = job.fabric.membership
    ranks = membership.data_workers[first : first + job.env.data_workers[stage]]
    return [membership.member(rank) for rank in ranks]


def serve(job: Job, recipes: Sequence[Recipe]) -> NoReturn:
    """Be a data worker until the trainers have left; then end the process in good order."""
    Service(job, recipes).run()
    sys.exit(0)


class Service:
    """A data worker at work."""

    def __init__(self, job: Job, recipes: Sequence[Recipe]) -> None:
        self._job, self._recipes = job, recipes
        self._stage = _stage_of(job)
        self._num_stages = len(job.env.data_workers)
        self._supply: Supply | None = None
        if self._stage > 0:
            makers = stage_members(job, self._stage - 1)
            agent = job.rendezvous.agent
            self._supply = Supply(job.fabric, agent, makers, reads=self._stage == 1)
        self._lines: list[MakingLine] = []
        self._meetings: Meetings[Group] = Meetings()
        self._meeting: dict[int, Member] = {}
        self._asked: list[tuple[MakingLine, Pending]] = []  # of the stage before
        self._ready: deque[tuple[MakingLine, m.Order, Any]] = deque()  # with the samples, or None
        for asker in self._askers():
            self._meeting[asker.rank] = asker
            self._meetings.arrange(asker.rank, asker.rank, self._forming(asker))
        job.rendezvous.agent.store_set(ready_key(job.env.rank), b"1")

    def run(self) -> None:
        """Serve until it is over."""
        _core.keep_freed_memory()  # every batch is of about the same size
        for recipe in self._recipes:
            recipe.begin(self._job.env.number, sum(self._job.env.data_workers))
        while not self._is_over():
            if not self._ready:
                self._wait()
            self._meet()
            for line in list(self._lines):
                self._take_orders(line)
            self._take_samples()
            if self._ready:
                self._make(*self._ready.popleft())

    def _askers(self) -> list[Member]:
        if self._stage + 1 < self._num_stages:
            return stage_members(self._job, self._stage + 1)
        membership = self._job.fabric.membership
        return [membership.member(rank) for rank in membership.workers]

    def _forming(self, asker: Member) -> Callable[[], Group]:
        fabric = self._job.fabric
        return lambda: form(fabric, fabric.me, asker)

    def _is_over(self) -> bool:
        presence = self._job.fabric.presence
        known = [presence.get(asker.rank) for asker in self._askers()]
        if all(one is not None and one.state in ("left", "lost") for one in known):
            return True
        agent = self._job.rendezvous.agent
        is_cut_off = not agent.is_attached
        return is_cut_off and not self._lines and not self._meeting

    def _wait(self) -> None:
        works = [line.receiving for line in self._lines]
        works += [p.incoming.work for _, p in self._asked if p.incoming is not None]
        if works:
            _core.wait_any([work.handle for work in works], _TICK_S)  # type: ignore[misc]
        else:
            time.sleep(_TICK_S / 5)

    def _meet(self) -> None:
        for rank, formed in self._meetings.take() if self._meeting else ():
            member = self._meeting.pop(rank)  # type: ignore[call-overload]
            if isinstance(formed, Group):  # else it is gone, or gave this data worker up
                self._lines.append(MakingLine(self._job.fabric, member, formed))

    def _take_orders(self, line: MakingLine) -> None:
        try:
            while line.receiving.done():
                self._begin(line, line.take())
        except PeerError:
            self._drop(line)

    def _begin(self, line: MakingLine, order: m.Order) -> None:
        if not 0 <= order.loader < len(self._recipes):
            line.refuse(order, m.UNKNOWN, "")
        elif order.facts != (mine := self._recipes[order.loader].facts):
            line.refuse(order, m.DIFFERS, mine)
        elif self._supply is None:
            self._ready.append((line, order, None))
        else:
            self._asked.append((line, self._supply.ask(order)))

    def _take_samples(self) -> None:
        """See what the stage before has sent."""
        if self._supply is None:
            return
        self._supply.look()
        for entry in list(self._asked):
            answer = self._supply.take(entry[1]) if entry[1].has_come else None
            if answer is None:
                continue  # not yet, or somebody else was asked
            self._asked.remove(entry)
            line, order = entry[0], entry[1].order
            if answer.reply.problem:
                self._refuse(line, order, answer.reply.problem, answer.reply.text)
            else:
                samples = unpack(answer.reply.plain, answer.memory)
                self._ready.append((line, order, samples))
        if self._supply.is_empty:  # do the stages before as well
            self._ready.extend((line, pending.order, None) for line, pending in self._asked)
            self._asked.clear()

    def _make(self, line: MakingLine, order: m.Order, samples: Any) -> None:
        recipe = self._recipes[order.loader]
        try:
            made = self._made(recipe, order, samples)
            parcel = pack(made, "a batch" if self._is_last else "a sample, between two stages,")
        except Ended:
            self._refuse(line, order, m.ENDED, "")
            return
        except Failure as failure:
            self._refuse(line, order, m.RAISED, f"{self._name}: {failure}")
            return
        except UsageError as error:
            self._refuse(line, order, m.RAISED, f"{self._name}: {error}")
            return
        try:
            line.deliver(order, parcel)
        except PeerError:
            self._drop(line)

    def _made(self, recipe: Recipe, order: m.Order, samples: Any) -> Any:
        """Do the work of this stage, and of those before it if nobody has done it."""
        first = self._stage
        if samples is None:
            first, samples = 0, recipe.read(order)
        last = len(recipe.stages) if self._is_last else min(self._stage + 1, len(recipe.stages))
        for number in range(first, last):
            samples = recipe.apply(number, order, samples)
        return recipe.collate(order, samples) if self._is_last else samples

    @property
    def _is_last(self) -> bool:
        return self._stage + 1 == self._num_stages

    @property
    def _name(self) -> str:
        return f"data worker {self._job.env.number} ({self._job.fabric.me.where})"

    def _refuse(self, line: MakingLine, order: m.Order, problem: str, text: str) -> None:
        try:
            line.refuse(order, problem, text)
        except PeerError:
            self._drop(line)

    def _drop(self, line: MakingLine) -> None:
        """Forget an asker that is gone, and what it asked for."""
        if line in self._lines:
            self._lines.remove(line)
            self._ready = deque(entry for entry in self._ready if entry[0] is not line)
            self._asked = [entry for entry in self._asked if entry[0] is not line]
            line.close()


def _stage_of(job: Job) -> int:
    number, stage = job.env.number, 0
    while number >= job.env.data_workers[stage]:
        number -= job.env.data_workers[stage]
        stage += 1
    return stage


def say_serving(job: Job, recipes: Sequence[Recipe]) -> None:
    """Tell once what the data workers do."""
    if job.env.number == 0:
        counts = " and then ".join(map(str, job.env.data_workers))
        loaders = "; ".join(recipe.facts for recipe in recipes)
        say(f"data workers ({counts}) make the batches of: {loaders}")
