"""Reducer: follows a backward pass and exchanges gradients while it still runs.

    hook of each parameter   its fresh gradient is put into its bucket
    bucket full              submitted to the exchange, strictly in bucket order
    end of backward          the rest is submitted; wait for all; param.grad = the average

The order of buckets is the same on all workers, so it needs no negotiation. A parameter without a
gradient contributes zero. After the last bucket the workers all-reduce the USED-PARAMETER MASK:
a parameter that no worker used keeps `grad = None` everywhere.

Autograd runs callbacks at the end of the pass in which they were queued. With reentrant
checkpointing passes nest, and a parameter may become ready in an inner one. So the first gradient
of the model's outputs queues the callback; a parameter only if `model(...)` was not called.

Threads: the thread that calls backward(); for parameters on a device autograd's thread for that
device, on the streams of their forward pass. The engine's thread moves data.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from paceline.comm.group import Group
from paceline.data_parallel.bucket import Bucket, NamedParameter, ParamSlot
from paceline.data_parallel.checks import gradients as refusals
from paceline.data_parallel.exchange_spans import ExchangeSpans
from paceline.data_parallel.policy import PassResult, StepPolicy
from paceline.data_parallel.sparse import SparseAverages
from paceline.data_parallel.weighting import Weighting
from paceline.errors import PeerError
from paceline.observe.telemetry.trace import tracer
from paceline.pace.exchange import Exchange
from paceline.runtime.elastic.session import ElasticSession
from paceline.runtime.work import Handle

# The mask ends with notes to all: is this worker asked to stop, is a membership change due, are its
# gradients not finite (where an average would not show it), and what is the weight of its batch.
_NUM_NOTES = 4
_EVEN = 1e-4  # rounding of weights: their mean differs from one by less, unless some are missing


class Reducer:
    """Averages the gradients of some parameters over the workers, during backward."""

    def __init__(
        self, group: Group, exchange: Exchange, elastic: ElasticSession, policy: StepPolicy
    ) -> None:
        self._group = group
        self._exchange = exchange
        self._elastic = elastic
        self._policy = policy
        self._traits = exchange.traits  # for the current pass
        self._is_closed = False  # by pl.shutdown()
        self._is_broken = False  # a worker was lost: what was submitted must be submitted again
        self._has_caught_up = False
        self._unit_stops = False
        self.result = PassResult()
        self.names: list[str] = []  # of the parameters, in the order of the mask
        self.params: list[torch.nn.Parameter] = []  # in the same order
        self.buckets: list[Bucket] = []
        self._slots: list[ParamSlot] = []
        self._results: list[tuple[torch.nn.Parameter, torch.Tensor]] = []  # the same, in order
        self._hooks: list[RemovableHandle] = []
        self.sparse = SparseAverages(group, keeps=policy.keeps_sparse)
        self._flags = torch.empty(0)
        self.weighting = Weighting()
        self.is_syncing = True  # a backward pass that began now would exchange gradients
        self._active = False  # inside a backward pass that exchanges gradients
        self._has_local_gradients = False  # the last backward pass was one without exchange
        self._lock = threading.RLock()  # hooks run on several threads if there is a device
        self._next = 0  # number of the next bucket to submit; guarded by: _lock
        self._works: list[Handle] = []
        self._spans = ExchangeSpans(exchange)
        self.step = 0  # number of backward passes with exchange so far
        self.waited_s = 0.0  # time that this worker spent only waiting for others

    # -- which parameters ---------------------------------------------------------------------

    def add(self, buckets: Sequence[Bucket], sparse: Sequence[NamedParameter] = ()) -> None:
        """Manage the gradients of more parameters; between two backward passes only."""
        for bucket in buckets:
            self.buckets.append(bucket)
            for slot in bucket.slots:
                self._slots.append(slot)
                hook = slot.param.register_post_accumulate_grad_hook(self._hook_of(slot))
                self._hooks.append(hook)
                self._results.append((slot.param, slot.averaged))
        for named in sparse:
            self.sparse.parameters.append(named)
            on_ready = partial(self._on_sparse_ready, named)
            self._hooks.append(named.param.register_post_accumulate_grad_hook(on_ready))
        all_sparse = self.sparse.parameters
        self.names = [slot.name for slot in self._slots] + [named.name for named in all_sparse]
        self.params = [slot.param for slot in self._slots] + [named.param for named in all_sparse]
        self._flags = torch.empty(len(self.params) + _NUM_NOTES)
        self.weighting.cover(self.params)

    def close(self) -> None:
        """Remove all hooks, for good; between two backward passes only."""
        self._is_closed = True
        for hook in self._hooks:
            hook.remove()
        self.weighting.close()

    def averages(self) -> Iterator[torch.Tensor]:
        """Yield the gradients that the workers agreed on in the last exchange, as flat tensors."""
        for bucket in self.buckets:
            yield bucket.averaged
        for named in self.sparse.parameters:
            grad = named.param.grad
            if grad is not None:
                yield grad.coalesce().values() if grad.is_sparse else grad

    def refresh(self) -> None:
        """Check again which parameters require a gradient; between two backward passes only."""
        for bucket in self.buckets:
            bucket.refresh()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally; the next backward pass outside exchanges the sum."""
        was, self.is_syncing = self.is_syncing, False
        try:
            yield
        finally:
            self.is_syncing = was

    @property
    def is_local(self) -> bool:
        """Whether the next backward pass would exchange nothing, at this pace."""
        return self._exchange.traits.is_local

    # -- during backward ----------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Begin a backward pass, unless it has begun; mask inside it, any number of times."""
        if self._active or not self.is_syncing:
            return
        with self._lock:
            if not self._active:
                self._begin()
                Variable._execution_engine.queue_callback(self._on_backward_end)

    def _begin(self) -> None:
        self._active = True
        self._traits = self._exchange.traits
        is_plain = not torch.is_grad_enabled()  # gradients have no graph of their own
        for bucket in self.buckets:
            bucket.is_open = is_plain
            if bucket.streams is not None:
                bucket.streams.refuse_capture(self._group.rank)

    def _hook_of(self, slot: ParamSlot) -> Callable[[torch.nn.Parameter], None]:
        return slot.make_hook(self._on_grad_ready, self._submit_full)

    def _is_exchanged(self) -> bool:
        """Return whether a gradient that has just arrived is exchanged in this pass."""
        if self.is_syncing:
            self.begin_backward()
        else:
            self._has_local_gradients = True
        return self.is_syncing

    def _on_grad_ready(self, slot: ParamSlot, param: torch.nn.Parameter) -> None:
        if not self._is_exchanged():
            return
        grad = param.grad
        assert grad is not None
        if grad.requires_grad:
            raise refusals.double_backward(slot.name)
        bucket = slot.bucket
        if bucket.is_submitted:
            raise refusals.second_gradient(self._group.rank, slot.name)
        if grad.layout is not torch.strided:
            param.grad = grad.to_dense()
        bucket.take(slot)
        if bucket.missing == 0:
            self._submit_full()

    def _on_sparse_ready(self, named: NamedParameter, param: torch.nn.Parameter) -> None:
        if self._is_exchanged() and param.grad is not None and param.grad.requires_grad:
            raise refusals.double_backward(named.name)

    def _submit_full(self) -> None:
        with self._lock:
            while self._next < len(self.buckets) and self.buckets[self._next].missing == 0:
                bucket = self.buckets[self._next]
                bucket.join_streams()
                bucket.flush()
                self._submit(bucket)
                self._next += 1

    def _submit(self, bucket: Bucket) -> None:
        bucket.is_submitted, bucket.is_open = True, False
        if self._is_broken or self._traits.is_local:
            return
        try:
            self._start(bucket)
        except PeerError:
            if not self._elastic.is_on:
                raise
            self._is_broken = True  # an error here would end backward: all is sent again after it

    def _start(self, bucket: Bucket) -> None:
        start_s = time.monotonic() if tracer.on else 0.0
        self._works.append(self._exchange.submit(bucket, self.step))
        if start_s:
            self._spans.submitted(bucket, self._works[-1], start_s)

    # -- end of backward ----------------------------------------------------------------------

    def exchange_now(self) -> None:
        """Exchange what has been accumulated locally, outside of any backward pass."""
        if self._is_closed:
            raise refusals.left_job(self._group.rank)
        self._begin()
        self._end_pass()

    def _on_backward_end(self) -> None:
        if not self._active:
            return
        if not self._has_gradients() and not self._policy.skips_backward():
            self._active = False  # other gradients flowed through the model's outputs
            return
        self._end_pass()

    def _has_gradients(self) -> bool:
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
        if self.result.is_complete:
            for param, averaged in self._results:
                param.grad = averaged
        else:
            for (param, averaged), share in zip(self._results, self.result.shares, strict=False):
                param.grad = averaged if share else None
        self._reset()
        self._policy.after_exchange(self.result)

    def _exchange_all(self) -> PassResult:
        """Exchange everything, as the pace requires."""
        absent, elastic = self._absent(), self._elastic
        if self._traits.is_collective:
            attempt = partial(self._agree, absent)
            mask = elastic.run_step(attempt, self._catch_up) if elastic.is_on else attempt()
            self._is_broken = False
            stops, changes, hidden = (note > 0 for note in mask[-_NUM_NOTES:-1])
        else:  # servers decide which workers they wait for
            mask = self._exchange_mask(absent)
            if self.sparse.parameters:
                elastic.run_step(lambda: self._average_sparse(mask[:-_NUM_NOTES]))
            stops = self._unit_stops or (elastic.is_on and self._policy.wants_stop())
            changes = hidden = False
        shares = mask[:-_NUM_NOTES]
        return PassResult(
            has_caught_up=self._has_caught_up,
            unit_stops=self._unit_stops,
            is_stop_agreed=stops,
            is_change_agreed=changes and not self._has_caught_up,
            has_hidden_nonfinite=hidden,
            is_complete=min(shares, default=1.0) >= 1.0,
            shares=shares,
            absent=absent,
        )

    def _agree(self, absent: frozenset[str]) -> list[float]:
        """Average everything; start again if a worker was lost."""
        if self._is_broken:
            self._works.clear()
            self._spans.dropped()
            for bucket in self.buckets:
                self._start(bucket)
        self._is_broken = self._elastic.is_on  # until everything has arrived, and counts
        mask = self._exchange_mask(absent)
        self._average_sparse(mask[:-_NUM_NOTES])
        if self._elastic.is_on:
            start = time.perf_counter()
            self._policy.during_exchange()
            self.waited_s += time.perf_counter() - start
            weight = mask[-1]
            is_uneven = weight > 0 and abs(weight - 1.0) > _EVEN
            if self._traits.is_weighted and is_uneven:
                for flat in self.averages():  # the weights of lost workers are missing
                    flat.div_(weight)
        return mask

    def _catch_up(self) -> None:
        self._is_broken = False
        self._has_caught_up = True

    def _absent(self) -> frozenset[str]:
        """Return the parameters that have no gradient on this worker."""
        return frozenset(
            [slot.name for slot in self._slots if not slot.ready]
            + [n.name for n in self.sparse.parameters if n.param.grad is None]
        )

    def _exchange_mask(self, absent: frozenset[str]) -> list[float]:
        """Exchange the used-parameter mask, and wait for all buckets."""
        flags, elastic = self._flags, self._elastic
        flags.fill_(1.0)
        if absent:
            flags[:-_NUM_NOTES] = torch.tensor([name not in absent for name in self.names])
        # In an elastic job the processes of a unit have combined their notes after the last
        # retryable step (runtime/elastic/unit_agreement.py).
        flags[-_NUM_NOTES:] = torch.tensor(
            [
                float(elastic.is_stop_due if elastic.is_on else self._unit_stops),
                float(elastic.is_on and elastic.is_change_due),
                float(
                    (self._traits.hides_nonfinite or self._traits.checks_late)
                    and self._policy.has_hidden_nonfinite(self.buckets)
                ),
                self.weighting.weight,
            ]
        )
        start, is_traced, traced_s = time.perf_counter(), tracer.on, time.monotonic()
        if is_traced:
            self._spans.wait(self._works)
        mask = self._exchange.reduce_used_mask(flags)
        for work in self._works:
            work.wait()
        self.waited_s += time.perf_counter() - start
        if is_traced:
            self._spans.ended(traced_s)
        return mask.tolist()

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

        Flags that concern that step alone are cleared for a later step without a backward pass.
        """
        result = self.result
        if result.has_caught_up or result.is_change_agreed:
            self.result = replace(result, has_caught_up=False, is_change_agreed=False)
        return result

    def require_finished(self) -> None:
        """Raise if gradients have not been averaged; called before a step."""
        if self._is_closed:
            raise refusals.left_job(self._group.rank)
        if self._active:
            raise refusals.unfinished_pass(self._group.rank)
        if self._has_local_gradients:
            raise refusals.local_gradients(self._group.rank)

    def require_clean(self) -> None:
        """Clean up if the last pass ended with an error; called outside of backward."""
        if not self._active or torch._C._current_graph_task_id() != -1:
            return
        if self._works:
            raise refusals.out_of_step(self._group.rank)
        self._active = False
        self.refresh()
