"""optimizer.step() after which the workers agree: elastic jobs, and averaging methods.

ElasticStep: workers may be lost or join. Buffers have been exchanged with the gradients (a
retryable step, runtime/elastic/session.py), so the step itself is this worker's own. After it all
may change the membership together: with the used-parameter mask they have agreed whether a change
is due. Through servers there is no such exchange; a small one of its own asks.

MethodStep: a method (pace/method.py) decides how the workers agree.

    before_step -> the optimizer's own step -> after_step -> while a round is due: run_round

A round of the method is a retryable step: repeated among the workers that are left until it
succeeds, and only then applied. With it the workers agree on buffers, on stopping and on changes of
the membership; in between they do not communicate. What was computed since the last round counts
when the next one has succeeded. Where data of a round is sent some steps before it, so are the
flags on which the workers agree: otherwise a message of a few bytes, for which all wait, would
queue after that data.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from paceline.comm.group import Group
from paceline.data_parallel.bucket import Bucket
from paceline.data_parallel.model_state.buffers import Buffers
from paceline.data_parallel.reducer import Reducer
from paceline.data_parallel.update.elastic_sharding import ElasticShardedUpdate
from paceline.data_parallel.update.step import Step, Update
from paceline.observe.telemetry.trace import Stopwatch, tracer
from paceline.pace.method import Method
from paceline.pace.through_host.exchange import HostBuckets
from paceline.runtime.job import Job
from paceline.runtime.work import Work

Count = Callable[[float], None]  # counts a step, and the seconds of waiting after it


class _Flags:
    """Two flags that all workers combine: does one of them stop, is a membership change due?"""

    def __init__(self, job: Job, group: Group) -> None:
        self._elastic, self._group = job.elastic, group
        self._flags = torch.zeros(2)

    def send(self) -> Work[Any]:
        """Start the exchange. Collective."""
        self._flags[0] = float(self._elastic.is_stop_due)
        self._flags[1] = float(self._elastic.is_change_due)
        work = self._group.all_reduce(self._flags, "max", async_op=True)
        assert isinstance(work, Work)
        return work

    def receive(self, work: Work[Any]) -> tuple[bool, bool]:
        """Wait for it; return whether to stop, and whether to change the membership."""
        work.wait()
        stops, changes = self._flags.tolist()
        return stops > 0, changes > 0


class ElasticStep:
    """Runs the steps of one model in an elastic job."""

    def __init__(
        self,
        job: Job,
        optimizer: torch.optim.Optimizer,
        reducer: Reducer,
        buffers: Buffers,
        group: Group,
        *,
        is_served: bool,
        resize_lr: str,
    ) -> None:
        self._job = job
        self._optimizer = weakref.ref(optimizer)
        self._reducer = reducer
        self._buffers = buffers
        self._resize_lr = resize_lr
        self._asks = is_served and job.elastic.is_lockstep
        self._flags = _Flags(job, group)

    def run(self, update: Update, step: Step, count: Count) -> Any:
        """Run the update; call `count`, unless other workers have counted the step already."""
        if isinstance(update, ElasticShardedUpdate):
            return self._run_sharded(update, step, count)
        job, result = self._job, None
        passed = self._reducer.take_result()
        if not passed.has_caught_up:  # else the state that was received has this step in it
            result = self._run_resized(update, step)
        job.contribution.commit()
        late: list[bool] = []  # this worker has received the result of the agreement instead
        start_s = time.perf_counter()
        is_stop_agreed, is_change_agreed = passed.is_stop_agreed, passed.is_change_agreed
        if self._asks:
            is_stop_agreed, changes = job.elastic.run_step(self._agree, lambda: late.append(True))
            is_change_agreed = changes and not late
        if not (passed.has_caught_up or late):  # else the workers ahead of this one counted it
            count(time.perf_counter() - start_s if self._asks else 0.0)
        job.stopping.note_agreement(is_stop_agreed)
        job.elastic.enter_due_generation(agreed=is_change_agreed)
        return result

    def _run_sharded(self, update: ElasticShardedUpdate, step: Step, count: Count) -> Any:
        """Run an update that is a retryable step of its own.

        The samples count before it: a worker that has the averages finishes the step in any case.
        """
        job, result = self._job, None
        passed = self._reducer.take_result()
        job.contribution.commit()
        is_change_agreed = False
        if not passed.has_caught_up:  # else the state that was received has this step in it
            result = self._run_resized(update, step)
            is_change_agreed = update.is_change_agreed
            if not update.was_late:  # else it is counted in the state that was received
                count(0.0)
        job.stopping.note_agreement(passed.is_stop_agreed)
        job.elastic.enter_due_generation(agreed=is_change_agreed)
        return result

    def _run_resized(self, update: Update, step: Step) -> Any:
        """Run the update, with learning rates that follow the number of workers if requested."""
        optimizer = self._optimizer()
        if self._resize_lr == "keep" or optimizer is None:
            return update.run(step)
        share = self._job.world.size / self._job.env.world_size
        factor = share if self._resize_lr == "linear" else math.sqrt(share)
        rates = [group["lr"] for group in optimizer.param_groups]
        try:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
            return update.run(step)
        finally:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate

    def _agree(self) -> tuple[bool, bool]:
        """Exchange buffers and flags; return the flags.

        One retryable step for each optimizer step: the first step of a newcomer is then the one
        that the others are in.
        """
        self._buffers.synchronise()
        return self._flags.receive(self._flags.send())


class MethodStep:
    """Runs the steps of one model at an averaging method."""

    def __init__(
        self,
        job: Job,
        method: Method,
        reducer: Reducer,
        buffers: Buffers,
        group: Group,
        hosts: HostBuckets | None = None,  # what the method sees of parameters on a device
    ) -> None:
        self.name = method.describe()
        self._hosts = hosts
        self._job = job
        self._method = method
        self._reducer = reducer
        self._buffers = buffers
        self._group = group
        self._is_late = False
        self._flags = _Flags(job, group)
        self._early: Work[Any] | None = None  # carries the flags of the next round
        self._waiting, self._waited_s = Stopwatch(), 0.0

    def run(self, step: Step, count: Count) -> Any:
        """Run a step and the rounds after it; `count` gets the seconds of waiting in both."""
        job, method = self._job, self._method
        if method.is_free:
            return self._run_alone(step, count)
        passed = self._reducer.take_result()
        is_together = not passed.is_own  # gradients of this step were averaged
        was_late = is_together and passed.has_caught_up
        result = None if was_late else self._step(step, is_together)
        stops, changes = passed.is_stop_agreed, passed.is_change_agreed  # neither if it is_own
        had_round = is_together
        while method.is_due:
            stops_now, changes = self._run_round()
            had_round, was_late = True, was_late or self._is_late
            stops, changes = stops or stops_now, changes and not self._is_late
        if had_round:
            job.contribution.commit()
            job.stopping.note_agreement(stops)
        if not was_late:  # else the workers ahead of this one counted it
            count(self._waited_lately())
        if had_round:
            job.elastic.enter_due_generation(agreed=changes)
        return result

    def _run_alone(self, step: Step, count: Count) -> Any:
        """Run a step of a method without rounds."""
        result = self._step(step, is_together=False)
        self._job.contribution.commit()
        self._job.stopping.note_agreement(self._job.stopping.is_wanted())
        count(self._waited_lately())
        self._job.elastic.enter_due_generation(agreed=False)
        return result

    def _step(self, step: Step, is_together: bool) -> Any:
        brings_buffers = is_together and not self._job.elastic.is_on
        if brings_buffers:
            self._buffers.start()
        with self._host_values():
            self._before_step()
        result = step()
        self._method.steps += 1
        with self._host_values():
            self._method.after_step()
        if self._early is None and self._method.is_under_way and not self._job.elastic.is_on:
            self._early = self._flags.send()
        if brings_buffers:
            with self._waiting:
                self._buffers.finish()
        if self._reducer.is_local:  # from now on all batches have the same weight
            self._reducer.weighting.set(1.0)
        return result

    @contextmanager
    def _host_values(self, *, is_round: bool = False) -> Iterator[None]:
        """Let a method inside the block see the parameters of the device, and change them."""
        if self._hosts is None:
            yield
            return
        self._hosts.expire()
        yield
        self._hosts.write_back(may_be_unseen=is_round)

    def _before_step(self) -> None:
        if not self._method.is_free:
            self._method.before_step()
            return
        with self._waiting:  # a method without rounds waits for servers here, if at all
            self._method.before_step()

    def _waited_lately(self) -> float:
        """Return the seconds of waiting since the last call."""
        before, self._waited_s = self._waited_s, self._waiting.seconds
        return self._waited_s - before

    def finish(self) -> None:
        """Run the last round. Collective."""
        method = self._method
        if not self._reducer.is_local:
            return  # gradients are averaged, so that parameters are the same at any time
        method.is_last = True
        while method.is_due:
            self._run_round()

    def gather(self) -> list[torch.Tensor]:
        """Return the agreed values of all buckets. Collective; nothing changes.

        Empty if all workers have the same values anyway.
        """
        if not self._reducer.is_local:
            return []
        with self._host_values():
            return [self._agreed(bucket) for bucket in self._reducer.buckets]

    def _agreed(self, bucket: Bucket) -> torch.Tensor:
        return self._method.agreed(bucket if self._hosts is None else self._hosts.of(bucket))

    def _run_round(self) -> tuple[bool, bool]:
        self._is_late = False
        with self._host_values(is_round=True):
            with self._waiting:
                traced_s = tracer.start()
                flags = self._job.elastic.run_step(self._exchange_round, self._be_late)
                if traced_s:
                    tracer.add("exchange round", traced_s, round=self._method.rounds)
            if not self._is_late:
                self._method.apply_round()
                self._method.rounds += 1
        return flags

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Let the model have the agreed values inside the block. Collective."""
        if self._method.shares_params:  # the same memory; wait until no worker writes to it
            self._group.barrier()
            yield
            self._group.barrier()
            return
        own = [(bucket, bucket.params.clone()) for bucket in self._reducer.buckets]
        with self._host_values():
            for bucket, _ in own:
                bucket.params.copy_(self._agreed(bucket))
        try:
            yield
        finally:
            for bucket, values in own:
                bucket.params.copy_(values)

    def _be_late(self) -> None:
        """The other workers ended the round without this one, which received their state."""
        self._is_late = True
        if self._hosts is not None:
            self._hosts.expire()

    def _exchange_round(self) -> tuple[bool, bool]:
        self._method.run_round()
        if self._method.steps % self._method.agrees_every and not self._job.elastic.is_on:
            return False, False
        self._buffers.synchronise()
        work, self._early = self._early or self._flags.send(), None
        return self._flags.receive(work)
