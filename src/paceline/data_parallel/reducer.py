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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from paceline.collectives.group import Group
from paceline.data_parallel import loss_scaling
from paceline.data_parallel.bucket import Bucket, Slot
from paceline.data_parallel.exchange_spans import ExchangeSpans
from paceline.data_parallel.finite import all_finite
from paceline.data_parallel.layout import Named
from paceline.data_parallel.sparse import SparseGradients
from paceline.data_parallel.weighting import Weighting
from paceline.elastic.session import Elastic
from paceline.errors import PacelineError, PeerError, UsageError
from paceline.pace.allreduce import AllReduce
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

    def __init__(self, group: Group, exchange: Exchange, elastic: Elastic) -> None:
        self._group = group
        self._exchange = exchange
        self._elastic = elastic
        self._is_collective = isinstance(exchange, AllReduce)
        self.is_own = False  # in the last pass nothing was exchanged: gradients are this worker's
        self._is_broken = False  # a worker was lost: what was submitted must be submitted again
        self.with_exchange: Callable[[], None] = lambda: None  # in an elastic job, beside it
        self.is_change_agreed = False  # all workers know of a change, and stop for it
        self.is_stop_agreed = False  # some worker was asked to stop
        self.wants_stop: Callable[[], bool] = lambda: False
        # On a mesh: what those say who hold other parts of the same model, besides this worker.
        self.ask_unit: Callable[[list[bool]], list[bool]] = lambda notes: notes
        self.stops = False  # what this worker's unit says to the others
        self.has_hidden_nonfinite = False  # some worker's gradients, unseen in what was exchanged
        self.skips: Callable[[], bool] = lambda: False  # no gradients here, but an exchange
        self.has_caught_up = False  # this worker has the others' state: its step is done already
        self.buckets: list[Bucket] = []
        self._slots: list[Slot] = []
        self._hooks: list[RemovableHandle] = []
        self._sparse: list[Named] = []
        self._sparse_gradients = SparseGradients(group)
        self._flags = torch.empty(0)
        self.weighting = Weighting()
        self._sync = True
        self._active = False  # inside a backward pass that exchanges gradients
        self._next = 0  # the bucket to submit next
        self._works: list[Work[Any]] = []
        self._spans = ExchangeSpans(exchange)
        self.step = 0  # backward passes with exchange so far
        self.has_local_gradients = False  # the last backward pass was one without exchange
        self.absent: set[str] = set()  # parameters that had no gradient here in the last pass
        self.waited_s = 0.0  # time in which this worker did nothing but wait for others
        self.keeps_sparse = False  # whether somebody will look at the following
        self.sparse_contributions: dict[str, torch.Tensor] = {}  # this worker's, of the last pass
        self.after_exchange: Callable[[Reducer, Sequence[float]], None] | None = None

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
            self._sparse.append(named)
            hook = named.param.register_post_accumulate_grad_hook(self._on_sparse_ready)
            self._hooks.append(hook)
        num_params = len(self._slots) + len(self._sparse)
        self._flags = torch.empty(num_params + _NUM_NOTES)
        self.weighting.cover(self.params)

    def close(self) -> None:
        """Let go of the parameters; between two backward passes only."""
        for hook in self._hooks:
            hook.remove()
        self.weighting.close()

    @property
    def names(self) -> list[str]:
        """The parameters in the order of the roll call."""
        return [slot.name for slot in self._slots] + [named.name for named in self._sparse]

    @property
    def params(self) -> list[torch.nn.Parameter]:
        """The parameters in the order of the roll call."""
        return [slot.param for slot in self._slots] + [named.param for named in self._sparse]

    @property
    def frozen(self) -> set[str]:
        """The parameters that want no gradient (any more)."""
        pairs = zip(self.names, self.params, strict=True)
        return {name for name, param in pairs if not param.requires_grad}

    def averages(self) -> Iterator[torch.Tensor]:
        """The gradients that the workers agreed on in the last exchange, as flat tensors."""
        for bucket in self.buckets:
            yield bucket.averaged
        for named in self._sparse:
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
        return getattr(self._exchange, "is_at_rest", False)

    # -- during backward ----------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Note that a backward pass has begun; called from inside of it, any number of times."""
        if not self._active and self._sync:
            self._active = True
            self.is_own = self.rests
            Variable._execution_engine.queue_callback(self._on_backward_end)

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
            self.has_local_gradients = True
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
            self.has_local_gradients = True
            return
        self.begin_backward()
        if param.grad is not None and param.grad.requires_grad:
            raise _double_backward(next(n.name for n in self._sparse if n.param is param))

    def _submit_full(self) -> None:
        while self._next < len(self.buckets) and self.buckets[self._next].missing == 0:
            bucket = self.buckets[self._next]
            bucket.flush()
            self._submit(bucket)
            self._next += 1

    def _submit(self, bucket: Bucket) -> None:
        bucket.is_submitted = True
        if self._is_broken or self.is_own:
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
        self._active = True
        self.is_own = self.rests
        self._end_pass()

    def _on_backward_end(self) -> None:
        if not self._active:
            return
        if (
            not self._touched() and not self.skips()
        ):  # gradients of something else flowed through the model's outputs
            self._active = False
            return
        self._end_pass()

    def _end_pass(self) -> None:
        for bucket in self.buckets[self._next :]:
            bucket.complete()
            self._submit(bucket)
        self.has_caught_up = False
        self.is_change_agreed = False  # of a step that was left out: it is asked again in this one
        if self.is_own:
            self._keep_own()
            return
        if not self._elastic.is_on:
            start = time.perf_counter()
            (self.stops,) = self.ask_unit([self.wants_stop()])
            self.waited_s += time.perf_counter() - start
        if self._is_collective:
            flags = self._elastic.point(self._agree, self._catch_up)
            self._is_broken = False
        else:  # servers decide who has to be there
            flags = self._call_roll()[:-_NUM_NOTES]
            self.is_stop_agreed = self.stops or (self._elastic.is_on and self.wants_stop())
            if self._sparse:
                self._elastic.point(lambda: self._average_sparse(flags))
        for slot, flag in zip(self._slots, flags, strict=False):
            slot.param.grad = slot.averaged if flag else None
        self._reset()
        if self.after_exchange is not None:
            self.after_exchange(self, flags)

    def _keep_own(self) -> None:
        """Leave the script with the gradients of this worker."""
        for slot in self._slots:
            slot.param.grad = slot.grad if slot.ready else None
        self._reset()

    def _agree(self) -> list[float]:
        """Average everything with the others; again from the start if somebody was lost."""
        if self._is_broken:
            self._works.clear()
            self._spans.dropped()
            for bucket in self.buckets:
                self._start(bucket)
        self._is_broken = self._elastic.is_on  # until everything is there, and counts
        called = self._call_roll()
        flags, (stops, changes, hidden, weight) = called[:-_NUM_NOTES], called[-_NUM_NOTES:]
        self._average_sparse(flags)
        start = time.perf_counter()
        self.with_exchange()
        self.waited_s += time.perf_counter() - start
        self.is_stop_agreed, self.is_change_agreed = stops > 0, changes > 0
        self.has_hidden_nonfinite = hidden > 0
        is_weighted = getattr(self._exchange, "is_weighted", True)
        if self._elastic.is_on and is_weighted and weight > 0 and abs(weight - 1.0) > _EVEN:
            for flat in self.averages():  # weights of workers that are lost are missing
                flat.div_(weight)
        return flags

    def _catch_up(self) -> None:
        self._is_broken = False
        self.has_caught_up = True

    def _touched(self) -> bool:
        return (
            self._next > 0
            or any(slot.ready for slot in self._slots)
            or any(named.param.grad is not None for named in self._sparse)
        )

    def _call_roll(self) -> list[float]:
        """Ask who had gradients for what, and wait until all buckets are there."""
        here = [slot.ready for slot in self._slots]
        here += [named.param.grad is not None for named in self._sparse]
        self._flags.fill_(1.0)
        # In an elastic job a unit has told each other behind the last point (elastic/unit.py).
        stops = self._elastic.is_stop_due if self._elastic.is_on else self.stops
        self._flags[-_NUM_NOTES] = float(stops)
        self._flags[1 - _NUM_NOTES] = float(self._elastic.is_change_due)
        self._flags[2 - _NUM_NOTES] = float(self._hides_nonfinite())
        self._flags[-1] = self.weighting.weight
        self.absent.clear()
        if not all(here):
            self._flags[: len(here)] = torch.tensor(here)
            pairs = zip(self.names, here, strict=True)
            self.absent.update(name for name, is_here in pairs if not is_here)
        start, traced_s = time.perf_counter(), tracer.start()
        if traced_s:
            self._spans.wait(self._works)
        called = self._exchange.call_roll(self._flags)
        for work in self._works:
            work.wait()
        self.waited_s += time.perf_counter() - start
        if traced_s:
            self._spans.ended(traced_s)
        return called.tolist()

    def _hides_nonfinite(self) -> bool:
        """Say whether this worker has gradients of which a GradScaler must know by other means."""
        is_hidden = getattr(self._exchange, "hides_nonfinite", False) and loss_scaling.is_in_use()
        return is_hidden and not all_finite([bucket.grads for bucket in self.buckets])

    def _average_sparse(self, flags: Sequence[float]) -> None:
        """Average sparse gradients; if a worker is lost meanwhile, they are as they were."""
        own = [named.param.grad for named in self._sparse]
        try:
            self._average_each_sparse(flags)
        except PeerError:
            for named, grad in zip(self._sparse, own, strict=True):
                named.param.grad = grad
            raise

    def _average_each_sparse(self, flags: Sequence[float]) -> None:
        self.sparse_contributions.clear()
        for named, flag in zip(self._sparse, flags[len(self._slots) :], strict=True):
            if not flag:
                continue
            param, start = named.param, time.perf_counter()
            grad = param.grad
            if grad is None:
                grad = torch.sparse_coo_tensor(
                    torch.empty(1, 0, dtype=torch.int64),
                    torch.empty(0, *param.shape[1:], dtype=param.dtype),
                    param.shape,
                    check_invariants=False,
                )
            if self.keeps_sparse:
                self.sparse_contributions[named.name] = grad.clone()
            if grad.is_sparse:
                param.grad = self._sparse_gradients.average(grad)
            else:  # the weight is tied to a layer that uses it densely
                param.grad = torch.empty_like(grad)
                self._group.all_reduce(grad, "mean", out=param.grad)
            self.waited_s += time.perf_counter() - start

    def _reset(self) -> None:
        self._works.clear()
        self._next = 0
        self._active = False
        self.has_local_gradients = False
        self.step += 1
        for bucket in self.buckets:
            bucket.begin()

    def require_finished(self) -> None:
        """Called before a step: refuse gradients of a pass that broke off, or of one after it."""
        if self._active:
            raise PacelineError(
                f"rank {self._group.rank}: optimizer.step() after a backward pass that ended with"
                " an error (or in the middle of one): gradients have not been averaged; drop them"
                " with zero_grad() and begin again with a forward pass of the whole model"
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
