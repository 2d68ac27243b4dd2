"""A key as the client uses it: whatever arrays the script has, and the memory that servers use.

Arrays in engine memory (`pl.empty`) are used where they lie: a server of the same host reads the
gradient and writes the fresh values there. Others go through an OUTBOX and an INBOX, made when they
are first needed and kept. At most one push, one pull and one peek of a key are under way; the next
waits for the one before.

An OPERATION is requests to several servers that are waited for as one. Refusals are raised when
every server has answered, so that no server uses the memory any more; a server that is lost is
raised at once, since the other servers may wait for it for ever.

Threads: any. The first thread that waits for an operation takes the answers; `settled` returns an
error that no thread has seen.
"""

from __future__ import annotations

import math
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from paceline.comm.shared_memory import allocate
from paceline.errors import PacelineError, PeerError, PeerTimeout, ShapeMismatch, UsageError
from paceline.ps import messages as m
from paceline.ps.client import arrays
from paceline.ps.client.arrays import Array
from paceline.ps.client.remote_array import RemoteArray
from paceline.ps.client.session import ClientSession
from paceline.ps.server.non_finite import is_finite
from paceline.ps.server.worker_memory import dtype_of
from paceline.runtime.work import Work


class Operation:
    """The handle of a client's Work."""

    def __init__(
        self, what: str, works: Sequence[Work[Any]], finish: Callable[[list[Any]], Any], keep: Any
    ) -> None:
        self._what = what
        self._works = works
        self._finish = finish  # turns the answers into the result
        self._keep = keep  # memory that servers use until they have answered
        self._mu = threading.Lock()
        self._has_ended = False  # guarded by: _mu; so are the next three
        self._result: Any = None
        self._error: Exception | None = None
        self.is_seen = False  # a thread has got the outcome

    def work(self) -> Work[Any]:
        return Work(self, lambda: self._result, self)

    def done(self) -> bool:
        return self._has_ended or all(work.done() for work in self._works)

    def error(self) -> Exception | None:
        if not self._has_ended and self.done():
            self._take(None)
        return self._error

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for all answers; raise the first error. PeerTimeout: the operation continues."""
        self._take(timeout_s)
        self.is_seen = True
        if self._error is not None:
            raise self._error

    def settled(self) -> Exception | None:
        """Wait until its memory can be used again; return an error that no thread has seen yet."""
        self._take(None)
        was_seen, self.is_seen = self.is_seen, True
        return None if was_seen else self._error

    def _take(self, timeout_s: float | None) -> None:
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        if not self._mu.acquire(timeout=-1 if timeout_s is None else timeout_s):
            raise PeerTimeout(f"{self._what}: no answer within {timeout_s} s; it continues")
        try:
            if not self._has_ended:
                self._collect(deadline_s)
        finally:
            self._mu.release()

    def _collect(self, deadline_s: float | None) -> None:
        answers: list[Any] = []
        try:
            for work in self._works:
                self._collect_one(work, deadline_s, answers)
            if self._error is None:
                self._result = self._finish(answers)
        except PeerError as error:
            if deadline_s is not None and not self._works[len(answers)].done():
                raise  # only this wait has ended
            self._error = error
        self._has_ended = True
        self._works, self._keep = (), None

    def _collect_one(self, work: Work[Any], deadline_s: float | None, answers: list[Any]) -> None:
        left_s = None if deadline_s is None else max(deadline_s - time.monotonic(), 0.0)
        try:
            answers.append(work.wait(left_s))
        except PeerError:
            raise
        except PacelineError as error:
            answers.append(None)
            self._error = self._error or error


class Receipt(NamedTuple):
    """The outcome of a push."""

    version: int  # of the key when it was applied
    staleness: int  # updates of other workers between this worker's last read and the push
    notice: str  # a warning, such as why it was skipped; usually empty


class _Target(NamedTuple):
    """Where values go."""

    memory: torch.Tensor  # flat; servers write there
    deliver: Callable[[], Any]  # brings them to where the script wants them, and returns that


class Key:
    """One key of this process."""

    def __init__(self, session: ClientSession, remote: RemoteArray, *, as_torch: bool) -> None:
        self.remote = remote
        self.spec = remote.spec
        self.is_open = False  # this rank has called init(): it may push
        self._as_torch = as_torch
        self._rank, self._number = session.rank, session.number
        self._engine = session.fabric.engine
        self._mu = threading.Lock()
        self._peek_mu = threading.Lock()
        self._settings: dict[str, Any] = {}  # changed ones; guarded by: _mu, as the next
        self._is_changed = False  # they are not sent yet
        self._boxes: dict[str, torch.Tensor] = {}
        self._last: dict[str, Operation] = {}  # by use: "push" and "pull" under _mu, "peek"

    @property
    def is_worker(self) -> bool:
        """Whether this rank's pushes count, and its reads wait for the clocks."""
        return self.is_open and self._number in self.spec.workers

    def open(self, values: Array) -> bool:
        """Make or join it on the servers; True when it was made. Blocks."""
        is_new = self.remote.create(lambda: self._outgoing(values))
        self.is_open = True
        return is_new

    def configure(self, settings: dict[str, Any]) -> None:
        """Use other settings of the optimizer from this worker's next push on."""
        with self._mu:
            self._settings.update(settings)
            self._is_changed = True

    # -- operations ---------------------------------------------------------------------------

    def push(self, thing: object) -> Operation:
        grad = self._gradient(thing)
        with self._mu:
            self._settle("push")
            memory = self._healthy_outgoing(grad)
            works = self.remote.push_array(memory, self._changed_settings())
            return self._start("push", works, self._receipt, (thing, memory))

    def push_pull(self, thing: object, out: object) -> Operation:
        grad = self._gradient(thing)
        with self._mu:
            self._settle("push", "pull")
            as_torch = isinstance(thing, torch.Tensor)
            target = self._target(out, "inbox", as_torch=as_torch)
            memory = self._healthy_outgoing(grad)
            works = self.remote.push_pull(memory, self._changed_settings(), target.memory)
            self._last["pull"] = started = self._start(
                "push",
                works,
                lambda answers: self._delivered(answers, target),
                (thing, out, memory),
            )
            return started

    def pull(self, out: object) -> Operation:
        """Read in turn; a rank that takes no part in the clocks just looks."""
        if not self.is_worker:
            return self.peek(out)
        with self._mu:
            self._settle("pull", *(["push"] if self.spec.rule.takes_turns else []))
            target = self._target(out, "inbox", as_torch=self._as_torch)
            works = self.remote.pull_array(target.memory)
            return self._start("pull", works, lambda _: target.deliver(), (out, target))

    def peek(self, out: object) -> Operation:
        with self._peek_mu:
            self._settle("peek")
            target = self._target(out, "look", as_torch=self._as_torch)
            works = self.remote.peek(target.memory)
            return self._start("peek", works, lambda _: target.deliver(), (out, target))

    def _start(
        self, use: str, works: list[Work[Any]], finish: Callable[[list[Any]], Any], keep: object
    ) -> Operation:
        started = Operation(f"rank {self._rank}: {use} of {self.spec.name!r}", works, finish, keep)
        self._last[use] = started
        return started

    def _settle(self, *uses: str) -> None:
        errors = [self._last[use].settled() for use in uses if use in self._last]
        for error in errors:
            if error is not None:
                raise error

    # -- results ------------------------------------------------------------------------------

    def _receipt(self, answers: list[Any]) -> Receipt:
        replies = [answer for answer in answers if isinstance(answer, m.Reply)]
        notice = "; ".join(sorted({reply.notice for reply in replies} - {""}))
        if notice:
            warnings.warn(f"rank {self._rank}: key {self.spec.name!r}: {notice}", stacklevel=7)
        version = min(reply.version for reply in replies)
        return Receipt(version, max(reply.staleness for reply in replies), notice)

    def _delivered(self, answers: list[Any], target: _Target) -> Any:
        self._receipt(answers)
        return target.deliver()

    def _changed_settings(self) -> dict[str, Any] | None:
        if not self._is_changed:
            return None
        self._is_changed = False
        return {**self.spec.optimizer.groups[0], **self._settings}

    # -- arrays -------------------------------------------------------------------------------

    def _gradient(self, thing: object) -> Array:
        name, workers = self.spec.name, list(self.spec.workers)
        if not self.is_open:
            raise UsageError(
                f"rank {self._rank} pushes to key {name!r} before init({name!r}, ...): every rank"
                " that pushes calls it first, with the same shape, dtype and optimizer"
            )
        if not self.is_worker:
            raise UsageError(
                f"rank {self._rank} pushes to key {name!r}, whose workers are {workers}; name this"
                " rank in init(..., workers=...) on all ranks, or only pull"
            )
        return self._checked(thing, "gradient")

    def _checked(self, thing: object, what: str) -> Array:
        array = arrays.seen(thing, f"rank {self._rank}: the {what} for key {self.spec.name!r}")
        shape, dtype = arrays.shape_of(array), arrays.dtype_name(array)
        expected = f"rank {self._rank}: key {self.spec.name!r} has"
        if shape != self.spec.shape:
            raise ShapeMismatch(
                f"{expected} shape {list(self.spec.shape)}, but the {what} has {list(shape)}"
            )
        if dtype != self.spec.dtype:
            raise ShapeMismatch(
                f"{expected} dtype {self.spec.dtype}, but the {what} has {dtype}; convert it, for"
                f" example with .astype({self.spec.dtype!r})"
            )
        return array

    def _outgoing(self, array: Array) -> torch.Tensor:
        """Return memory from which servers can take the numbers: the array's own, or the outbox."""
        flat = arrays.flat(array)
        if flat is not None and self._is_usable(flat):
            return flat
        box = self._box("outbox")
        arrays.copy(box.view(self.spec.shape), array)
        return box

    def _healthy_outgoing(self, array: Array) -> torch.Tensor:
        """Like `_outgoing`; every server sees whether the numbers are finite.

        A server looks at its own part only. If the array is cut, a bad number makes all parts bad,
        so that all servers do the same: an update is never applied by half.
        """
        flat, starts = self._outgoing(array), self.remote.starts
        if self.spec.rule.nonfinite == "ignore" or len(starts) == 1 or is_finite(flat):
            return flat
        box = self._box("outbox")
        if box is not flat:
            box.copy_(flat)
        box[starts] = math.nan
        return box

    def _target(self, out: object, box: str, *, as_torch: bool) -> _Target:
        shape = self.spec.shape
        if out is None:
            memory = self._allocate()
            return _Target(memory, lambda: arrays.same_kind(memory.view(shape), as_torch=as_torch))
        array = self._checked(out, "output")
        arrays.require_writeable(array, f"rank {self._rank}: the output for {self.spec.name!r}")
        flat = arrays.flat(array)
        if flat is not None and self._is_usable(flat):
            return _Target(flat, lambda: out)
        memory = self._box(box)

        def deliver() -> object:
            arrays.copy(array, memory.view(shape))
            return out

        return _Target(memory, deliver)

    def _is_usable(self, flat: torch.Tensor) -> bool:
        if not self.remote.needs_engine_memory:
            return True
        try:
            self._engine.locate(flat.data_ptr(), flat.numel() * flat.element_size())
        except UsageError:
            return False
        return True

    def _box(self, use: str) -> torch.Tensor:
        if use not in self._boxes:
            self._boxes[use] = self._allocate()
        return self._boxes[use]

    def _allocate(self) -> torch.Tensor:
        size, dtype = math.prod(self.spec.shape), dtype_of(self.spec.dtype)
        if not self.remote.needs_engine_memory:
            return torch.empty(size, dtype=dtype)
        return allocate(self._engine, (size,), dtype)
