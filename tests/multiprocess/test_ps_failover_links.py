"""A link goes on with the server that takes over: nothing that it was asked is lost or reordered.

The servers are scripts here, so that the first can die at a chosen place and the second can say
what came to it; the line between them and the worker is the real one, and so are their deaths.
"""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest
import torch

import paceline as pl
from paceline.comm.group import Group
from paceline.control.member import Membership
from paceline.errors import PacelineError, PeerTimeout, ServerLost, UsageError
from paceline.ps import connection as framed
from paceline.ps import messages as m
from paceline.ps.client.link import ServerLink
from paceline.ps.connection import form_connection
from paceline.runtime import job
from paceline.runtime.work import Work
from support import RanksFailed, receive, report, run_ranks, started

CLIENT, FIRST, SECOND = range(3)
HOSTS = {"one host": [0, 0, 0], "second elsewhere": [0, 0, 1], "first elsewhere": [0, 1, 0]}


def memberships() -> list[Membership]:
    """Both servers, then only the second one, then none."""
    members = job.current().fabric.membership.members
    both = Membership(1, members, ((FIRST, SECOND),))
    return [both, both.without([FIRST]), both.without([FIRST]).without([SECOND])]


class News:
    """What a coordinator would say, told by the test."""

    over: str | None = None
    ending: PacelineError | None = None
    is_attached = True

    def __init__(self) -> None:
        self.known = memberships()[:1]
        self.accused: list[int] = []
        self._changed = threading.Condition()

    def publish(self, number: int) -> None:
        with self._changed:
            self.known.append(memberships()[number])
            self._changed.notify_all()

    def wait_for_generation(self, above: int, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.known[-1].generation > above, timeout_s)

    def report_unreachable(self, rank: int, _why: str) -> None:
        self.accused.append(rank)


def link_of(news: News) -> ServerLink:
    fabric = job.current().fabric
    fabric.watch_announcements(lambda: news.known[-1])
    return ServerLink(fabric, 0, news)


class Script:
    """A server that does what it is told."""

    def __init__(self, number: int) -> None:
        fabric = job.current().fabric
        self.pair = form_connection(fabric, memberships()[number], 0, CLIENT, fabric.rank)
        self.sent: list[Work[None]] = []  # tensors, which the worker takes when it likes

    def read(self) -> m.AnyRequest:
        frame, rest = np.empty(framed.FRAME_BYTES, np.uint8), None
        self.pair.receive_frame(frame, framed.REQUEST).wait()
        if size := framed.rest_bytes(frame):
            rest = np.empty(size, np.uint8)
            self.pair.receive_frame(rest, framed.REQUEST_REST).wait()
        return framed.read_request(frame, rest)

    def answer(self, seq: int, *tensors: torch.Tensor, **fields: object) -> None:
        reply = m.Reply(seq, delivers=bool(tensors), **fields)
        frame, rest = framed.to_frames(reply)
        self.pair.send(frame, framed.reply_tag(seq)).wait()
        if rest is not None:
            self.pair.send(rest, framed.reply_tag(seq, is_rest=True)).wait()
        for number, tensor in enumerate(tensors):
            self.sent.append(self.pair.send(tensor, framed.delivery_tag(seq, number)))


def die() -> None:
    time.sleep(0.1)  # what was sent before has arrived
    os.kill(os.getpid(), signal.SIGKILL)


def client() -> list[object]:
    news = News()
    link, grad = link_of(news), pl.empty(5000).fill_(3.0)
    into = torch.zeros(5000)

    def push(seq: int) -> m.Push:
        return m.Push(seq, 0, 0, 1, link.locate(grad), "float32")

    def payload() -> tuple[torch.Tensor, ...]:
        return () if link.is_local else (grad,)

    answered = link.ask(m.Keys)
    answered.wait()
    link.tell(push, payload)
    whole = link.ask(m.Stats)  # it is answered, but nobody reads that before the server dies
    asked = link.ask(push, payload, lambda _: (into,))
    while link._failover.why is None:  # until the death is noticed
        with pytest.raises(PeerTimeout):
            asked.wait(0.2)
    link.tell(push, payload)  # while nobody is there
    late = link.ask(lambda seq: m.Find(seq, "x" * 3000))
    assert not asked.done() and not late.done()
    threading.Timer(0.2, news.publish, [1]).start()
    versions = [work.wait().version for work in (late, asked, whole, answered)]
    assert into.eq(7.0).all()
    assert link.server.rank == SECOND and len(link._pending) == 0
    report("over")
    return versions


def first() -> None:
    line = Script(0)
    line.answer(line.read().seq, version=11)
    kinds = [type(line.read()).__name__ for _ in range(3)]
    assert kinds == ["Push", "Stats", "Push"]
    line.answer(3, version=13)
    die()


def second() -> list[object]:
    line = Script(1)
    came = []
    while not came or came[-1][0] != 6:
        request = line.read()
        tensors = []
        if isinstance(request, m.Push) and request.where is None:
            tensors = [torch.empty(5000)]
            line.pair.receive(tensors[0], framed.payload_tag(request.seq)).wait()
        came.append((request.seq, type(request).__name__, [t.mean().item() for t in tensors]))
        if isinstance(request, m.Push) and request.seq == 4:
            line.answer(4, torch.full((5000,), 7.0), version=24)
        elif not isinstance(request, m.Push):
            line.answer(request.seq, version=20 + request.seq)
    for work in line.sent:
        work.wait()
    return came


@pytest.mark.parametrize("hosts", HOSTS.values(), ids=HOSTS)
def test_what_is_unanswered_goes_to_the_next_server_in_order(hosts: list[int]) -> None:
    def body(group: Group) -> object:
        return (client, first, second)[group.rank]()

    with started(3, body, hosts=hosts) as ranks:
        [outcome] = ranks.wait(60, [CLIENT])
        if outcome.error is not None or outcome.status:
            raise RanksFailed("the client failed", ranks.wait(20))
        [survivor] = ranks.wait(40, [SECOND])
    assert survivor.error is None and survivor.status == 0, survivor
    versions, came = outcome.value, survivor.value
    follows = [3.0] if hosts[SECOND] != hosts[CLIENT] else []
    numbers = [seq for seq, _, _ in came]
    assert versions in ([26, 24, 13, 11], [26, 24, 23, 11])  # 13 if that answer had been taken in
    assert numbers in ([2, 4, 5, 6], [2, 3, 4, 5, 6])
    assert all(sent == follows for _, kind, sent in came if kind == "Push")


def test_a_partition_without_a_server_names_what_is_lost() -> None:
    def body(group: Group) -> str:
        if group.rank != CLIENT:
            if group.rank == FIRST:
                Script(0).read()
            receive()
            return ""
        news = News()
        link = link_of(news)
        link.holds += ["w [0:10]", "v [0:3]"]
        work = link.ask(m.Keys)
        with pytest.raises(PeerTimeout):
            work.wait(0.3)
        news.publish(2)
        with pytest.raises(ServerLost) as raised:
            work.wait()
        with pytest.raises(ServerLost):
            link.ask(m.Keys)
        assert work.done()
        return str(raised.value)

    with started(3, body) as ranks:
        [outcome] = ranks.wait(60, [CLIENT])
        for server in (FIRST, SECOND):
            ranks.send(server, "end")
        ranks.wait(40)
    assert outcome.error is None, outcome
    assert outcome.value.startswith("rank 0: partition 0 of the servers' tables is lost: no server")
    assert "It had w [0:10], v [0:3]" in outcome.value


def test_a_long_wait_gives_way_to_others_and_a_lost_server_is_reported() -> None:
    def body(group: Group) -> tuple[int, list[int]]:
        if group.rank == SECOND:
            receive()
            return 0, []
        if group.rank == FIRST:
            line = Script(0)
            line.read()
            receive()
            line.answer(1)
            line.read()
            die()
        news, calls = News(), list[int]()
        link = link_of(news)

        def on_wait() -> None:
            calls.append(1)
            if len(calls) == 5:
                report("answer")
            with pytest.raises(PeerTimeout):
                link.ask(m.Stats).wait(0.01)  # asking from there does not call again

        link.on_wait = on_wait
        link.ask(m.Keys).wait()
        assert len(calls) >= 5
        link.on_wait = None
        asked = link.ask(m.Keys)
        while not news.accused:
            with pytest.raises(PeerTimeout):
                asked.wait(0.2)
        return len(calls), news.accused

    with started(3, body) as ranks:
        ranks.receive(CLIENT)
        ranks.send(FIRST, "answer")
        [outcome] = ranks.wait(60, [CLIENT])
        ranks.send(SECOND, "end")
        ranks.wait(40)
    assert outcome.error is None, outcome
    _, accused = outcome.value
    assert accused and set(accused) == {FIRST}


def test_a_request_that_cannot_be_made_concerns_nobody_else() -> None:
    def body(group: Group) -> str:
        if group.rank != CLIENT:
            if group.rank == FIRST:
                line = Script(0)
                for _ in range(2):
                    line.answer(line.read().seq, version=5)
            group.barrier()
            return ""
        link = link_of(News())

        def wrong(_: int) -> m.AnyRequest:
            raise ServerLost("nonsense")

        assert link.ask(m.Keys).wait().version == 5
        bad = link.ask(wrong)
        assert link.ask(m.Keys).wait().version == 5
        assert len(link._pending) == 0
        group.barrier()
        try:
            bad.wait()
        except ServerLost as error:
            return str(error)
        return "no error"

    assert run_ranks(3, body)[CLIENT] == "nonsense"


def test_a_newcomer_is_told_that_it_comes_too_early() -> None:
    def body(group: Group) -> str:
        if group.rank == CLIENT:
            news, fabric = News(), job.current().fabric
            link = link_of(news)
            fabric.job.membership = memberships()[0].without([CLIENT])
            news.known.append(fabric.membership)
            try:
                link.ask(m.Keys)
            except UsageError as error:
                return str(error)
        return ""

    assert "has been let in" in run_ranks(3, body)[CLIENT]
