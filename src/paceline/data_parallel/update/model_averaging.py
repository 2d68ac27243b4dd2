"""optimizer.step() where a method (pace/method.py) says how the workers agree.

    before_step -> the optimizer's own step -> after_step -> as often as the method is due: meet

A meeting is a point of training (runtime/elastic/session.py): repeated among whoever is left until
it succeeds, and only then put to use. With it the workers agree on buffers, on stopping and on
changes of the membership; in between nobody hears of anybody. What was computed since the last
meeting counts when the next one has succeeded.

Where what a meeting needs is sent some steps before it, so is what the workers agree on: else a
message of a few bytes, for which all wait for all, would queue behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch

from paceline.comm.group import Group
from paceline.data_parallel.model_state.buffers import Buffers
from paceline.data_parallel.reducer import Reducer
from paceline.data_parallel.update.step import Step
from paceline.errors import UsageError
from paceline.observe.telemetry.trace import Stopwatch, tracer
from paceline.pace.method import Method, Setting
from paceline.pace.registry import find
from paceline.runtime.job import Job
from paceline.runtime.work import Work


def make_method(setting: Setting) -> Method | None:
    """Make what runs a pace; None when training itself does."""
    row = find(setting.pace.name)
    if row is None or not row.method:
        return None
    kind: Any = row.method
    if isinstance(kind, str):
        module, _, name = kind.partition(":")
        kind = getattr(import_module(module), name, None)
    if not (isinstance(kind, type) and issubclass(kind, Method)):
        raise UsageError(f"pace {setting.pace}: {row.method} is not a Method; see CONTRIBUTING.md")
    return kind(setting)


class Paced:
    """Runs the steps of one model."""

    def __init__(
        self, job: Job, method: Method, reducer: Reducer, buffers: Buffers, group: Group
    ) -> None:
        self.name = method.describe()
        self._job = job
        self._method = method
        self._reducer = reducer
        self._buffers = buffers
        self._is_late = False
        self._flags = torch.zeros(2)
        self._early: Work[Any] | None = None  # carries the flags of the next meeting
        self._group = group
        self._waiting, self._waited_s = Stopwatch(), 0.0

    def run(self, step: Step, count: Callable[[float], None]) -> Any:
        """Run a step, and the meetings behind it; `count` counts it, and the seconds of waiting
        for others in both."""
        job, method = self._job, self._method
        if method.is_free:
            return self._run_alone(step, count)
        passed = self._reducer.take_result()
        is_together = not passed.is_own  # gradients of this step were averaged
        was_late = is_together and passed.has_caught_up
        result = None if was_late else self._step(step, is_together)
        stops, changes = passed.is_stop_agreed, passed.is_change_agreed  # neither if it is_own
        has_met = is_together
        while method.is_due:
            flags = self._meet_once()
            has_met, was_late = True, was_late or self._is_late
            stops, changes = stops or flags[0] > 0, flags[1] > 0 and not self._is_late
        if has_met:
            job.contribution.commit()
            job.stopping.hear(stops)
        if not was_late:  # else those who were further have counted it
            count(self._waited_lately())
        if has_met:
            job.elastic.boundary(agreed=changes)
        return result

    def _run_alone(self, step: Step, count: Callable[[float], None]) -> Any:
        """Run a step of a method whose workers never meet."""
        result = self._step(step, is_together=False)
        self._job.contribution.commit()
        self._job.stopping.hear(self._job.stopping.is_wanted())
        count(self._waited_lately())
        self._job.elastic.boundary(agreed=False)
        return result

    def _step(self, step: Step, is_together: bool) -> Any:
        brings_buffers = is_together and not self._job.elastic.is_on
        if brings_buffers:
            self._buffers.start()
        self._before_step()
        result = step()
        self._method.steps += 1
        self._method.after_step()
        if self._early is None and self._method.is_under_way and not self._job.elastic.is_on:
            self._early = self._send_flags()
        if brings_buffers:
            with self._waiting:
                self._buffers.finish()
        if self._reducer.rests:  # from now on a batch weighs nothing in particular
            self._reducer.weighting.set(1.0)
        return result

    def _before_step(self) -> None:
        if not self._method.is_free:
            self._method.before_step()
            return
        with self._waiting:  # who never meets the others asks servers here, if anywhere
            self._method.before_step()

    def _waited_lately(self) -> float:
        """Return the seconds of waiting since the last call."""
        before, self._waited_s = self._waited_s, self._waiting.seconds
        return self._waited_s - before

    def finish(self) -> None:
        """Meet for the last time. Collective."""
        method = self._method
        if not self._reducer.rests:
            return  # gradients are averaged, so that parameters are the same at any time
        method.is_last = True
        while method.is_due:
            self._meet_once()

    def gather(self) -> list[torch.Tensor]:
        """Return the values of all buckets that stand for all workers. Collective; nothing changes.

        Nothing: all have the same anyway.
        """
        if not self._reducer.rests:
            return []
        return [self._method.agreed(bucket) for bucket in self._reducer.buckets]

    def _meet_once(self) -> list[float]:
        self._is_late = False
        with self._waiting:
            traced_s = tracer.start()
            flags = self._job.elastic.point(self._meet, self._be_late)
            if traced_s:
                tracer.add("meet", traced_s, round=self._method.rounds)
        if not self._is_late:
            self._method.conclude()
            self._method.rounds += 1
        return flags

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Let the model have the values that stand for all workers, for a while. Collective."""
        if self._method.shares_params:  # they are the same anyway, as soon as nobody writes
            self._group.barrier()
            yield
            self._group.barrier()
            return
        own = [(bucket, bucket.params.clone()) for bucket in self._reducer.buckets]
        for bucket, _ in own:
            bucket.params.copy_(self._method.agreed(bucket))
        try:
            yield
        finally:
            for bucket, values in own:
                bucket.params.copy_(values)

    def _be_late(self) -> None:
        """The others have met without us: we have their state, in which it is concluded."""
        self._is_late = True

    def _meet(self) -> list[float]:
        self._method.meet()
        if self._method.steps % self._method.agrees_every and not self._job.elastic.is_on:
            return [0.0, 0.0]
        self._buffers.synchronise()
        work, self._early = self._early or self._send_flags(), None
        work.wait()
        return self._flags.tolist()

    def _send_flags(self) -> Work[Any]:
        self._flags[0] = float(self._job.elastic.is_stop_due)
        self._flags[1] = float(self._job.elastic.is_change_due)
        work = self._group.all_reduce(self._flags, "max", async_op=True)
        assert isinstance(work, Work)
        return work
