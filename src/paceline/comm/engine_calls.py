"""EngineCalls: how a group calls the engine; PreparedAllReduce: an all-reduce of the same memory in
every step."""

from __future__ import annotations

import threading
from collections import deque

from paceline._core import KINDS
from paceline._core import Group as EngineGroup
from paceline.comm.device_staging import GroupStaging, OperationQueue
from paceline.comm.tensors import Buffer, Tensor, op_code, require_match, result_buffer
from paceline.errors import UsageError
from paceline.runtime.work import Handle

_BARRIER = KINDS.index("barrier")


class EngineCalls:
    """The operations of one group: in order, and with the memory of those in flight kept alive."""

    _core: EngineGroup

    def _expect_calls(self, staging: GroupStaging) -> None:
        """Start without operations, after the group was formed."""
        self._lock = threading.Lock()
        # Operations and the memory that they use; guarded by: _lock
        self._in_flight: deque[tuple[Handle, object]] = deque()
        self._queue = OperationQueue(staging)

    def engine_group(self) -> EngineGroup:
        """Return the engine's group, when it has got all earlier operations of this group."""
        if self._queue.last is not None:
            self._queue.wait_until_started()
        return self._core

    def blocking_barrier(self) -> None:
        """Wait until every rank has called this: `barrier`, without its choice."""
        self.engine_group().run(_BARRIER, 0, 0, 0, [], [], ())

    def keep_alive(self, handle: Handle, memory: object) -> None:
        """Keep the memory of an operation in flight alive, even if the caller drops its Work."""
        with self._lock:
            while self._in_flight and self._in_flight[0][0].done():
                self._in_flight.popleft()
            self._in_flight.append((handle, memory))


class PreparedAllReduce:
    """An all-reduce whose arguments are checked once, for memory that is reduced in every step."""

    def __init__(self, group: EngineCalls, tensor: Tensor, op: str, out: Tensor) -> None:
        source, target = Buffer(tensor), result_buffer(out)
        require_match(source, target, "all_reduce")
        if source.is_copy or target.is_copy:
            raise UsageError("a prepared all_reduce needs contiguous tensors; call .contiguous()")
        self._group, self._memory = group, (source, target)
        memory = (source.address, target.address, source.count, source.dtype)
        self._arguments = (*memory, op_code(op, source.dtype), source.shape)

    def start(self) -> Handle:
        """Start the all-reduce and return its handle."""
        handle = self._group.engine_group().start_all_reduce(*self._arguments)
        self._group.keep_alive(handle, self._memory)
        return handle

    def run(self) -> None:
        """Run the all-reduce and wait for it."""
        self._group.engine_group().all_reduce(*self._arguments)
