"""Reducer: follows a backward pass and has gradients exchanged while it still runs.

    hook of each parameter   its fresh gradient goes into its bucket
    bucket full              submitted to the exchange, strictly in bucket order
    end of backward          what is left is submitted; all are waited for; param.grad = the average

The order of buckets is the same on all workers, so nobody negotiates. A parameter that got no
gradient contributes zero; in the ROLL CALL, a small all-reduce behind the last bucket, each worker
says which parameters had one, so that a parameter that nobody used keeps `grad = None` everywhere.

When does a backward pass end? Autograd runs callbacks at the end of the pass in which they were
queued. Under reentrant checkpointing passes nest, and the first parameter may become ready in an
inner one; so the callback is queued by the first gradient of the model's outputs, which arrives in
the outermost pass, and by a parameter only if the script went round `model(...)`.

Threads: everything here runs on the thread that calls backward(); the engine's own thread moves the
data meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from paceline.collectives.group import Group
from paceline.data_parallel.bucket import Bucket, Slot
from paceline.data_parallel.exchange_spans import ExchangeSpans
from paceline.data_parallel.layout import Named
from paceline.data_parallel.policy import PassResult, StepPolicy
from paceline.data_parallel.sparse import SparseAverages
from paceline.data_parallel.weighting import Weighting
from paceline.elastic.session import Elastic
from paceline.errors import PacelineError, PeerError, UsageError
from paceline.pace.exchange import Exchange
from paceline.telemetry.trace import tracer
from paceline.work import Work

# The roll call ends with notes to all: is anybody asked to stop, is a change of the membership due,
# are this worker's gradients not finite (where an average would not show it), and how much does its
# batch weigh.
_NUM_NOTES = 4
_EVEN = 1e-4  # weights that are rounded, and not missing, add up to one by this much


class Reducer:
    """Averages the gradients of some parameters over the workers, during backward."""

    def __init__(
        self, group: Group, exchange: Exchange, elastic: Elastic, policy: StepPolicy
    ) -> None:
        self._group = group
        self._exchange = exchange
        self._elastic = elastic
        self._policy = policy
        self._traits = exchange.traits  # of the pass under way
        self._is_broken = False  # a worker was lost: what was submitted must be submitted again
        self._has_caught_up = False
        self._unit_stops = False
        self.result = PassResult()
        self.buckets: list[Bucket] = []
        self._slots: list[Slot] = []
        self._hooks: list[RemovableHandle] = []
        self.sparse = SparseAverages(group, keeps=policy.keeps_sparse)
        self._flags = torch.empty(0)
        self.weighting = Weighting()
        self._sync = True
        self._active = False  # inside a backward pass that exchanges gradients
        self._has_local_gradients = False  # the last backward pass was one without exchange
        self._next = 0  # the bucket to submit next
        self._works: list[Work[Any]] = []
        self._spans = ExchangeSpans(exchange)
        self.step = 0  # backward passes with exchange so far
        self.waited_s = 0.0  # time in which this worker did nothing but wait for others

    # -- which parameters ---------------------------------------------------------------------

    def add(self, buckets: Sequence[Bucket], sparse: Sequence[Named] = ()) -> None:
        """Take over the gradients of more parameters; between two backward passes only."""
        for bucket in buckets:
            self.buckets.append(bucket)
            for slot in bucket.slots:
                self._slots.append(slot)
                on_ready = self._on_small_ready if slot.is_small else self._on_grad_ready
                hook = slot.param.register_post_accumulate_grad_hook(partial(on_ready, slot))
                self._hooks.append(hook)
        for named in sparse:
            self.sparse.parameters.append(named)
            hook = named.param.register_post_accumulate_grad_hook(self._on_sparse_ready)
            self._hooks.append(hook)
        self._flags = torch.empty(len(self.params) + _NUM_NOTES)
        self.weighting.cover(self.params)

    def close(self) -> None:
        """Let go of the parameters; between two backward passes only."""
        for hook in self._hooks:
            hook.remove()
        self.weighting.close()

    @property
    def names(self) -> list[str]:
        """The parameters in the order of the roll call."""
        return [slot.name for slot in self._slots] + [n.name for n in self.sparse.parameters]

    @property
    def params(self) -> list[torch.nn.Parameter]:
        """The parameters in the order of the roll call."""
        return [slot.param for slot in self._slots] + [n.param for n in self.sparse.parameters]

    @property
    def frozen(self) -> set[str]:
        """The parameters that want no gradient (any more)."""
        pairs = zip(self.names, self.params, strict=True)
        return {name for name, param in pairs if not param.requires_grad}

    def averages(self) -> Iterator[torch.Tensor]:
        """The gradients that the workers agreed on in the last exchange, as flat tensors."""
        for bucket in self.buckets:
            yield bucket.averaged
        for named in self.sparse.parameters:
            grad = named.param.grad
            if grad is not None:
                yield grad.coalesce().values() if grad.is_sparse else grad

    def refresh(self) -> None:
        """Look again which parameters want a gradient; between two backward passes only."""
        for bucket in self.buckets:
            bucket.refresh()

    @property
    def is_syncing(self) -> bool:
        """Whether a backward pass that began now would exchange gradients."""
        return self._sync

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients add up locally; the next backward pass outside exchanges the sum."""
        was, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = was

    @property
    def rests(self) -> bool:
        """Whether a backward pass that began now would exchange nothing, as the pace says."""
        return self._exchange.traits.is_local

    # -- during backward ----------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Note that a backward pass has begun; called from inside of it, any number of times."""
        if not self._active and self._sync:
            self._begin()
            Variable._execution_engine.queue_callback(self._on_backward_end)

    def _begin(self) -> None:
        self._active = True
        self._traits = self._exchange.traits

    def _on_small_ready(self, slot: Slot, param: torch.nn.Parameter) -> None:
        """Do the same as below in a fraction of the time, for the most frequent case."""
        bucket = slot.bucket
        if not self._active or slot.ready or bucket.is_submitted or torch.is_grad_enabled():
            self._on_grad_ready(slot, param)
            return
        slot.ready = slot.stale = True
        bucket.missing -= 1
        if bucket.missing == 0:
            self._submit_full()

    def _on_grad_ready(self, slot: Slot, param: torch.nn.Parameter) -> None:
        if not self._sync:
            self._has_local_gradients = True
            return
        self.begin_backward()
        grad = param.grad
        assert grad is not None
        if grad.requires_grad:
            raise _double_backward(slot.name)
        bucket = slot.bucket
        if bucket.is_submitted:
            raise UsageError(
                f"rank {self._group.rank}: {slot.name} got another gradient after its bucket was"
                " sent; it is used in several reentrant checkpoints: use"
                " checkpoint(..., use_reentrant=False)"
            )
        if grad.layout is not torch.strided:
            param.grad = grad.to_dense()
        bucket.take(slot)
        if bucket.missing == 0:
            self._submit_full()

    def _on_sparse_ready(self, param: torch.nn.Parameter) -> None:
        if not self._sync:
            self._has_local_gradients = True
            return
        self.begin_backward()
        if param.grad is not None and param.grad.requires_grad:
            raise _double_backward(next(n.name for n in self.sparse.parameters if n.param is param))

    def _submit_full(self) -> None:
        while self._next < len(self.buckets) and self.buckets[self._next].missing == 0:
            bucket = self.buckets[self._next]
            bucket.flush()
            self._submit(bucket)
            self._next += 1

    def _submit(self, bucket: Bucket) -> None:
        bucket.is_submitted = True
        if self._is_broken or self._traits.is_local:
            return
        try:
            self._start(bucket)
        except PeerError:
            if not self._elastic.is_on:
                raise
            self._is_broken = True  # an error here would end backward: all is sent again behind it

    def _start(self, bucket: Bucket) -> None:
        traced_s = tracer.start()
        self._works.append(self._exchange.submit(bucket, self.step))
        if traced_s:
            self._spans.submitted(bucket, self._works[-1], traced_s)

    # -- end of backward ----------------------------------------------------------------------

    def exchange_now(self) -> None:
        """Exchange what has added up locally, outside of any backward pass."""
        self._begin()
        self._end_pass()

    def _on_backward_end(self) -> None:
        if not self._active:
            return
        if not self._touched() and not self._policy.skips_backward():
            self._active = False  # gradients of something else flowed through the model's outputs
            return
        self._end_pass()

    def _touched(self) -> bool:
        return (
            self._next > 0
            or any(slot.ready for slot in self._slots)
            or any(named.param.grad is not None for named in self.sparse.parameters)
        )

    def _end_pass(self) -> None:
        for bucket in self.buckets[self._next :]:
            bucket.complete()
            self._submit(bucket)
        if self._traits.is_local:
            for slot in self._slots:
                slot.param.grad = slot.grad if slot.ready else None
            self.result = PassResult(is_own=True)
            self._reset()
            return
        self._has_caught_up = self._unit_stops = False
        if not self._elastic.is_on:
            start = time.perf_counter()
            (self._unit_stops,) = self._policy.ask_unit([self._policy.wants_stop()])
            self.waited_s += time.perf_counter() - start
        self.result = self._exchange_all()
        for slot, share in zip(self._slots, self.result.shares, strict=False):
            slot.param.grad = slot.averaged if share else None
        self._reset()
        self._policy.after_exchange(self.result)

    def _exchange_all(self) -> PassResult:
        """Exchange everything with the others, as the pace says."""
        absent = self._absent()
        if self._traits.is_collective:
            called = self._elastic.point(lambda: self._agree(absent), self._catch_up)
            self._is_broken = False
            stops, changes, hidden, _ = called[-_NUM_NOTES:]
            return PassResult(
                has_caught_up=self._has_caught_up,
                unit_stops=self._unit_stops,
                is_stop_agreed=stops > 0,
                is_change_agreed=changes > 0 and not self._has_caught_up,
                has_hidden_nonfinite=hidden > 0,
                shares=called[:-_NUM_NOTES],
                absent=absent,
            )
        shares = self._call_roll(absent)[:-_NUM_NOTES]  # servers decide who has to be there
        if self.sparse.parameters:
            self._elastic.point(lambda: self._average_sparse(shares))
        stops = self._unit_stops or (self._elastic.is_on and self._policy.wants_stop())
        return PassResult(
            unit_stops=self._unit_stops, is_stop_agreed=stops, shares=shares, absent=absent
        )

    def _agree(self, absent: frozenset[str]) -> list[float]:
        """Average everything with the others; again from the start if somebody was lost."""
        if self._is_broken:
            self._works.clear()
            self._spans.dropped()
            for bucket in self.buckets:
                self._start(bucket)
        self._is_broken = self._elastic.is_on  # until everything is there, and counts
        called = self._call_roll(absent)
        self._average_sparse(called[:-_NUM_NOTES])
        start = time.perf_counter()
        self._policy.beside_exchange()
        self.waited_s += time.perf_counter() - start
        weight = called[-1]
        is_uneven = weight > 0 and abs(weight - 1.0) > _EVEN
        if self._elastic.is_on and self._traits.is_weighted and is_uneven:
            for flat in self.averages():  # weights of workers that are lost are missing
                flat.div_(weight)
        return called

    def _catch_up(self) -> None:
        self._is_broken = False
        self._has_caught_up = True

    def _absent(self) -> frozenset[str]:
        """Return the parameters that have no gradient on this worker."""
        return frozenset(
            [slot.name for slot in self._slots if not slot.ready]
            + [n.name for n in self.sparse.parameters if n.param.grad is None]
        )

    def _call_roll(self, absent: frozenset[str]) -> list[float]:
        """Ask which workers had gradients for what, and wait until all buckets are there."""
        flags, elastic = self._flags, self._elastic
        flags.fill_(1.0)
        if absent:
            flags[:-_NUM_NOTES] = torch.tensor([name not in absent for name in self.names])
        # In an elastic job a unit has told each other behind the last point (elastic/unit.py).
        flags[-_NUM_NOTES:] = torch.tensor(
            [
                float(elastic.is_stop_due if elastic.is_on else self._unit_stops),
                float(elastic.is_change_due),
                float(
                    self._traits.hides_nonfinite and self._policy.has_hidden_nonfinite(self.buckets)
                ),
                self.weighting.weight,
            ]
        )
        start, traced_s = time.perf_counter(), tracer.start()
        if traced_s:
            self._spans.wait(self._works)
        called = self._exchange.call_roll(flags)
        for work in self._works:
            work.wait()
        self.waited_s += time.perf_counter() - start
        if traced_s:
            self._spans.ended(traced_s)
        return called.tolist()

    def _average_sparse(self, shares: Sequence[float]) -> None:
        if self.sparse.parameters:
            start = time.perf_counter()
            self.sparse.average(shares[len(self._slots) :])
            self.waited_s += time.perf_counter() - start

    def _reset(self) -> None:
        self._works.clear()
        self._next = 0
        self._active = False
        self._has_local_gradients = False
        self.step += 1
        for bucket in self.buckets:
            bucket.begin()

    # -- before a step, before a forward pass -------------------------------------------------

    def take_result(self) -> PassResult:
        """Return the result of the last pass, for the step that uses it.

        What concerns that step alone, a later step without a backward pass does not see.
        """
        result = self.result
        if result.has_caught_up or result.is_change_agreed:
            self.result = replace(result, has_caught_up=False, is_change_agreed=False)
        return result

    def require_finished(self) -> None:
        """Called before a step: refuse gradients that have not been averaged."""
        if self._active:
            raise PacelineError(
                f"rank {self._group.rank}: optimizer.step() after a backward pass that ended with"
                " an error (or in the middle of one): gradients have not been averaged; drop them"
                " with zero_grad() and begin again with a forward pass of the whole model"
            )
        if self._has_local_gradients:
            raise UsageError(
                f"rank {self._group.rank}: optimizer.step() after a backward pass under no_sync():"
                " its gradients have not been averaged; leave no_sync() for the last backward pass"
                " before each step"
            )

    def require_clean(self) -> None:
        """Called outside of backward: find out whether the last pass broke off."""
        if not self._active or torch._C._current_graph_task_id() != -1:
            return
        if self._works:
            raise PacelineError(
                f"rank {self._group.rank}: the last backward pass ended with an error after it had"
                " sent gradients, so the workers are out of step; start again from a checkpoint"
            )
        self._active = False
        self.refresh()


def _double_backward(name: str) -> UsageError:
    return UsageError(
        f"backward(create_graph=True): the gradient of {name} has a graph of its own, which cannot"
        " be averaged over the workers; compute inner gradients with torch.autograd.grad(...) and"
        " call backward() without create_graph"
    )
