"""Gradients that are missing, not finite, or cannot be averaged: checks and errors.

Every rank sees the same averages and the same used-parameter mask, so all come to the same decision
without communication. Only when something is wrong do they exchange which rank caused it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from paceline.comm.devices import is_on_device
from paceline.comm.group import Group
from paceline.comm.object_collectives import all_gather_object
from paceline.data_parallel.checks.late_check import LateCheck, are_finite
from paceline.data_parallel.policy import PassResult
from paceline.errors import NonFiniteGradient, PacelineError, UsageError
from paceline.options.table import Options
from paceline.runtime.elastic.session import ElasticSession

if TYPE_CHECKING:
    from paceline.data_parallel.reducer import Reducer

_SHOWN = 5


class Health:
    """Checks the gradients after each exchange, as the options require."""

    def __init__(
        self,
        group: Group,
        options: Options,
        elastic: ElasticSession,
        ask_unit: Callable[[list[bool]], list[bool]],
        *,
        on_servers: bool = False,
        is_free: bool = False,
        device: torch.device | None = None,
    ) -> None:
        self._group = group
        self._is_free = is_free  # no exchange: this worker reports its own
        self._elastic = elastic
        self._ask_unit = ask_unit
        self._options = options
        is_partial = options.own.get("skip_compute") == "yes"  # some workers compute no gradients
        self.expects_all = options.unused != "ignore" and not is_partial
        self.checks_values = options.nonfinite != "ignore" and not on_servers  # which check them
        self._named: set[str] = set()  # parameters that a warning has named already
        self.skipped_steps = 0
        is_late = device is not None and options.nonfinite == "raise"
        self.late = LateCheck(device) if device is not None and is_late else None

    def look(self, reducer: Reducer, result: PassResult) -> None:
        """Check the gradients after the exchange; runs at the end of backward on every rank."""
        if self.expects_all and not result.is_complete:
            self._unused(reducer, result)
        if self.late is not None:
            self._look_late(self.late, reducer, result)
        elif self.checks_values:
            is_bad = not all_finite(list(reducer.averages()))
            if any(self._ask_unit([is_bad])):  # all processes of a unit skip the same steps
                self._nonfinite(reducer, is_here=is_bad)

    def _tell(self, names: list[str]) -> list[list[str]]:
        return self._elastic.run_step(lambda: all_gather_object(self._group, names))

    # -- missing ------------------------------------------------------------------------------

    def _unused(self, reducer: Reducer, result: PassResult) -> None:
        all_params = zip(reducer.names, reducer.params, result.shares, strict=True)
        names = [
            name
            for name, param, share in all_params
            if share < 1.0 and param.requires_grad and name not in self._named
        ]
        if not names:
            return
        if self._is_free:
            self._warn_alone(reducer, names)
            return
        lacking = self._tell([name for name in names if name in result.absent])
        everywhere = [name for name in names if all(name in there for there in lacking)]
        somewhere = [name for name in names if name not in everywhere]
        text = f"step {reducer.step}: "
        if everywhere:
            text += f"no gradient on any rank for {_list(everywhere)}"
        if somewhere:
            ranks = [
                self._group.ranks[r]
                for r, there in enumerate(lacking)
                if set(there) & set(somewhere)
            ]
            text += (
                f"{'; ' if everywhere else ''}none on rank {_list(ranks)} for {_list(somewhere)}"
            )
        if self._options.unused == "error":
            raise UsageError(
                f"{text}. Every rank must use these parameters in its loss, or freeze them with"
                " requires_grad_(False); unused='warn' continues (a missing gradient is zero)"
            )
        self._named.update(names)
        if self._group.rank == 0:
            warnings.warn(
                f"{text}. A gradient that is missing on all ranks stays None, one that is missing"
                " on some counts as zero there; freeze parameters that are not used, or pass"
                " unused='ignore'. (This warning appears once for each parameter.)",
                stacklevel=2,
            )

    def _warn_alone(self, reducer: Reducer, names: list[str]) -> None:
        self._named.update(names)
        warnings.warn(
            f"step {reducer.step}: no gradient on rank {self._group.ranks[self._group.rank]} for"
            f" {_list(names)}; servers leave them as they are. Freeze parameters that are not used"
            " with requires_grad_(False). (This warning appears once for each parameter.)",
            stacklevel=2,
        )

    # -- not finite ---------------------------------------------------------------------------

    def _look_late(self, late: LateCheck, reducer: Reducer, result: PassResult) -> None:
        """Check gradients on a device; raise what an earlier step's check has found."""
        if result.has_hidden_nonfinite:
            here = late.found
            steps = self._tell([] if here is None else [str(here.step)])
            first = min(int(step) for found in steps for step in found)
            self._raise_or_skip(first, [] if here is None else here.names, is_here=True)
        dense = [(slot.name, slot.grad) for bucket in reducer.buckets for slot in bucket.slots]
        on_device = [(name, grad) for name, grad in dense if is_on_device(grad)]
        late.launch(reducer.step, on_device, list(filter(is_on_device, reducer.averages())))

    def _nonfinite(self, reducer: Reducer, *, is_here: bool) -> None:
        self._raise_or_skip(reducer.step, _bad_contributions(reducer), is_here=is_here)
        self.skipped_steps += 1
        for param in reducer.params:
            param.grad = None

    def _raise_or_skip(self, step: int, names: list[str], *, is_here: bool) -> None:
        found = self._tell(names)
        culprits = [(self._group.ranks[r], names) for r, names in enumerate(found) if names]
        if culprits:
            text = "; ".join(f"rank {rank}: {_list(names)}" for rank, names in culprits)
        elif is_here:
            text = "no rank alone: the sum over the ranks overflowed"
        else:
            text = "in another part of the model: its ranks say which"
        what = f"step {step}: a gradient is NaN or infinite ({text})"
        if self._options.nonfinite == "raise":
            raise NonFiniteGradient(
                f"{what}. Lower the learning rate, clip gradients or look at that rank's batch;"
                " nonfinite='skip' leaves such steps out on all ranks"
            )
        if self._group.rank == 0:
            warnings.warn(f"{what}; the step is left out on all ranks", stacklevel=2)


def _bad_contributions(reducer: Reducer) -> list[str]:
    """Return the parameters whose own gradient on this rank, before the exchange, is not finite."""
    dense = [(slot.name, slot.grad) for bucket in reducer.buckets for slot in bucket.slots]
    sparse = [
        (name, grad.coalesce().values() if grad.is_sparse else grad)
        for name, grad in reducer.sparse.contributions.items()
    ]
    return [name for name, grad in dense + sparse if not torch.isfinite(grad).all()]


def all_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether no element is NaN or infinite, in one pass over memory without a copy.

    Sparse tensors are coalesced first. If some are on a device this waits for it, once.
    """
    there = [tensor for tensor in tensors if is_on_device(tensor) and tensor.numel()]
    if there and not bool(are_finite(there).all()):
        return False
    for tensor in tensors if not there else filter(lambda one: not is_on_device(one), tensors):
        values = tensor.coalesce().values() if tensor.is_sparse else tensor
        if values.numel():
            low, high = torch.aminmax(values)  # both are NaN if any element is
            if not (torch.isfinite(low) and torch.isfinite(high)):
                return False
    return True


def _list(things: Sequence[object]) -> str:
    shown = ", ".join(str(thing) for thing in things[:_SHOWN])
    return shown + (f" and {len(things) - _SHOWN} more" if len(things) > _SHOWN else "")


# -- errors of the reducer ------------------------------------------------------------------------


def double_backward(name: str) -> UsageError:
    """Return the error about a gradient that has a graph of its own."""
    return UsageError(
        f"backward(create_graph=True): the gradient of {name} has a graph of its own, which cannot"
        " be averaged over the workers; compute inner gradients with torch.autograd.grad(...) and"
        " call backward() without create_graph"
    )


def second_gradient(rank: int, name: str) -> UsageError:
    """Return the error about a gradient that arrives after its bucket was sent."""
    return UsageError(
        f"rank {rank}: {name} got another gradient after its bucket was sent; it is used in several"
        " reentrant checkpoints: use checkpoint(..., use_reentrant=False)"
    )


def unfinished_pass(rank: int) -> PacelineError:
    """Return the error about a step after a backward pass that broke off."""
    return PacelineError(
        f"rank {rank}: optimizer.step() after a backward pass that ended with an error (or in the"
        " middle of one): gradients have not been averaged; drop them with zero_grad() and begin"
        " again with a forward pass of the whole model"
    )


def left_job(rank: int) -> UsageError:
    """Return the error about a step after pl.shutdown()."""
    return UsageError(
        f"rank {rank}: this model was distributed in a job that has been left with pl.shutdown();"
        " after the next pl.init(), make model and optimizer again and distribute them"
    )


def local_gradients(rank: int) -> UsageError:
    """Return the error about a step after a backward pass without exchange."""
    return UsageError(
        f"rank {rank}: optimizer.step() after a backward pass under no_sync(): its gradients have"
        " not been averaged; leave no_sync() for the last backward pass before each step"
    )


def out_of_step(rank: int) -> PacelineError:
    """Return the error about a forward pass after a backward pass that broke off too late."""
    return PacelineError(
        f"rank {rank}: the last backward pass ended with an error after it had sent gradients, so"
        " the workers are out of step; start again from a checkpoint"
    )
