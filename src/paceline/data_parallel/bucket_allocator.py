"""BucketAllocator: assigns every trainable parameter to a bucket, and moves it there.

With a sharded update, the parameters that the optimizer updates move into memory that the workers
of the host share; all others into this worker's own, or if they are on a device into memory of that
device. (A "host" of this worker alone makes sense
too: the private view of its memory shows what the script has written.)

COMMON MEMORY. Parameters may be one memory for all workers of a host (hogwild), in a job whose
workers change. A lost worker leaves the memory to the others: it exists as long as one process maps
it. A newcomer cannot map memory of a process that is gone. So when a worker joins, all move to
memory of the first worker of the new membership. No worker writes meanwhile, and all have the same
values; newcomers get them from a peer. Each memory is identified by the change at which the worker
moved there. If a worker is lost during a move, some workers may have moved and others not; they
detect it by these numbers, and move together at the next change.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial

import torch

from paceline import _core
from paceline.comm.devices import is_on_device
from paceline.comm.group import Group
from paceline.comm.object_collectives import all_gather_object
from paceline.comm.shared_memory import HostTensor, allocate, allocate_on_host
from paceline.data_parallel.bucket import Allocate, Bucket, NamedParameter, ParamSlot, plan_buckets
from paceline.data_parallel.hooks import make_tensor_copies_plain
from paceline.state.protocol import Change, Part

_FIRST_BUCKET_BYTES = 1 << 20


class BucketAllocator:
    """Creates buckets. Collective: all workers add the same parameters at the same time."""

    def __init__(
        self,
        engine: _core.Engine,
        host: Group,
        optimizer: torch.optim.Optimizer,
        *,
        bucket_mb: float,
        is_shared: bool,
        averages: str = "own",
        is_common: bool = False,
    ) -> None:
        self._engine = engine
        self._host = host
        self._optimizer = weakref.ref(optimizer)
        self._bucket_bytes = int(bucket_mb * (1 << 20))
        self._is_shared = is_shared
        self._is_common = is_common  # the script writes to shared memory directly: no private view
        # Where averaged gradients are: "own" memory, memory of the "host", or nowhere, because
        # nothing is averaged: the script sees this worker's own gradients ("none"), or a private
        # "view" of them.
        self._averages = averages
        self._num_buckets = self._num_slots = 0
        self.slots: dict[torch.nn.Parameter, ParamSlot] = {}
        # Those that the workers of a host share.
        self.shared_slots: dict[torch.nn.Parameter, ParamSlot] = {}
        self._common: list[Bucket] = []  # whose parameters all workers write to
        self._common_sparse: list[torch.nn.Parameter] = []  # the same, without a bucket

    def allocate_buckets(self, parameters: Sequence[NamedParameter]) -> list[Bucket]:
        """Move these parameters into new buckets, after the existing ones."""
        return self.fill(self.make_buckets(parameters))

    def make_buckets(self, parameters: Sequence[NamedParameter]) -> list[tuple[Bucket, bool]]:
        """Return empty buckets for these parameters, each with whether it is shared."""
        made: list[tuple[Bucket, bool]] = []
        num_slots = self._num_slots
        for plan, is_shared in self._plan(parameters):
            bucket = self._make_bucket(self._num_buckets + len(made), plan, is_shared, num_slots)
            num_slots += len(bucket.slots)
            made.append((bucket, is_shared))
        return made

    def fill(self, made: Sequence[tuple[Bucket, bool]]) -> list[Bucket]:
        """Move the parameters into their buckets."""
        buckets = []
        for bucket, is_shared in made:
            self._move_params(bucket, is_shared)
            self._num_buckets += 1
            self._num_slots += len(bucket.slots)
            self.slots.update((slot.param, slot) for slot in bucket.slots)
            if is_shared:
                self.shared_slots.update((slot.param, slot) for slot in bucket.slots)
            if is_shared and self._is_common:
                self._common.append(bucket)
            buckets.append(bucket)
        return buckets

    def _make_bucket(
        self, index: int, plan: Sequence[NamedParameter], is_shared: bool, first_slot: int
    ) -> Bucket:
        if is_on_device(plan[0].param):
            there = partial(_allocate_there, plan[0].param.device)
            averaged = None if self._averages == "none" else there
            return Bucket(
                index,
                plan,
                allocate=there,
                allocate_params=there,
                allocate_averaged=averaged,
                first_slot=first_slot,
            )
        return Bucket(
            index,
            plan,
            allocate=self._allocate_on_host if self._averages == "view" else self._allocate,
            allocate_params=self._params_memory(is_shared),
            allocate_averaged=self._averaged_memory(),
            first_slot=first_slot,
        )

    def _plan(
        self, parameters: Sequence[NamedParameter]
    ) -> list[tuple[list[NamedParameter], bool]]:
        """Return parameters by bucket, and whether the workers of a host share the bucket.

        What this optimizer does not update stays private: another optimizer that updates it does
        so on every worker. The buckets are the same on all hosts, even if only some share them.
        """
        optimizer = self._optimizer()
        groups = [] if optimizer is None else optimizer.param_groups  # None: the script dropped it
        updated = {id(param) for group in groups for param in group["params"]}
        return [
            (plan, (is_updated or self._is_common) and self._is_shared)
            for is_updated in (True, False)
            for plan in plan_buckets(
                [named for named in parameters if (id(named.param) in updated) is is_updated],
                self._bucket_bytes,
                min(self._bucket_bytes, _FIRST_BUCKET_BYTES),
            )
        ]

    def _averaged_memory(self) -> Allocate | None:
        if self._averages in ("none", "view"):
            return None
        return self._allocate_on_host if self._averages == "host" else self._allocate_zeroed

    def _params_memory(self, is_shared: bool) -> Allocate:
        if is_shared and self._is_common:
            return lambda count, dtype: self._allocate_on_host(count, dtype).shared
        return self._allocate_on_host if is_shared else self._allocate

    def share_sparse(self, parameters: Sequence[NamedParameter]) -> None:
        """Move these into memory of the host, without buckets: their gradients are sparse."""
        for param in (named.param for named in parameters):
            memory = self._allocate_on_host(param.numel(), param.dtype).shared.view(param.shape)
            with torch.no_grad():
                if self._host.rank == 0:
                    memory.copy_(param)
                param.data = memory
            make_tensor_copies_plain(param)
            self._common_sparse.append(param)
            self._host.barrier()

    def move_common_memory(self) -> None:
        """Move all common memory to a member of the present group. Collective.

        All have the same values, and no worker writes meanwhile. If a worker is lost before all
        have mapped the new memory, nothing has changed.
        """
        common = self._common
        flats = [self._allocate_on_host(b.params.numel(), b.params.dtype).shared for b in common]
        sparse = [self._allocate_on_host(p.numel(), p.dtype).shared for p in self._common_sparse]
        with torch.no_grad():
            if self._host.rank == 0:
                for bucket, flat in zip(common, flats, strict=True):
                    flat.copy_(bucket.params)
                for param, flat in zip(self._common_sparse, sparse, strict=True):
                    flat.copy_(param.detach().reshape(-1))
            self._host.barrier()
            for bucket, flat in zip(common, flats, strict=True):
                bucket.move_params(flat)
            for param, flat in zip(self._common_sparse, sparse, strict=True):
                param.data = flat.view(param.shape)

    def _allocate_zeroed(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return self._allocate(count, dtype).zero_()

    def _allocate(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return allocate(self._engine, (count,), dtype)

    def _allocate_on_host(self, count: int, dtype: torch.dtype) -> HostTensor:
        return allocate_on_host(self._engine, self._host, (count,), dtype)

    def _move_params(self, bucket: Bucket, is_shared: bool) -> None:
        """Store the parameters in the bucket; one worker writes the shared ones."""
        is_writer = not is_shared or self._host.rank == 0
        with torch.no_grad():
            if is_writer:
                bucket.params.zero_()
            for slot in bucket.slots:
                if is_writer:
                    slot.segment.view(bucket.params).copy_(slot.param)
                slot.param.data = slot.shown
                make_tensor_copies_plain(slot.param)
        if is_shared:
            self._host.barrier()


def _allocate_there(device: torch.device, count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(count, dtype=dtype, device=device)


_OWN = -1  # memory of a newcomer, which no other process maps


class CommonMemory(Part):
    """Keeps all workers in the same common memory. Registered after the state of the model."""

    def __init__(self, workers: Group, allocator: BucketAllocator, *, is_newcomer: bool) -> None:
        self._workers = workers
        self._allocator = allocator
        self._moved_at = _OWN if is_newcomer else 0  # a generation

    def resume(self, change: Change) -> None:
        """Move, unless all map the same memory."""
        moved_at = all_gather_object(self._workers, self._moved_at)
        if any(one != moved_at[0] for one in moved_at):
            self._allocator.move_common_memory()
            self._moved_at = change.generation
