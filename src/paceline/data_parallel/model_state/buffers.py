"""Buffers of the model (running statistics, counters, caches), synchronised between workers.

All buffers lie one after the other in one block of engine memory, and the model's tensors are views
of it, so that synchronising hundreds of small tensors takes one collective and no copy:

    [ float32 ... | float64 ... | other dtypes ... ]     a section for each dtype
      bn.running_mean, bn.running_var, ...               in the order of the model

The policies, applied after every optimizer step:

    broadcast   all take rank 0's: the memory is sent as bytes, whatever the dtypes
    average     floating-point and complex sections become the mean of all ranks; others rank 0's
    local       every rank keeps its own

A tensor moves into the memory with its strides, and stays the same object. A loose buffer (a view
of another tensor, a tensor that the script assigned later) is copied in before and back after. When
buffers are added, removed or reshaped, the next step makes a new layout. Submodules that are added
later are not included.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from paceline import _core
from paceline.comm.devices import in_own_storage
from paceline.comm.group import Group
from paceline.comm.shared_memory import allocate
from paceline.data_parallel.hooks import make_tensor_copies_plain
from paceline.errors import PeerError, PeerLost, UnsupportedTensor, UsageError
from paceline.runtime.work import Work

POLICIES = ("broadcast", "average", "local")
_ALIGNMENT = 64  # bytes: a section starts on a cache line
# The dtype of a mean; sections of other dtypes are sent as bytes.
MEANS = {
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.float16: torch.float16,
    torch.bfloat16: torch.bfloat16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}


@dataclass(frozen=True)
class _BufferSlot:
    """The memory of one buffer."""

    buffer: Tensor
    view: Tensor  # of the memory
    address: int  # of the buffer when it was placed; another address means that it was moved

    @property
    def is_loose(self) -> bool:
        return self.address != self.view.data_ptr()


class Buffers:
    """The buffers of one model on one rank. Main thread only.

    `start()` and `finish()` enclose the optimizer's work, during which buffers must not change. If
    training continues after a worker is lost, each rank's buffers are its own from then on.

    In an elastic job `synchronise()` is used instead, and can be repeated: the last values that all
    agreed on are kept, because a newcomer, or a replacement that repeats a step, starts with them.
    """

    def __init__(
        self,
        model: nn.Module,
        group: Group,
        engine: _core.Engine,
        policy: str = "broadcast",
        *,
        survives_loss: bool = False,
    ) -> None:
        if policy not in POLICIES:
            raise UsageError(f"buffers={policy!r}: choose one of {', '.join(POLICIES)}")
        self._group, self._engine, self._policy = group, engine, policy
        self._survives_loss = survives_loss
        self._modules = dict(model.named_modules())
        self._slots: list[_BufferSlot] = []
        self.num_placed = 0  # number of buffers, when last seen
        self._loose: list[_BufferSlot] = []
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._sections: dict[torch.dtype, Tensor] = {}
        self._under_way: list[Work[Any]] = []
        self.agreed = torch.empty(0, dtype=torch.uint8)  # elastic jobs: after the last agreement

    def synchronise(self) -> None:
        """Synchronise the buffers of all workers, by the policy. Collective, repeatable."""
        self._copy_in()
        if self._policy != "local" and self._memory.numel():
            mine = self._memory.clone()
            try:
                self._exchange()
                for work in self._under_way:
                    work.wait()
            except PeerError:
                self._memory.copy_(mine)  # half of it may be another worker's
                raise
            finally:
                self._under_way = []
            self._copy_back()
        self.agreed = self._memory.clone()

    @property
    def num_bytes(self) -> int:
        """The size of all buffers that the model has now."""
        self._copy_in()
        return self._memory.numel()

    def load_agreed(self, agreed: Tensor) -> None:
        """Load the buffers that a peer's workers agreed on last."""
        self._copy_in()
        if agreed.numel() != self._memory.numel():
            raise UsageError(
                f"rank {self._group.rank}: a peer sends buffers of {agreed.numel()} bytes, this"
                f" worker's model has {self._memory.numel()}; build the same model on every rank"
            )
        self._memory.copy_(agreed)
        self.agreed = agreed
        self._copy_back()

    def broadcast_now(self) -> None:
        """Give every rank the values of rank 0, whatever the policy. Collective and blocking."""
        self._copy_in()
        if self._memory.numel():
            self._group.broadcast(self._memory)
        self._copy_back()

    def start(self) -> None:
        """Start to synchronise; no buffer may change before `finish()`."""
        self.finish()  # of a step that failed
        if self._policy == "local":
            return
        self._copy_in()
        if self._memory.numel():
            with self._without_lost_workers():
                self._exchange()

    def _exchange(self) -> None:
        if self._policy == "broadcast":
            self._under_way = [self._group.broadcast(self._memory, async_op=True)]  # type: ignore[list-item]
            return
        for dtype, section in self._sections.items():
            if dtype in MEANS:
                numbers = section.view(MEANS[dtype])
                work = self._group.all_reduce(numbers, "mean", async_op=True)
            else:
                work = self._group.broadcast(section, async_op=True)
            self._under_way.append(work)  # type: ignore[arg-type]

    def finish(self) -> None:
        """Wait for what `start()` started; then every buffer has its new value."""
        works, self._under_way = self._under_way, []
        with self._without_lost_workers():
            for work in works:
                work.wait()
        if works:
            self._copy_back()

    @contextlib.contextmanager
    def _without_lost_workers(self) -> Iterator[None]:
        try:
            yield
        except PeerLost as error:
            if not self._survives_loss:
                raise
            warnings.warn(
                f"rank {self._group.rank}: buffers={self._policy} ends, because a worker is lost:"
                f" {error} From now on the buffers of each rank are its own",
                stacklevel=2,
            )
            self._policy = "local"

    # -- copies -------------------------------------------------------------------------------

    def _copy_in(self) -> None:
        """Update the memory from the buffers that the model has now."""
        found = self._current()
        if len(found) != len(self._slots) or any(
            buffer is not slot.buffer or buffer.data_ptr() != slot.address
            for buffer, slot in zip(found, self._slots, strict=True)
        ):
            self._place(found)
        for slot in self._loose:
            slot.view.copy_(slot.buffer.detach())

    def _copy_back(self) -> None:
        for slot in self._loose:
            # An expanded tensor shows one element many times; it is written once.
            once = tuple(slice(0, 1 if step == 0 else None) for step in slot.buffer.stride())
            slot.buffer.detach()[once].copy_(slot.view[once])

    # -- layout -------------------------------------------------------------------------------

    def _current(self) -> list[Tensor]:
        """Return the model's buffers, each once, also when several modules share it."""
        # In each step, and most modules have none.
        filled = [module._buffers for module in self._modules.values() if module._buffers]
        buffers = (b for of_module in filled for b in of_module.values() if b is not None)
        return [b for b in dict.fromkeys(buffers) if not is_lazy(b) and self._is_mine(b)]

    def _is_mine(self, buffer: Tensor) -> bool:
        return buffer.is_cpu or buffer.is_meta

    def _place(self, found: list[Tensor]) -> None:
        """Assign memory to every buffer: the same if only tensor objects were exchanged."""
        for buffer in found:
            self._require_movable(buffer)
        views = [slot.view for slot in self._slots]
        if [_kind(b) for b in found] != [_kind(v) for v in views] or self._has_strayed(found):
            placed = {slot.buffer for slot in self._slots if not slot.is_loose}
            sharers = Counter(b.untyped_storage().data_ptr() for b in found)
            views = self._lay_out(found)
            for buffer, view in zip(found, views, strict=True):
                is_alone = sharers[buffer.untyped_storage().data_ptr()] == 1
                if buffer in placed or (is_alone and _owns_its_memory(buffer)):
                    buffer.data = view.copy_(buffer.detach())
                    make_tensor_copies_plain(buffer)
        self._slots = [_BufferSlot(b, v, b.data_ptr()) for b, v in zip(found, views, strict=True)]
        self._loose = [slot for slot in self._slots if slot.is_loose]
        self.num_placed = len(self._slots)

    def _has_strayed(self, found: list[Tensor]) -> bool:
        """Return whether a buffer lies in the memory of another, which copying in would change."""
        start = self._memory.data_ptr()
        return any(
            start <= buffer.data_ptr() < start + self._memory.numel()
            and buffer.data_ptr() != slot.view.data_ptr()
            for buffer, slot in zip(found, self._slots, strict=True)
        )

    def _lay_out(self, buffers: list[Tensor]) -> list[Tensor]:
        """Return a view of new memory for each buffer, with its shape and its order in memory."""
        counts = Counter[torch.dtype]()
        offsets = []
        for buffer in buffers:
            offsets.append(counts[buffer.dtype])
            counts[buffer.dtype] += buffer.numel()
        ends = [0, *accumulate(_room(dtype, count) for dtype, count in counts.items())]
        self._memory = self._allocate(ends[-1]).zero_()
        spans = dict(zip(counts, pairwise(ends), strict=True))
        # Separate memory for torch: torch.save refuses one with two dtypes.
        self._sections = {
            d: in_own_storage(self._memory[a:b]) for d, (a, b) in spans.items() if a != b
        }
        nothing = torch.empty(0, dtype=torch.uint8, device=self._memory.device)
        views = []
        for buffer, offset in zip(buffers, offsets, strict=True):
            strides = torch.empty_like(buffer, device="meta").stride()
            section = self._sections.get(buffer.dtype, nothing).view(buffer.dtype)
            views.append(section.as_strided(buffer.shape, strides, offset))
        return views

    def _allocate(self, num_bytes: int) -> Tensor:
        return allocate(self._engine, (num_bytes,), torch.uint8)

    def _require_movable(self, buffer: Tensor) -> None:
        is_dense = buffer.device.type != "meta" and buffer.layout is torch.strided
        can_average = not buffer.is_floating_point() or buffer.dtype in MEANS
        if is_dense and (can_average or self._policy != "average"):
            return
        name = next(
            f"{prefix}.{name}" if prefix else name
            for prefix, module in self._modules.items()
            for name, other in module._buffers.items()
            if other is buffer
        )
        found = f"buffer {name} is {buffer.dtype} on {buffer.device}, {buffer.layout}"
        if is_dense:
            raise UnsupportedTensor(
                f"{found}: the engine has no mean of that; use buffers='broadcast' or 'local'"
            )
        raise UnsupportedTensor(
            f"{found}: workers share dense buffers; convert it, or keep it as a plain attribute of"
            " the module, which is not synchronised"
        )


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _room(dtype: torch.dtype, count: int) -> int:
    """Return the bytes of a section."""
    return -(-count * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def _owns_its_memory(buffer: Tensor) -> bool:
    """Return whether the buffer is the only user of its memory, so that it may move."""
    is_whole = buffer.untyped_storage().nbytes() == buffer.numel() * buffer.itemsize
    return is_whole and type(buffer) is Tensor and not buffer.requires_grad
