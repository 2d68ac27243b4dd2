"""Bucket: some parameters whose gradients are exchanged together.

Three flat tensors in engine memory, or in the memory of the parameters' device: `grads` takes this
worker's gradients during backward and stays as it is until the next one (after a failure they can
be reduced again), `averaged` receives what the workers agree on and is what `param.grad` shows (the
same tensor where nothing is averaged, or in place), `params` holds the parameters. What the workers
of a host share of these the script sees through a private view (`shown`), so that what it writes to
it between two steps stays its own.

A fresh gradient is copied into `grads` and freed at once, so that the next one is computed in the
memory, still in the cache, that this one frees. (The alternative, letting autograd add to a zeroed
view, reads and writes every gradient twice; docs/log.md has the figures.)

LAYOUT. Gradients become ready roughly in the reverse order of the parameters, so buckets are filled
in that order. The first one is small: the exchange can start early, while the rest of the backward
pass still runs. The last one cannot overlap with backward, so it should not be large either. Every
parameter starts on a cache line. A parameter that is dense but not contiguous (channels_last) keeps
its strides: its segment holds its memory, not its logical order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from paceline import _core
from paceline.comm.devices import in_own_storage, is_on_device
from paceline.comm.shared_memory import HostTensor
from paceline.comm.tensors import can_read, dtype_code
from paceline.data_parallel.device_streams import BucketStreams

_LINE_BYTES = 64


@dataclass(frozen=True)
class NamedParameter:
    """A parameter and the name under which the model knows it."""

    name: str
    param: torch.nn.Parameter

    def __str__(self) -> str:
        return f"{self.name} {describe(self.param)}"


def describe(tensor: torch.Tensor) -> str:
    """Write a tensor's kind as 'float32[64, 10]'."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


@dataclass(frozen=True)
class ParamSegment:
    """The segment of one parameter in a flat tensor, in elements."""

    named: NamedParameter
    start: int
    count: int

    @property
    def shape(self) -> torch.Size:
        """The parameter's shape."""
        return self.named.param.shape

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this segment of a flat tensor in the parameter's shape and strides.

        It is no view to autograd, which refuses `param.grad.detach_()` for views.
        """
        param = self.named.param
        part = flat[self.start : self.start + self.count]
        return part.as_strided(param.size(), param.stride()).detach()

    def alias(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the same as `view`, in a storage that ends with the segment.

        torch.save writes whole storages: of a view, the state of one layer would be as large as
        its bucket.
        """
        param = self.named.param
        alias = in_own_storage(self.view(flat))
        return alias.as_strided(param.size(), param.stride())  # DLPack drops some strides of 1


def lay_out(parameters: Sequence[NamedParameter]) -> tuple[list[ParamSegment], int]:
    """Return the segments of parameters of one dtype, in order, and the size of the flat tensor."""
    segments: list[ParamSegment] = []
    end = 0
    for named in parameters:
        line = _LINE_BYTES // named.param.element_size()
        segments.append(ParamSegment(named, end, named.param.numel()))
        end += -(-named.param.numel() // line) * line
    return segments, end


def plan_buckets(
    parameters: Sequence[NamedParameter], bucket_bytes: int, first_bytes: int
) -> list[list[NamedParameter]]:
    """Return the parameters by bucket, in the order in which their gradients will be ready.

    A bucket has one dtype, one device and at most `bucket_bytes` (the first: `first_bytes`), unless
    a single parameter is larger. A pure function of the parameters: all workers make the same plan.
    """
    buckets: list[list[NamedParameter]] = []
    open_buckets: dict[tuple[torch.dtype, str], list[NamedParameter]] = {}
    sizes: dict[tuple[torch.dtype, str], int] = {}
    for named in reversed(parameters):
        kind = (named.param.dtype, named.param.device.type)
        size = named.param.numel() * named.param.element_size()
        limit = bucket_bytes if buckets else first_bytes
        if kind in open_buckets and sizes[kind] + size > limit:
            buckets.append(open_buckets.pop(kind))
        if kind not in open_buckets:
            open_buckets[kind], sizes[kind] = [], 0
        open_buckets[kind].append(named)
        sizes[kind] += size
    return buckets + list(open_buckets.values())


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements fill its memory without gaps or overlaps, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


# Smaller gradients are copied together, in one call, when the bucket is full: the call costs more
# than the copy.
_SMALL_ELEMENTS = 8192

Allocate = Callable[[int, torch.dtype], torch.Tensor | HostTensor]


class ParamSlot:
    """One parameter's views into its bucket."""

    __slots__ = (
        *("averaged", "bucket", "claimed", "grad", "index", "is_small", "name", "param", "ready"),
        *("segment", "shown", "stale"),
    )

    def __init__(self, bucket: Bucket, segment: ParamSegment, index: int) -> None:
        self.bucket = bucket
        self.segment = segment
        self.index = index  # number of the parameter in the used-parameter mask
        self.name, self.param = segment.named.name, segment.named.param
        self.grad = segment.view(bucket.grads)
        self.averaged = segment.view(bucket.averaged)
        self.shown = segment.alias(bucket.shown)  # what param.data is
        self.is_small = segment.count < _SMALL_ELEMENTS
        self.ready = False  # has its gradient of the current backward pass
        self.stale = False  # `grad` holds numbers of an earlier step
        self.claimed = False  # a layer computes its gradient in `grad` (direct_gradients.py)

    def make_hook(
        self, on_ready: Callable[[ParamSlot, torch.nn.Parameter], None], on_full: Callable[[], None]
    ) -> Callable[[torch.nn.Parameter], None]:
        """Return the hook of the parameter; `on_full` submits buckets that are full.

        Autograd calls it in every step, and there may be thousands of small parameters: their hook
        is in the core. It handles the most frequent case, a first gradient of an open bucket.
        """
        streams = self.bucket.streams
        if self.is_small:
            hook: Any = _core.ReadyHook(self, on_ready, on_full, streams)
            return hook  # type: ignore[no-any-return]
        if streams is None:
            return partial(on_ready, self)

        def on_large_ready(param: torch.nn.Parameter) -> None:
            streams.note()
            on_ready(self, param)

        return on_large_ready

    def bring_home(self) -> bool:
        """Move the parameter back if the script has set `param.data` to another tensor.

        Returns whether it had.
        """
        if self.param.data_ptr() == self.shown.data_ptr():
            return False
        self.shown.copy_(self.param.detach())
        self.param.data = self.shown
        return True


class GradientGatherer:
    """Copies the gradients of some parameters into the bucket, in one call.

    The core copies what it can: contiguous gradients on the CPU. It takes less than half of the
    time of as many copies by torch, each of which takes longer than moving a small tensor's bytes.
    """

    def __init__(self, slots: Sequence[ParamSlot]) -> None:
        self._slots = slots
        self._params = [slot.param for slot in slots]
        self._places = [slot.grad.data_ptr() for slot in slots]
        # One that is not contiguous keeps its strides, which the core does not know.
        self._counts = [slot.segment.count if can_read(slot.grad) else 0 for slot in slots]
        self._dtype = dtype_code(slots[0].grad) if any(self._counts) else None

    def gather(self, numbers: Sequence[int] | None = None) -> None:
        """Copy `param.grad`, which each of the parameters (or those with these numbers) has."""
        params, places, counts = self._params, self._places, self._counts
        if numbers is not None:
            params, places = [params[i] for i in numbers], [places[i] for i in numbers]
            counts = [counts[i] for i in numbers]
        left: Sequence[int] = range(len(params))
        if params and self._dtype is not None:
            left = _core.copy_gradients(params, places, counts, self._dtype)
        if not left:
            return
        slots = self._slots if numbers is None else [self._slots[i] for i in numbers]
        grads: list[Any] = [params[i].grad for i in left]
        if not all([grad.layout is torch.strided for grad in grads]):
            grads = [grad.to_dense() for grad in grads]
        torch._foreach_copy_([slots[i].grad for i in left], grads)


class Bucket:
    """Some parameters, in order, with their flat tensors."""

    def __init__(
        self,
        index: int,
        parameters: Sequence[NamedParameter],
        *,
        allocate: Allocate,
        allocate_params: Allocate,
        allocate_averaged: Allocate | None,
        first_slot: int,
    ) -> None:
        segments, size = lay_out(parameters)
        dtype = parameters[0].param.dtype
        self.index, self.size, self.dtype = index, size, dtype
        self.label = f"bucket {index} ({parameters[0].name} .. {parameters[-1].name})"
        grads = allocate(size, dtype)
        self.grads = (grads.shared if isinstance(grads, HostTensor) else grads).zero_()
        self.streams = BucketStreams(self.grads.device) if is_on_device(self.grads) else None
        averaged = grads if allocate_averaged is None else allocate_averaged(size, dtype)
        self.host_averaged = averaged if isinstance(averaged, HostTensor) else None
        self.averaged = averaged.private if isinstance(averaged, HostTensor) else averaged
        params = allocate_params(size, dtype)
        self.host = params if isinstance(params, HostTensor) else None
        self.params = params.shared if isinstance(params, HostTensor) else params
        self.shown = params.private if isinstance(params, HostTensor) else params
        self.slots = [ParamSlot(self, one, first_slot + i) for i, one in enumerate(segments)]
        self._small = [slot for slot in self.slots if slot.is_small]
        self._small_params = [slot.param for slot in self._small]
        self._gatherer = GradientGatherer(self._small)
        self._is_all_stale = False  # so are all of the small ones
        self._wanted = 0
        self.missing = 0  # gradients that are not ready yet in this backward pass
        self.is_submitted = False
        self.is_open = False  # takes small gradients by the fast path (reducer.py)
        self.refresh()

    def move_params(self, flat: torch.Tensor, shown: torch.Tensor | None = None) -> None:
        """Let the parameters live in other memory, which has their values already.

        `shown`: the same memory as the script sees it.
        """
        self.params, self.shown = flat, flat if shown is None else shown
        for slot in self.slots:
            slot.shown = slot.segment.alias(self.shown)
            slot.param.data = slot.shown

    def refresh(self) -> None:
        """Count again which parameters require a gradient."""
        self._wanted = sum(slot.param.requires_grad for slot in self.slots)
        self.begin()

    def begin(self) -> None:
        """Prepare for the next backward pass."""
        self.is_submitted = self.is_open = False
        self.missing = self._wanted
        for slot in self.slots:
            slot.ready = slot.claimed = False

    @property
    def segments(self) -> Sequence[ParamSegment]:
        """The segment of each parameter in the flat tensors, in order."""
        return [slot.segment for slot in self.slots]

    @property
    def absent(self) -> Sequence[int]:
        """The numbers, in this bucket, of parameters that have no gradient in this pass."""
        return [number for number, slot in enumerate(self.slots) if not slot.ready]

    def take(self, slot: ParamSlot) -> None:
        """Take the gradient that backward has just put into `param.grad`."""
        param = slot.param
        grad = param.grad
        assert grad is not None
        is_first, slot.ready = not slot.ready, True
        if is_first:
            slot.stale = True
            self.missing -= 1
        if slot.is_small:
            return  # stays in param.grad, where a second part would be added, until flush()
        if is_first:
            if not slot.claimed or grad.data_ptr() != slot.grad.data_ptr():
                slot.grad.copy_(grad)
            param.grad = None
        else:  # a second part of the same gradient (several reentrant checkpoints)
            slot.grad.add_(grad)
            param.grad = None

    def flush(self) -> None:
        """Copy the small gradients that are ready, all at once."""
        if self.missing or self._wanted < len(self.slots):
            ready = [number for number, slot in enumerate(self._small) if slot.ready]
            self._note_stale([self._small[number] for number in ready])
            self._gatherer.gather(ready)
            return
        if not self._is_all_stale:
            self._note_stale(self._small)
            self._is_all_stale = True
        self._gatherer.gather()

    def join_streams(self) -> None:
        """On a device: let the current stream wait for all gradients of this pass."""
        if self.streams is not None:
            self.streams.join(self._small_params)

    def _note_stale(self, slots: Sequence[ParamSlot]) -> None:
        for slot in slots:
            slot.stale = True

    def complete(self) -> None:
        """Fill in what backward has not: an earlier gradient that was not exchanged, or zero."""
        self.join_streams()
        for slot in self.slots:
            if slot.ready:
                continue
            if slot.param.grad is not None:  # from a backward pass under no_sync()
                slot.grad.copy_(slot.param.grad)
                slot.ready = slot.stale = True
            elif slot.stale or self.averaged is self.grads:  # which has the last average
                slot.grad.zero_()
                slot.stale = self._is_all_stale = False
        self.flush()
