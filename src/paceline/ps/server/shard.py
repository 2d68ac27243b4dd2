"""A contiguous range of a table on this server: its values, and how an update changes them.

Values lie in one flat tensor, possibly in memory that workers share. They are KEPT in the server's
dtype and COMPUTED in a wide one (precision.py); where the two are the same, an update works on the
kept values themselves. No sockets, no clocks; an update here is already decided on.

A backup DEFERS updates: it acknowledges the step first and computes then, while the workers go on.
It has all that it needs, its own average and the settings, so the primary may be lost meanwhile.
Everything that reads or changes the numbers of a shard computes its deferred update before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch

from paceline import _core
from paceline.comm.tensors import Buffer
from paceline.compress.kernels import Draw
from paceline.compress.sign_bits import majority
from paceline.errors import ShapeMismatch, UnknownKey, UsageError
from paceline.ps.packing import MeanPackets
from paceline.ps.server.optimizer import OnDone, Settings, ShardOptimizer, StateEntry
from paceline.ps.server.precision import (
    FLOATING,
    Scratch,
    computed_dtype,
    kept_dtype,
    round_stochastically,
    seed_of,
)
from paceline.ps.spec import TableSpec

_STREAMED_BYTES = 4 << 20  # less stays in the cache until the worker reads it

Memory = Callable[[int, str, int, torch.dtype], torch.Tensor]  # shard, use, elements, dtype


class Shard:
    """The values of one shard, and its part of the optimizer."""

    def __init__(self, table: TableSpec, number: int, memory: Memory, scratch: Scratch) -> None:
        self.spec = spec = table.shards[number]
        self.name = f"table {table.name!r}, shard {spec.label!r}"
        self._rule = rule = table.rule
        self.own_dtype = FLOATING[spec.dtype]
        kept = kept_dtype(self.own_dtype, rule.server_dtype)
        self.dtype = computed_dtype(kept)
        self.params = memory(number, "params", spec.count, kept)
        self.average = (
            memory(number, "average", spec.count, self.own_dtype) if rule.aggregate else None
        )
        self._reduced = Buffer(self.average) if self.average is not None else None
        self._packets = MeanPackets(spec, rule.mean_codec) if rule.mean_codec else None
        self._packet: tuple[str, torch.Tensor] | None = None
        self._wide: dict[int, torch.Tensor] = {}  # by worker: what came in a narrower dtype
        self._num_unpacked = 0  # workers that the average is of, if it can still be packed
        self.is_assigned = False
        # Of a backup: what it has to do when it has acknowledged what has arrived.
        self.defer_to: list[Callable[[], None]] | None = None
        self._deferred: Callable[[], None] | None = None
        self._kind: tuple[Settings, Collection[int], float] | None = None  # of the last update
        self._scratch = scratch
        self._optimizer: ShardOptimizer | None = None  # tables of deltas and values have none
        if rule.push == "grad":
            self._optimizer = ShardOptimizer(table.optimizer, spec.pieces, self._workplace())

    # -- values -------------------------------------------------------------------------------

    def assign(self, values: torch.Tensor) -> None:
        """Set the values, whatever they were."""
        self.settle()
        self.params.copy_(self.checked(values))
        self.is_assigned = True

    def move(self, params: torch.Tensor, average: torch.Tensor) -> None:
        """Keep values and average in this memory from now on."""
        assert self.average is not None and self.params.dtype is params.dtype, self.name
        self.settle()
        params.copy_(self.params)
        average.copy_(self.average)
        self.params = params
        self.average.set_(average)  # type: ignore[call-overload]  # others hold this tensor
        self._reduced = Buffer(self.average)
        if self._optimizer is not None:
            self._optimizer.move(params)

    def copy_to(self, out: torch.Tensor) -> None:
        """Bring the values into a flat tensor of any floating dtype."""
        self.settle()
        self.checked(out)
        if out.data_ptr() != self.params.data_ptr():
            out.copy_(self.params)

    def values(self) -> torch.Tensor:
        """Return the values in the dtype of computations; valid until the next shard's turn."""
        workplace = self._workplace()
        if workplace is not self.params:
            workplace.copy_(self.params)
        return workplace

    def checked(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the tensor, contiguous; ShapeMismatch if it cannot belong to this shard."""
        expected = f"{self.name} has {self.spec.count} x {self.spec.dtype}"
        if flat.numel() != self.spec.count or flat.dim() != 1:
            raise ShapeMismatch(f"{expected}, but the tensor has shape {list(flat.shape)}")
        if not flat.is_floating_point():
            raise ShapeMismatch(f"{expected}, but the tensor has dtype {flat.dtype}")
        return flat.contiguous()

    def require_values(self) -> None:
        """Raise UnknownKey unless values were assigned."""
        if not self.is_assigned:
            raise UnknownKey(f"{self.name} has no value yet; assign one first")

    # -- updates ------------------------------------------------------------------------------

    def reduce(self, grads: Sequence[torch.Tensor]) -> torch.Tensor:
        """Average in the given order, with the kernel of the collectives; return the average."""
        assert self.average is not None and self._reduced is not None
        self.settle()
        to, inputs = self._reduced, [grad.data_ptr() for grad in grads]
        _core.reduce_mean(inputs, to.address, to.count, to.dtype)
        self._packet, self._num_unpacked = None, len(grads)
        if self._packets is not None and not self._packets.is_exact:
            self.packet()  # which rounds it
        return self.average

    def widened(self, worker: int, grad: torch.Tensor) -> torch.Tensor:
        """Return a worker's gradient in the parameters' dtype, in which averages are made."""
        if grad.dtype is self.own_dtype:
            return grad
        if worker not in self._wide:
            self._wide[worker] = torch.empty_like(grad, dtype=self.own_dtype)
        return self._wide[worker].copy_(grad)

    def forget(self, worker: int) -> None:
        """Drop the memory of a worker that is gone."""
        self._wide.pop(worker, None)

    def packet(self) -> tuple[str, torch.Tensor] | None:
        """Return the average as a packet, with the codec that reads it; None: there is none."""
        count, self._num_unpacked = self._num_unpacked, 0
        if count and self._packets is not None and self._packets.is_used:
            assert self.average is not None
            self._packet = self._packets.pack(self.average, count)
        return self._packet

    def elect(self, votes: Sequence[torch.Tensor], step: int) -> torch.Tensor:
        """Return the majority of signs: bits in 64-bit words, which travel with dtype float64."""
        assert self.average is not None
        self.settle()
        coin = Draw(self._rule.seed, step, self.spec.first_sign)
        majority([vote.view(torch.int64) for vote in votes], coin, self.average.view(torch.int64))
        return self.average

    def update(
        self,
        grad: torch.Tensor,
        *,
        absent: Collection[int],
        settings: Settings,
        slowdown: float,
        version: int,
        out: torch.Tensor | None = None,
    ) -> None:
        """Apply what was pushed, as one version; its weight is divided by `slowdown`.

        `out` gets the fresh values, while they are in the cache where that is possible.
        """
        if self._rule.votes:
            return  # workers step with what they voted for
        self.settle()
        kind = (settings, absent, slowdown)
        apply = partial(
            self._apply, grad, absent, settings, slowdown=slowdown, version=version, out=out
        )
        # A gradient elsewhere may change when the step is acknowledged. New settings may be wrong,
        # and then the step has to be refused.
        if self.defer_to is not None and grad is self.average and kind == self._kind:
            self._deferred = apply
            self.defer_to.append(self.settle)
            return
        apply()
        self._kind = kind

    def settle(self) -> None:
        """Compute the update that was deferred, if there is one."""
        deferred, self._deferred = self._deferred, None
        if deferred is not None:
            deferred()

    def _apply(
        self,
        grad: torch.Tensor,
        absent: Collection[int],
        settings: Settings,
        *,
        slowdown: float,
        version: int,
        out: torch.Tensor | None,
    ) -> None:
        grad, values = self.computable(grad), self.values()
        can_follow = values is self.params and self._optimizer is not None
        if self._optimizer is not None:
            on_done = self._copier(out) if out is not None and can_follow else None
            self._optimizer.step(grad, absent, settings, slowdown, on_done)
        elif self._rule.push == "delta":
            values.add_(grad, alpha=1.0 / slowdown)
        else:
            values.copy_(grad)
        if values is not self.params:
            seed = seed_of(self._rule.seed, self.spec.label, version)
            round_stochastically(values, self.params, seed=seed)
        if out is not None and not can_follow:
            self.copy_to(out)

    def _copier(self, out: torch.Tensor) -> OnDone:
        """Return what copies a part of the values out, past the cache: another process reads it."""
        self.checked(out)
        size = self.params.element_size()
        if out.dtype is not self.params.dtype or self.spec.count * size < _STREAMED_BYTES:

            def copy(start: int, stop: int) -> None:
                out[start:stop].copy_(self.params[start:stop])

            return copy
        source, target = self.params.data_ptr(), out.data_ptr()
        return lambda start, stop: _core.copy_past_cache(
            source + start * size, target + start * size, (stop - start) * size
        )

    def computable(self, grad: torch.Tensor) -> torch.Tensor:
        """Return a gradient in the dtype of computations; valid until the next shard's turn."""
        if grad.dtype is self.dtype:
            return grad
        return self._scratch.flat("gradient", grad.numel(), self.dtype).copy_(grad)

    def _workplace(self) -> torch.Tensor:
        if self.params.dtype is self.dtype:
            return self.params
        return self._scratch.flat("values", self.spec.count, self.dtype)

    # -- the optimizer's state ----------------------------------------------------------------

    def state(self) -> list[StateEntry]:
        """Return what the optimizer remembers, by piece."""
        self.settle()
        return self._optimizer.state() if self._optimizer is not None else []

    def outline(self) -> list[StateEntry]:
        """Return what the optimizer remembers, without the numbers."""
        self.settle()
        return self._optimizer.outline() if self._optimizer is not None else []

    def numbers(self, start: int, stop: int) -> list[torch.Tensor]:
        """Return everything that is kept about a range of elements, where it lies."""
        self.settle()
        found = [self.params[start:stop]]
        if self.average is not None:
            found.append(self.average[start:stop])
        return found + (self._optimizer.numbers(start, stop) if self._optimizer else [])

    def load_state(self, entries: Sequence[StateEntry]) -> None:
        """Replace what the optimizer remembers."""
        if self._optimizer is None:
            raise UsageError(f"{self.name} has no optimizer that could have a state")
        self.settle()
        self._optimizer.load_state(entries)
