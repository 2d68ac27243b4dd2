"""The gradients of one DistributedOptimizer: collected in buckets, reduced by named operations.

Everything is that of `pl.distribute` (reducer, buckets, gradients of linear layers that are
computed in their bucket) except for three things that Horovod's semantics ask for:

    a pass ends with `synchronize()`, not with backward: there may be several backward passes, and
    losses that reach different parameters
    buckets are reduced as named operations, so that ranks that have joined contribute zeros
    a parameter without a gradient gets zeros, on all ranks

The buckets are made at the first `synchronize()`: nothing is communicated before, and by then the
modules that own the parameters are known.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from paceline.comm.group import Group
from paceline.data_parallel.bucket import Bucket, NamedParameter, ParamSlot
from paceline.data_parallel.bucket_allocator import BucketAllocator
from paceline.data_parallel.direct_gradients import compute_as_usual, compute_in_bucket
from paceline.data_parallel.policy import PassResult
from paceline.data_parallel.reducer import Reducer
from paceline.errors import UsageError
from paceline.horovod import session
from paceline.horovod.handles import translated
from paceline.horovod.process_sets import ProcessSet
from paceline.horovod.torch.operations import sparse_allreduce_async, synchronize
from paceline.pace.exchange import Exchange

_BUCKET_MB = 16.0

# A parameter belongs to the newest optimizer that has it. References are weak: an exchange refers
# to its parameters.
_exchanges = WeakIdKeyDictionary()
_alive = weakref.WeakSet["GradientExchange"]()


class _Fixed:
    """The workers of this exchange do not change: hvd.elastic forms it anew."""

    is_on = False


class OpenReducer(Reducer):
    """A reducer whose passes begin at once and end when the caller says so."""

    def __init__(
        self, group: Group, exchange: Exchange, counted: Callable[[nn.Parameter], bool]
    ) -> None:
        super().__init__(group, exchange, _Fixed(), _Policy())  # type: ignore[arg-type]
        self._counted = counted

    def open_pass(self) -> None:
        """Begin a pass; every gradient belongs to it until `close_pass`."""
        with torch.no_grad():
            self._begin()

    def close_pass(self) -> None:
        """Exchange what is missing and wait for everything."""
        self._end_pass()

    def abandon_pass(self) -> None:
        """Forget a pass that has failed."""
        self._reset()

    def _hook_of(self, slot: ParamSlot) -> Callable[[nn.Parameter], None]:
        on_ready = super()._hook_of(slot)

        def on_counted(param: nn.Parameter) -> None:
            if self._counted(param):
                on_ready(param)
                if param.grad is None:  # it was moved to the bucket; the script may look at it
                    param.grad = slot.grad

        return on_counted


class _Policy:
    """No checks, no weights: every rank counts the same (data_parallel/policy.py)."""

    keeps_sparse = False

    def skips_backward(self) -> bool:
        return False

    def wants_stop(self) -> bool:
        return False

    def ask_unit(self, notes: list[bool]) -> list[bool]:
        return notes

    def has_hidden_nonfinite(self, buckets: Sequence[Any]) -> bool:  # noqa: ARG002
        return False

    def during_exchange(self) -> None:
        """Do nothing: buffers are the script's."""

    def after_exchange(self, result: PassResult) -> None:
        """Do nothing."""


class GradientExchange:
    """Counts backward passes and reduces the gradients of an optimizer's parameters."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: dict[nn.Parameter, str],
        exchange: Exchange,
        op: int,
        process_set: ProcessSet,
        *,
        passes: int,
        sparse_as_dense: bool,
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._names, self._exchange = names, exchange
        self._op, self._process_set = op, process_set
        self.passes = passes
        self._sparse_as_dense = sparse_as_dense
        self._counts: dict[nn.Parameter, int] = {}  # backward passes since the last exchange
        self._reducer: OpenReducer | None = None
        self._sparse: list[nn.Parameter] = []
        self._owners = _Owners(names)
        self._hooks: list[Any] = []
        self._count_before_first_run()
        self._is_retired = False
        for param in names:
            older = _exchanges.get(param, lambda: None)()
            if older is not None:
                older.retire()
            _exchanges[param] = weakref.ref(self)
        _alive.add(self)

    @property
    def has_gradients(self) -> bool:
        """Whether backward has made gradients that have not been exchanged."""
        return bool(self._counts)

    def _count_before_first_run(self) -> None:
        trainable = [param for param in self._names if param.requires_grad]
        self._hooks += [p.register_post_accumulate_grad_hook(self._counter()) for p in trainable]

    def _counter(self) -> Callable[[nn.Parameter], None]:
        """Return a hook that does not keep this object: torch never frees what a hook refers to."""
        here = weakref.ref(self)

        def count(param: nn.Parameter) -> None:
            exchange = here()
            if exchange is not None:
                exchange._is_due(param)

        return count

    def _is_due(self, param: nn.Parameter) -> bool:
        """Count a gradient; return whether the parameter has those of all passes."""
        if self._optimizer() is None:  # the script has dropped it
            self.retire()
            return False
        count = self._counts.get(param, 0) + 1
        if count > self.passes:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to"
                f" step(): {self._names.get(param, 'a parameter')} {count} times, expected"
                f" {self.passes}. Increase backward_passes_per_step to accumulate gradients"
                " locally."
            )
        self._counts[param] = count
        return count == self.passes

    @property
    def _owner(self) -> torch.optim.Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None, "the optimizer calls this"
        return optimizer

    def retire(self) -> None:
        """Reduce no more gradients."""
        self._is_retired = True
        self._counts.clear()
        self._owners.stop()
        self._release()

    def reset(self) -> None:
        """Begin again, after an error or when another state was loaded."""
        self._counts.clear()
        if self._reducer is not None:
            self._reducer.abandon_pass()
            self._reducer.open_pass()

    def run(self) -> None:
        """Reduce all gradients, and wait."""
        if self._is_retired:
            raise UsageError(
                "the parameters of this DistributedOptimizer belong to another one that was made"
                " later; step with that one"
            )
        params = [p for group in self._owner.param_groups for p in group["params"]]
        if self._reducer is None:
            self._set_up(params)
        else:
            self._add_new(params)
        assert self._reducer is not None
        sparse = self._start_sparse()
        try:
            with translated():
                self._reducer.close_pass()
            for param, handle in sparse:
                param.grad = synchronize(handle)
        except BaseException:
            self.reset()
            raise
        for bucket in self._reducer.buckets:
            for slot in bucket.slots:
                if slot.param.requires_grad:
                    slot.param.grad = slot.averaged
        self._counts.clear()
        self._reducer.open_pass()

    def _start_sparse(self) -> list[tuple[nn.Parameter, int]]:
        started = []
        for param in self._sparse:
            grad = param.grad
            if grad is None or grad.layout is torch.strided:
                grad = torch.sparse_coo_tensor(
                    torch.empty((1, 0), dtype=torch.int64),
                    torch.empty((0, *param.shape[1:]), dtype=param.dtype),
                    param.shape,
                )
            name = f"sparse {self._names[param]}"
            started.append((param, sparse_allreduce_async(grad, name, self._op, self._process_set)))
        return started

    # -- buckets ------------------------------------------------------------------------------

    def _set_up(self, params: Sequence[nn.Parameter]) -> None:
        job = session.current()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        alone = Group(job.fabric, (job.fabric.rank,))
        self._allocator = BucketAllocator(
            job.fabric.engine, alone, self._owner, bucket_mb=_BUCKET_MB, is_shared=False
        )
        self._reducer = OpenReducer(alone, self._exchange, self._is_due)
        self._owners.stop()
        self._add_new(params)
        self._reducer.open_pass()

    def _add_new(self, params: Sequence[nn.Parameter]) -> None:
        """Move parameters that have become trainable into buckets."""
        reducer, slots = self._reducer, self._allocator.slots
        assert reducer is not None
        new = [
            param
            for param in params
            if param.requires_grad and param not in slots and param not in self._sparse_set
        ]
        if not new:
            return
        sparse = set() if self._sparse_as_dense else {p for p in new if self._is_sparse(p)}
        self._sparse += [param for param in new if param in sparse]
        self._hooks += [p.register_post_accumulate_grad_hook(self._counter()) for p in sparse]
        dense = [
            NamedParameter(self._names.setdefault(p, f"parameter {number}"), p)
            for number, p in enumerate(new)
            if p not in sparse
        ]
        for one in dense:
            if one.param.grad is not None:
                one.param.grad = one.param.grad.to_dense()  # of sparse_as_dense
        buckets: list[Bucket] = self._allocator.allocate_buckets(dense)
        reducer.add(buckets)
        for bucket in buckets:
            bucket.is_open = True
        for module in self._owners.modules:
            compute_in_bucket(module, self._allocator.slots, reducer)

    @property
    def _sparse_set(self) -> set[nn.Parameter]:
        return set(self._sparse)

    def _is_sparse(self, param: nn.Parameter) -> bool:
        has_sparse = param.grad is not None and param.grad.layout is not torch.strided
        return has_sparse or param in self._owners.sparse

    def leave_job(self) -> None:
        """Release the buckets; those of the next job are made at its first `synchronize()`."""
        if self._is_retired:
            return
        self._release()
        self._counts.clear()
        self._count_before_first_run()

    def _release(self) -> None:
        if self._reducer is not None:
            self._reducer.close()
        self._reducer = None
        self._sparse.clear()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for module in self._owners.modules:
            compute_as_usual(module)


def _leave_job() -> None:
    for exchange in list(_alive):
        exchange.leave_job()


session.at_shutdown(_leave_job)


class _Owners:
    """The modules that own parameters, as far as forward has called them."""

    def __init__(self, names: dict[nn.Parameter, str]) -> None:
        self._wanted = set(names)
        self.modules: list[nn.Module] = []
        self.sparse: set[nn.Parameter] = set()  # weights of sparse embeddings
        self._hook = register_module_forward_pre_hook(self._see)

    def _see(self, module: nn.Module, _: Any) -> None:
        owned = [p for p in module._parameters.values() if p is not None and p in self._wanted]
        if not owned or any(module is one for one in self.modules):
            return
        self.modules.append(module)
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            self.sparse.update(owned)

    def stop(self) -> None:
        """Look no longer at modules that are called."""
        self._hook.remove()
