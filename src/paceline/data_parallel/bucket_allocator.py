"""Housing: finds every trainable parameter its place in a bucket, and moves it there.

With a sharded update the parameters that the optimizer updates move into memory that the workers of
the host share; all others into this worker's own. (A "host" of this worker alone makes sense too:
the private view of its memory tells what the script has written.)

COMMON MEMORY. Parameters may be one memory for all workers of a host (hogwild), while workers come
and go. Who is lost leaves the memory to the others: it lasts as long as anybody maps it. A newcomer
cannot map what belongs to somebody who is gone; so when one comes, all move to memory of the first
worker that is there then. Nobody writes meanwhile, and all have the same values, newcomers from a
peer. Which memory a worker maps is named by the change at which it moved there. If somebody else is
lost in the middle of a move, some may have moved and others not; they see it by these names, and
move together at the next change.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from paceline import _core
from paceline.comm.group import Group
from paceline.comm.object_collectives import all_gather_object
from paceline.comm.shared_memory import HostTensor, allocate, allocate_on_host
from paceline.data_parallel.bucket import Allocate, Bucket, Named, Slot, plan_buckets
from paceline.data_parallel.hooks import keep_tensor_plain
from paceline.state.protocol import Change, Part

_FIRST_BUCKET_BYTES = 1 << 20


class Housing:
    """Makes buckets. Collective: all workers house the same parameters at the same time."""

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
        self._is_common = is_common  # what is shared the script writes to as well: no private view
        # Where averaged gradients are: "own" memory, memory of the "host", or nowhere, because
        # nothing is averaged: the script sees this worker's own ones ("none"), or a private "view"
        # of them.
        self._averages = averages
        self._num_buckets = self._num_slots = 0
        self.slots: dict[torch.nn.Parameter, Slot] = {}
        self.shared_slots: dict[torch.nn.Parameter, Slot] = {}  # of them, those that a host shares
        self._common: list[Bucket] = []  # whose parameters all workers write to
        self._common_sparse: list[torch.nn.Parameter] = []  # the same, without a bucket

    def house(self, parameters: Sequence[Named]) -> list[Bucket]:
        """Move these parameters into new buckets, behind those that there are."""
        buckets = []
        for plan, is_shared in self._plan(parameters):
            bucket = Bucket(
                self._num_buckets,
                plan,
                allocate=self._allocate_on_host if self._averages == "view" else self._allocate,
                allocate_params=self._params_memory(is_shared),
                allocate_averaged=self._averaged_memory(),
                first_slot=self._num_slots,
            )
            self._move_in(bucket, is_shared)
            self._num_buckets += 1
            self._num_slots += len(bucket.slots)
            self.slots.update((slot.param, slot) for slot in bucket.slots)
            if is_shared:
                self.shared_slots.update((slot.param, slot) for slot in bucket.slots)
            if is_shared and self._is_common:
                self._common.append(bucket)
            buckets.append(bucket)
        return buckets

    def _plan(self, parameters: Sequence[Named]) -> list[tuple[list[Named], bool]]:
        """Cut parameters into buckets, and say which of those the workers of a host share.

        What this optimizer does not update stays private: whoever does (another optimizer, of which
        nobody told) does so on every worker. The cuts are the same on all hosts, also if only some
        share.
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

    def share(self, parameters: Sequence[Named]) -> None:
        """Move these into memory of the host, without buckets: their gradients are sparse."""
        for param in (named.param for named in parameters):
            memory = self._allocate_on_host(param.numel(), param.dtype).shared.view(param.shape)
            with torch.no_grad():
                if self._host.rank == 0:
                    memory.copy_(param)
                param.data = memory
            keep_tensor_plain(param)
            self._common_sparse.append(param)
            self._host.barrier()

    def share_anew(self) -> None:
        """Move what all workers write to into memory of those who are in the group now. Collective.

        All have the same values, and nobody writes meanwhile. If somebody is lost before all have
        mapped it, everything is where it was.
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

    def _move_in(self, bucket: Bucket, is_shared: bool) -> None:
        """Let the parameters live in the bucket; shared ones are written by one worker only."""
        is_writer = not is_shared or self._host.rank == 0
        with torch.no_grad():
            if is_writer:
                bucket.params.zero_()
            for slot in bucket.slots:
                if is_writer:
                    slot.place.view(bucket.params).copy_(slot.param)
                slot.param.data = slot.home
                keep_tensor_plain(slot.param)
        if is_shared:
            self._host.barrier()


_OWN = -1  # of a newcomer, which nobody else maps


class CommonMemory(Part):
    """Keeps all workers in the same memory. Registered after the state of the model."""

    def __init__(self, workers: Group, housing: Housing, *, is_newcomer: bool) -> None:
        self._workers = workers
        self._housing = housing
        self._moved_at = _OWN if is_newcomer else 0  # a generation

    def resume(self, change: Change) -> None:
        """Move, unless all map the same."""
        told = all_gather_object(self._workers, self._moved_at)
        if any(one != told[0] for one in told):
            self._housing.share_anew()
            self._moved_at = change.generation
