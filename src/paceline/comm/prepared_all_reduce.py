"""PreparedAllReduce: an all-reduce of the same memory in every step."""

from __future__ import annotations

from paceline.comm.group import Group
from paceline.comm.tensors import Buffer, Tensor, op_code, require_match, result_buffer
from paceline.errors import UsageError
from paceline.runtime.work import Handle


class PreparedAllReduce:
    """An all-reduce whose arguments are checked once, for memory that is reduced in every step."""

    def __init__(self, group: Group, tensor: Tensor, op: str, out: Tensor) -> None:
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
