"""A link that outlives servers: when one is lost, the questions go on to whoever takes over.

Every request is kept until it is answered (pending.py). When there is another line (renewal.py)
everything that is kept is sent again, in order and under its old numbers; whoever waits for an
answer goes on waiting, on the new line, and notices no more than the delay. Servers answer what
they have handled already, and do not do it again.

Memory that a request is read from must therefore stay as it is until the answer is there: for a
push that has none, until its commit's.

Threads: any; whoever needs the line renews it, under the lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from paceline import errors
from paceline.comm.fabric import Fabric
from paceline.control.member import Member
from paceline.control.wait_notice import WaitNotice
from paceline.ps import connection as framed
from paceline.ps import messages as m
from paceline.ps.client import link as plain
from paceline.ps.client.link import Incoming, Into, Wire
from paceline.ps.client.pending import Numbered, Unanswered
from paceline.ps.client.renewal import News, Renewal
from paceline.runtime.work import Work

SLICE_S = 0.05  # how often a waiting thread looks around
_MANY = 512  # questions under way; servers remember the newest 1024 answers


@dataclass(eq=False)
class _Question:
    """What is needed to ask again, and what came of it."""

    make: plain.Make
    payload: plain.Payload
    into: Into = plain.no_landing
    wants_answer: bool = True
    notice: str = ""
    line: Wire | None = None  # that the answer is expected on
    incoming: Incoming | None = None
    reply: m.Reply | None = None

    @property
    def has_come(self) -> bool:
        """Whether its answer is there, or has begun to be."""
        if self.reply is not None or self.incoming is None:
            return self.reply is not None
        return self.incoming.work.done() and self.incoming.work.error() is None


_Asked = Numbered[_Question]


class LastingLink(plain.ServerLink):
    """Asks whoever answers for a partition."""

    _gives_way = False  # the main thread is busy in somebody's on_wait, and may ask from there

    def __init__(self, fabric: Fabric, index: int, news: News) -> None:
        self.index = index
        self.holds: list[str] = []
        # Called in long waits on the main thread: other workers may need this one meanwhile.
        self.on_wait: Callable[[], None] | None = None
        self.worker, self._engine = fabric.rank, fabric.engine
        self._fabric, self._news = fabric, news
        self._lock = threading.RLock()
        self._unanswered: Unanswered[_Question] = Unanswered()  # guarded by: _lock
        self._renewal = Renewal(fabric, index, news)  # guarded by: _lock
        self._has_left = False  # guarded by: _lock

    # -- who answers --------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return self._server.rank

    @property
    def number(self) -> int:
        return self._server.number

    @property
    def is_local(self) -> bool:
        return self._server.host_id == self._fabric.me.host_id

    @property
    def uses_engine_memory(self) -> bool:
        return True  # a server that takes over may be on this host

    @property
    def label(self) -> str:
        return f"server {self._server.number} (partition {self.index})"

    @property
    def _server(self) -> Member:
        with self._lock:
            server = self._renewal.server
            if server is None:
                raise self._loss()
            return server

    # -- asking -------------------------------------------------------------------------------

    def ask(
        self,
        make: plain.Make,
        payload: plain.Payload = plain.no_payload,
        into: Into = plain.no_landing,
    ) -> Work[m.Reply]:
        question = _Question(make, payload, into)
        with self._lock:
            if len(self._unanswered) > _MANY:
                self._take_whole_answers()
            self._renew()
            asked = self._unanswered.ask(question)
            self._send(asked)
        answer = _LastingAnswer(self, asked)
        return Work(answer, lambda: plain.require_success(answer.reply), question)

    def tell(self, make: plain.Make, payload: plain.Payload = plain.no_payload) -> list[Work[None]]:
        """Send a request that has no reply; its payload is needed until a later one is answered."""
        with self._lock:
            self._renew()
            self._send(self._unanswered.tell(_Question(make, payload, wants_answer=False)))
        return []

    def leave(self) -> None:
        with self._lock:
            has_line, self._has_left = self._renewal.line is not None, True
        with suppress(errors.PacelineError):  # gone or busy: it will see this process leave
            if has_line:
                self.ask(m.Leave).wait(plain.LEAVE_S)
        with self._lock:
            self._renewal.drop()

    def _send(self, asked: _Asked) -> None:
        """Send a request; if the line is broken it goes with the others, over the next one."""
        question, line = asked.content, self._renewal.line
        if line is None:
            return
        try:
            request, tensors = question.make(asked.seq), question.payload()
        except errors.PacelineError as error:
            self._unanswered.withdraw(asked.seq)
            question.reply = m.Reply(asked.seq, error=type(error).__name__, text=str(error))
            if not question.wants_answer:
                raise
            return
        question.notice = question.notice or plain.notice(self, request)
        try:
            if question.wants_answer:
                question.line, question.incoming = line, line.expect(asked.seq)
            line.send(request, tensors)
        except errors.PeerError as error:
            self._renewal.on_broken(line, error)

    def _renew(self) -> None:
        """Go over to another server if there is one; what is unanswered goes along."""
        if self._has_left:
            return
        self._require_admission()
        try:
            is_new = self._renewal.renew()
        except errors.ServerLost as error:
            raise self._loss() from error
        if is_new:
            for asked in self._unanswered:
                incoming = asked.content.incoming
                if incoming is None or not incoming.is_whole:
                    self._send(asked)

    def _require_admission(self) -> None:
        rank, fabric = self.worker, self._fabric
        if rank not in self._renewal.newest.ranks and rank not in fabric.membership.ranks:
            raise errors.UsageError(
                f"rank {rank}: a newcomer cannot ask servers before it has been let in; do so"
                " inside `for step in pl.steps(n)`, or after the first forward pass of the model"
            )

    def _take_whole_answers(self) -> None:
        """Read answers that are there: servers remember a limited number of them."""
        for asked in self._unanswered:
            incoming = asked.content.incoming
            if incoming is not None and incoming.is_whole:
                asked.content.reply = framed.read_reply(incoming.frame, None)
                self._unanswered.answered(asked.seq)

    def _loss(self) -> errors.ServerLost:
        loss = self._renewal.loss()
        held = plain.shown(self.holds)
        text = f"{loss}. It had {held}: start again from a checkpoint"
        return errors.ServerLost(text, rank=loss.rank)

    # -- waiting ------------------------------------------------------------------------------

    def renew(self) -> None:
        """Go over to another server if there is one; does not wait for one."""
        with self._lock:
            self._renew()

    def await_reply(self, asked: _Asked, timeout_s: float | None) -> None:
        """Wait for an answer, whoever gives it in the end."""
        question = asked.content
        for slice_s in self._slices(question, timeout_s):
            with self._lock:
                self._renew()
                line, incoming = question.line, question.incoming
                is_under_way = line is not None and line is self._renewal.line
            if question.reply is not None:  # another thread has read it
                return
            assert incoming is not None or not is_under_way
            if is_under_way or question.has_come:
                assert line is not None and incoming is not None
                if self._has_begun(line, incoming, slice_s) and self._read(asked, line, incoming):
                    return
            else:
                self._news.wait_for_generation(self._renewal.newest.generation, slice_s)

    def _has_begun(self, line: Wire, incoming: Incoming, slice_s: float) -> bool:
        """Wait a little for the first frame of a reply."""
        with suppress(errors.PeerError):
            incoming.work.wait(slice_s)
        if not incoming.work.done():
            return False
        error = incoming.work.error()
        if isinstance(error, errors.PeerError):
            with self._lock:
                self._renewal.on_broken(line, error)
        elif error is not None:
            raise error
        return error is None

    def _read(self, asked: _Asked, line: Wire, incoming: Incoming) -> bool:
        """Read a reply to its end; false: its line broke meanwhile."""
        try:
            reply = line.read(incoming, asked.content.into)
        except errors.PeerError as error:
            with self._lock:
                if asked.content.incoming is incoming:
                    asked.content.incoming = None  # it has to be asked again
                self._renewal.on_broken(line, error)
            return False
        with self._lock:
            asked.content.reply = reply
            self._unanswered.answered(asked.seq)
        return True

    def _slices(self, question: _Question, timeout_s: float | None) -> Iterator[float]:
        """Yield how long may be waited at a time; look after everything else in between."""
        started_s = time.monotonic()
        slow, alone = WaitNotice(question.notice, plain.ANSWER), WaitNotice(self._words())
        left_s = SLICE_S if timeout_s is None else timeout_s
        while True:
            yield min(left_s, SLICE_S)
            if timeout_s is not None:
                left_s = timeout_s - (time.monotonic() - started_s)
                if left_s <= 0:
                    raise errors.PeerTimeout(
                        f"rank {self.worker}: no answer about partition {self.index} within"
                        f" {timeout_s:g} s; it may still come"
                    )
            with self._lock:
                self._renewal.look_for_help()
                line = self._renewal.line
            slow.ranks = (line.member.rank,) if line is not None else ()
            if line is None:
                alone.check()
            elif question.notice and timeout_s is None:
                slow.check()
            self._give_way()

    def _words(self) -> str:
        return f"rank {self.worker} waits for a server to take over partition {self.index}"

    def _give_way(self) -> None:
        """Let whatever else the main thread is needed for be done while it waits."""
        is_main = threading.current_thread() is threading.main_thread()
        if self.on_wait is None or not is_main or LastingLink._gives_way:
            return
        LastingLink._gives_way = True
        try:
            self.on_wait()
        finally:
            LastingLink._gives_way = False


class _LastingAnswer:
    """An answer that comes from whoever has taken over by then."""

    def __init__(self, link: LastingLink, asked: _Asked) -> None:
        self._link, self._asked = link, asked
        self._error: errors.PacelineError | None = None

    @property
    def reply(self) -> m.Reply:
        reply = self._asked.content.reply
        assert reply is not None, "it was not waited for"
        return reply

    def done(self) -> bool:
        question = self._asked.content
        if self._error is None and not question.has_come:
            try:
                self._link.renew()
            except errors.PacelineError as error:
                self._error = error
        return self._error is not None or question.has_come

    def wait(self, timeout_s: float | None = None) -> None:
        if self._asked.content.reply is None:
            self._link.await_reply(self._asked, timeout_s)

    def error(self) -> Exception | None:
        return self._error


def connect(
    fabric: Fabric, news: News | None = None, on_wait: Callable[[], None] | None = None
) -> tuple[plain.ServerLink, ...]:
    """Make this worker's links, one for each partition.

    `news`: the job is elastic, and this says who answers; lines are formed when they are first
    needed. `on_wait` is then called in long waits on the main thread.
    """
    holders = fabric.membership.holders
    if news is None:
        return tuple(plain.ServerLink(fabric, servers[0], i) for i, servers in enumerate(holders))
    links = tuple(LastingLink(fabric, index, news) for index in range(len(holders)))
    for link in links:
        link.on_wait = on_wait
    return links
