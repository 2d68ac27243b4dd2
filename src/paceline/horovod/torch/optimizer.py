"""DistributedOptimizer: the user's optimizer, with gradients reduced over the ranks before a step.

    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    optimizer = hvd.DistributedOptimizer(optimizer, pace="ssp:3")     any pace of pl.distribute

The result has the class of the given optimizer and shares its param_groups and state.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from paceline import _core
from paceline.errors import UsageError
from paceline.horovod import session
from paceline.horovod.process_sets import ProcessSet, global_process_set
from paceline.horovod.reductions import Average, check_gradient_op
from paceline.horovod.torch.compression import Compression, check_compression
from paceline.horovod.torch.functions import in_place
from paceline.horovod.torch.gradients import GradientExchange
from paceline.horovod.torch.named_reductions import NamedReductions
from paceline.horovod.torch.paced import pace_optimizer

_numbers = itertools.count()  # of optimizers; the same on all ranks


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    pace: str | None = None,
    model: nn.Module | None = None,
    **options: Any,
) -> Any:
    """Return the optimizer with a `step` that reduces gradients over all ranks first.

    `pace` and `options` are those of `pl.distribute`; without `model` it is the first module that
    is called and has all parameters. `num_groups` and `groups` have no effect: gradients travel in
    buckets.
    """
    if pace is not None:
        return pace_optimizer(optimizer, pace, model, options, backward_passes_per_step, op)
    if options or model is not None:
        extra = ", ".join([*options, *(["model"] if model is not None else [])])
        raise UsageError(f"DistributedOptimizer: {extra} needs pace=..., for example 'allreduce'")
    if isinstance(optimizer, _DistributedOptimizer):
        raise UsageError(
            "DistributedOptimizer: this optimizer is one already; wrap the plain one, once"
        )
    _check_arguments(op, gradient_predivide_factor, num_groups, groups, backward_passes_per_step)
    check_compression(compression)
    names = _checked_names(optimizer, named_parameters)
    _core.keep_freed_memory()  # gradients and activations of the next step have the same sizes
    base = type(optimizer)
    kind: Any = type(base.__name__, (_DistributedOptimizer, base), {"__module__": base.__module__})
    wrapped = kind.__new__(kind)
    # A scheduler may have put a `step` into the old object; it is bound to that one.
    wrapped.__dict__.update({k: v for k, v in vars(optimizer).items() if k != "step"})
    wrapped._begin(
        names,
        NamedReductions(
            f"DistributedOptimizer.{next(_numbers)}",
            op,
            gradient_predivide_factor,
            compression,
            process_set,
        ),
        (op, process_set, backward_passes_per_step, sparse_as_dense),
    )
    return wrapped


def _check_arguments(op: int, predivide: float, num_groups: int, groups: Any, passes: int) -> None:
    check_gradient_op(op, predivide)
    if passes < 1:
        raise UsageError(f"backward_passes_per_step={passes}: expected at least 1")
    is_list = isinstance(groups, list) and all(isinstance(one, list) for one in groups)
    is_count = isinstance(groups, int) and groups >= 0
    if num_groups < 0 or not (groups is None or is_list or is_count):
        raise UsageError("groups: pass a number from 0, or a list of lists of parameters")


def _checked_names(
    optimizer: torch.optim.Optimizer, named_parameters: Any
) -> dict[nn.Parameter, str]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if named_parameters is None:
        return {param: f"allreduce.noname.{number}" for number, param in enumerate(params)}
    named = list(named_parameters)
    if any(not isinstance(one, tuple) for one in named):
        raise UsageError(
            "named_parameters should be a sequence of tuples (name, parameter), usually"
            " model.named_parameters()"
        )
    names = [name for name, _ in named]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise UsageError(
            f"parameter names in named_parameters must be unique; found {', '.join(repeated)} more"
            " than once"
        )
    known = {id(param) for _, param in named}
    unnamed = [param for param in params if id(param) not in known]
    if unnamed:
        raise UsageError(
            f"named_parameters lacks {len(unnamed)} of the optimizer's parameters, the first of"
            f" shape {list(unnamed[0].shape)}; name all of them, or pass named_parameters=None"
        )
    return {param: name for name, param in sorted(named, key=lambda pair: pair[0])}


class _DistributedOptimizer(torch.optim.Optimizer):
    """What is added to the user's optimizer class."""

    def _begin(
        self,
        names: dict[nn.Parameter, str],
        exchange: NamedReductions,
        settings: tuple[int, ProcessSet, int, bool],
    ) -> None:
        op, process_set, passes, sparse_as_dense = settings
        self._parameter_names = names
        self.op, self.backward_passes_per_step = op, passes
        self._process_set = process_set
        self._synchronized = False
        self._should_synchronize = True
        self._exchange: GradientExchange | None = None
        if session.size() > 1 or session.is_elastic():
            self._exchange = GradientExchange(
                self,
                dict(names),
                exchange,
                op,
                process_set,
                passes=passes,
                sparse_as_dense=sparse_as_dense,
            )

    @property
    def _takes_part(self) -> bool:
        return self._exchange is not None and bool(self._process_set.included())

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Accumulate the gradients of another number of backward passes from now on."""
        self.backward_passes_per_step = passes
        if self._exchange is not None:
            self._exchange.passes = passes
            self._exchange.reset()

    def synchronize(self) -> None:
        """Reduce the gradients now; `step()` under `skip_synchronize()` does not do it again."""
        if self._takes_part:
            assert self._exchange is not None
            self._exchange.run()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `step()` use the gradients as they are: `synchronize()` has been called."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Any = None) -> Any:
        """Reduce the gradients, then update the parameters."""
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after"
                    " optimizer.synchronize(): the gradients are reduced twice. Use `with"
                    " optimizer.skip_synchronize(): optimizer.step()`",
                    stacklevel=2,
                )
            self.synchronize()
        self._synchronized = False
        result = super().step(closure)
        session.current().step_done()
        return result

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Reset the gradients; AssertionError between backward() and step()."""
        if self._takes_part and self._exchange is not None and self._exchange.has_gradients:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before"
                " optimizer.step() or optimizer.synchronize(): these gradients would be reduced"
                " on some ranks and lost on others. Call step() or synchronize() first"
            )
        super().zero_grad(*args, **kwargs)

    def load_state_dict(self, state_dict: Any) -> None:
        """Load a state, and forget gradients that have not been reduced."""
        self._synchronized, self._should_synchronize = False, True
        if self._exchange is not None:
            self._exchange.reset()
        with in_place(self):
            super().load_state_dict(state_dict)
