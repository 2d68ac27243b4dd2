"""A process group of torch.distributed without its collectives: names, submission, shutdown.

torch's interface of a group has more than collectives (names, devices, sequence numbers,
splitting), and its C++ side calls back through a trampoline that finds these methods by name.
`backend.py` adds the collectives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from paceline.comm.group import Group
from paceline.comm.torch.arguments import CollectiveCall
from paceline.comm.torch.work import NOT_TIMED, DoneWork, ProfilerEvent, TorchWork
from paceline.errors import UnsupportedTensor, UsageError

_CPU = torch.device("cpu")
DONE = DoneWork()
_MANY_IN_FLIGHT = 64

is_profiled: Callable[[], bool] = torch._C._autograd._profiler_enabled
# torch's stubs give many methods several signatures; these methods accept all of them.
_ProcessGroup: Any = c10d.ProcessGroup


class EngineProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """A torch.distributed process group on the engine, without the collectives."""

    def __init__(
        self, group: Group, store: c10d.Store, on_shutdown: Callable[[], None] | None = None
    ) -> None:
        # Without the store: only this constructor of torch's creates a subclassable instance.
        super().__init__(group.rank, group.size)
        self.waiting: AbstractContextManager[None] = NOT_TIMED  # entered while a call blocks
        self._group = group
        self._core = group._core
        self._members = group.size
        self._store = store
        self._on_shutdown = on_shutdown
        self._sequence = 0
        self._in_flight: deque[TorchWork] = deque()
        self._batch: list[TorchWork] | None = None  # between _start_ and _end_coalescing
        self._name = self._desc = ""
        self._barriers = 0  # monitored barriers so far

    # -- running ------------------------------------------------------------------------------

    def _submit(
        self, title: str, calls: Sequence[CollectiveCall], shown: list[Tensor], opts: Any
    ) -> c10d.Work:
        """Run collectives that torch sees as one; a profiler shows `shown` as their inputs."""
        self._sequence += 1
        if not opts.asyncOp and not is_profiled():
            for call in calls:
                with self.waiting:
                    self._core.run(*call.arguments)
                for target in call.targets:
                    target.write_back()
            return DONE
        event = start_profiler_event(title, shown)
        work = TorchWork(
            [self._core.start(*call.arguments) for call in calls],
            [target for call in calls for target in call.targets],
            [result for call in calls for result in call.results],
            calls,
        )
        return self._track(work, event, opts.asyncOp)

    def _track(self, work: TorchWork, event: ProfilerEvent | None, is_async: bool) -> c10d.Work:
        """Keep memory in use alive, even if the caller drops the work; wait if not async."""
        work.waiting = self.waiting
        if event is not None:
            work.trace(event)
        if not is_async:
            work.wait()
            return work
        flying = self._in_flight
        while flying and flying[0].has_ended():  # collectives end in order
            flying.popleft()
        if len(flying) >= _MANY_IN_FLIGHT:  # an early receive may take long
            self._in_flight = flying = deque(other for other in flying if not other.has_ended())
        flying.append(work)
        if self._batch is not None:
            self._batch.append(work)
        return work

    # -- coalescing ---------------------------------------------------------------------------

    def _start_coalescing(self, device: torch.device) -> None:  # noqa: ARG002
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> c10d.Work:  # noqa: ARG002
        works, self._batch = self._batch or [], None
        return _join_works(works)

    # -- checks -------------------------------------------------------------------------------

    def _check_parts(self, parts: Sequence[object], kind: str) -> None:
        if len(parts) != self._members:
            raise UsageError(
                f"{kind}: {len(parts)} tensors for a group of {self._members}; pass one for each"
                " rank"
            )

    def _parts(self, tensors: Any, kind: str) -> list[Tensor]:
        """Return one tensor for each rank; torch may wrap that list in another list."""
        parts = tensors[0] if isinstance(tensors[0], (list, tuple)) else tensors
        self._check_parts(parts, kind)
        return list(parts)

    # -- torch's interface of a group ---------------------------------------------------------

    def getBackendName(self) -> str:
        return "paceline"

    name = _get_backend_name = getBackendName

    # torch keeps a group's name in its C++ backends; this group has none.
    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, desc: str) -> None:
        self._desc = desc

    def getGroupDesc(self) -> str:
        return self._desc

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        return [_CPU]

    def _get_backend(self, device: torch.device) -> Any:
        if torch.device(device).type != "cpu":
            raise UnsupportedTensor(
                f"the paceline backend moves CPU tensors, and this group has no backend for"
                f" {device}; call .cpu() first"
            )
        return self

    def _backend_id(self, backend_type: Any) -> int:  # noqa: ARG002
        return id(self)

    supports_splitting = False  # in torch's sense: together with a device's communicator
    supports_coalescing = False
    supports_time_estimate = False
    supports_shrinking = False

    def supports_tensor_alloc(self, device: torch.device) -> bool:  # noqa: ARG002
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        raise UsageError(
            f"set_timeout({timeout}): the timeout of a group cannot change; pass it to"
            " init_process_group or new_group"
        )

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        for work in list(self._in_flight):
            work.wait()

    def _set_sequence_number_for_group(self) -> None:
        self._sequence = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def get_group_store(self) -> c10d.Store:
        return self._store

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,  # noqa: ARG002
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,  # noqa: ARG002
    ) -> EngineProcessGroup | None:
        """Form a group of some members (ranks of this group); return None on other ranks."""
        if self.rank() not in ranks:
            return None
        members = [self._group.ranks[rank] for rank in ranks]
        limit_s = None if timeout is None else timeout.total_seconds()
        name = group_name or f"{self.group_name}:split:{','.join(map(str, ranks))}"
        subgroup = Group(self._group._fabric, members, limit_s)
        split = type(self)(subgroup, c10d.PrefixStore(f"{name}/", self._store))
        split._set_group_name(name)
        split._set_group_desc(group_desc or f"{self.group_desc}:split")
        return split

    splitGroup = split_group

    # -- shutdown -----------------------------------------------------------------------------

    def abort(self) -> None:
        """End the operations in flight on all members with an error, and close the group."""
        self._core.fail(f"rank {self._group.ranks[self.rank()]} aborted the process group")
        self.shutdown()

    def shutdown(self) -> None:
        """Close the group; called by destroy_process_group. May be called twice."""
        self._group.close()
        self._in_flight.clear()
        on_shutdown, self._on_shutdown = self._on_shutdown, None
        if on_shutdown is not None:
            on_shutdown()


def start_profiler_event(title: str, tensors: list[Tensor]) -> ProfilerEvent | None:
    """Start the profiler event of an operation, if a profiler runs."""
    return ProfilerEvent(title, tensors) if is_profiled() else None


def _join_works(works: Sequence[TorchWork]) -> TorchWork:
    handles = [handle for work in works for handle in work.handles]
    targets = [target for work in works for target in work.targets]
    outputs = [output for work in works for output in work.outputs]
    joined = TorchWork(handles, targets, outputs, works)
    if works:
        joined.waiting = works[0].waiting
    return joined
