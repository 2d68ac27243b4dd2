"""The messages between clients and data workers.

A REQUEST says which samples make a batch, and the seed of their random numbers, so that every data
worker makes the same batch. A REPLY has the batch (or samples between two stages) in packed form:
plain data, with the tensors in memory that the client can map (a SLOT), or as bytes after it. A
request also returns slots whose tensors the client has freed: there is no message for that.

Nothing is pickled: numbers, strings, lists, tuples, dicts, tensors and arrays are sent, and arrive
with their exact types. Named tuples are sent as well, since both sides run the same script; the
receiver only creates those that it knows already. Any other type is refused. (state/serializer.py
serves another purpose: it keeps no array types, and its tensors have no offsets in one memory.)

Frames are those of the parameter servers (ps/messages.py): a fixed size, and a rest if needed.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch

from paceline.errors import ProtocolError, UsageError
from paceline.ps.connection import decode

REQUEST, REQUEST_REST = 0, 1
# The kinds of messages of one reply. The payload is as many bytes as there was room for.
REPLY, REST, PAYLOAD, TAIL = range(4)
# What a reply may have instead of a batch.
RAISED = "raised"  # the dataset raised an exception
UNKNOWN = "unknown"  # the data worker has no such loader
DIFFERS = "differs"  # the data worker has another loader
ENDED = "ended"  # the stream is shorter

_ALIGNED = 64
_INVALID = (
    *(TypeError, ValueError, KeyError, IndexError, AttributeError),
    *(RuntimeError, ArithmeticError, MemoryError),
)
_TENSOR, _ARRAY, _SCALAR, _TUPLE, _DICT, _NAMED = "t", "a", "s", "u", "d", "n"
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}


class BatchRequest(msgspec.Struct, array_like=True, frozen=True):
    """Which batch to make."""

    seq: int
    loader: int  # by number in the script
    facts: str  # a description of the loader, which must be the same
    epoch: int
    seed: int
    indices: Any = None  # as to_plain_index writes them
    stream: tuple[int, int, int] | None = None  # without indices: workers, rank, samples of a step
    place: int = 0  # number of the batch in a stream
    released: tuple[int, ...] = ()  # slots that may be used again
    room: int = 0  # bytes that the client is ready to receive; between hosts


class SharedSlot(msgspec.Struct, array_like=True, frozen=True):
    """Where the tensors of a reply lie in the memory of the data worker."""

    number: int
    segment: int
    offset: int


class BatchReply(msgspec.Struct, array_like=True, frozen=True):
    """A batch, or why it could not be made."""

    seq: int
    plain: Any = None
    num_bytes: int = 0  # of all tensors
    slot: SharedSlot | None = None  # None: the bytes follow
    problem: str = ""  # RAISED, UNKNOWN, DIFFERS or ENDED
    text: str = ""


_requests = msgspec.msgpack.Decoder(BatchRequest)
_replies = msgspec.msgpack.Decoder(BatchReply)


def read_request(frame: np.ndarray, rest: np.ndarray | None) -> BatchRequest:
    """Decode a request; BadFrame if it is invalid."""
    return decode(_requests, frame, rest)  # type: ignore[no-any-return]


def read_reply(frame: np.ndarray, rest: np.ndarray | None) -> BatchReply:
    """Decode a reply; BadFrame if it is invalid."""
    return decode(_replies, frame, rest)  # type: ignore[no-any-return]


def tag_of(seq: int, kind: int) -> int:
    """Return the tag of a message: REPLY, REST, PAYLOAD or TAIL of the reply to a request."""
    return seq << 2 | kind


# -- packed values --------------------------------------------------------------------------------


@dataclass
class PackedValue:
    """A value as plain data and tensors, with the offsets of the tensors."""

    plain: Any = None
    num_bytes: int = 0
    _tensors: list[tuple[torch.Tensor, int]] = field(default_factory=list)

    def add(self, tensor: torch.Tensor) -> int:
        """Add a tensor, and return its offset."""
        start = self.num_bytes
        self._tensors.append((tensor, start))
        self.num_bytes = -(-(start + tensor.nbytes) // _ALIGNED) * _ALIGNED
        return start

    def write(self, memory: torch.Tensor) -> None:
        """Copy the tensors into flat memory of at least `num_bytes`."""
        for tensor, start in self._tensors:
            if tensor.nbytes:
                target = memory[start : start + tensor.nbytes].view(tensor.dtype)
                target.view(tensor.shape).copy_(tensor)


def pack(value: Any, what: str) -> PackedValue:
    """Return a value in packed form; UsageError names a type that cannot be sent."""
    packed = PackedValue()
    packed.plain = _pack(value, packed, what)
    return packed


def _pack(thing: Any, packed: PackedValue, what: str) -> Any:
    kind = type(thing)
    if thing is None or kind in (bool, float, str, bytes):
        return thing
    if kind is int and -(2**63) <= thing < 2**64:
        return thing
    if kind is list:
        return [_pack(item, packed, what) for item in thing]
    if kind is tuple:
        return {_TUPLE: [_pack(item, packed, what) for item in thing]}
    if kind is dict:
        pairs = [(_pack(k, packed, what), item) for k, item in thing.items()]
        return {_DICT: [[k, _pack(item, packed, what)] for k, item in pairs]}
    if kind in (torch.Tensor, torch.nn.Parameter) and thing.layout is torch.strided:
        if thing.device.type == "cpu" and not thing.is_quantized:
            return _pack_tensor(
                _TENSOR, thing.detach(), str(thing.dtype).removeprefix("torch."), packed
            )
    elif kind is np.ndarray or isinstance(thing, np.generic):
        if thing.dtype.kind in "biufc" and thing.dtype.isnative:
            flat = np.ascontiguousarray(thing).reshape(-1).view(np.uint8)
            form = _ARRAY if kind is np.ndarray else _SCALAR
            return {form: [thing.dtype.str, list(thing.shape), packed.add(torch.from_numpy(flat))]}
    elif isinstance(thing, tuple) and hasattr(thing, "_fields"):
        name = [kind.__module__, kind.__qualname__]
        return {_NAMED: [*name, [_pack(item, packed, what) for item in thing]]}
    raise UsageError(
        f"{what} has a {kind.__module__}.{kind.__qualname__} in it, which cannot be sent from one"
        " process to another; only numbers, strings, lists, tuples, dicts, CPU tensors and numpy"
        " arrays of numbers can: convert it in the dataset, the stage or collate_fn"
    )


def _pack_tensor(form: str, tensor: torch.Tensor, dtype: str, packed: PackedValue) -> Any:
    return {form: [dtype, list(tensor.shape), packed.add(tensor.resolve_conj().resolve_neg())]}


def unpack(plain: Any, memory: torch.Tensor | None) -> Any:
    """Return a value from its packed form; its tensors lie in `memory`. Raises ProtocolError."""
    try:
        return _unpack(plain, memory)
    except _INVALID as error:
        raise ProtocolError(f"a batch arrived that cannot be unpacked: {error}") from error


def _unpack(plain: Any, memory: torch.Tensor | None) -> Any:
    if isinstance(plain, list):
        return [_unpack(item, memory) for item in plain]
    if not isinstance(plain, dict):
        return plain
    ((form, content),) = plain.items()
    if form == _TUPLE:
        return tuple(_unpack(item, memory) for item in content)
    if form == _DICT:
        return {_unpack(k, memory): _unpack(item, memory) for k, item in content}
    if form == _NAMED:
        module, name, items = content
        return _named_tuple(module, name)._make(_unpack(item, memory) for item in items)
    dtype, shape, start = content
    if form == _TENSOR:
        return _tensor(_DTYPES[dtype], shape, start, memory)
    count = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    flat = _tensor(torch.uint8, [count], start, memory).numpy().view(dtype).reshape(shape)
    return flat if form == _ARRAY else flat[()]


def _tensor(dtype: torch.dtype, shape: Any, start: int, memory: torch.Tensor | None) -> Any:
    size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    if size == 0:
        return torch.empty(shape, dtype=dtype)
    if memory is None:
        raise ValueError("it has tensors, but no memory came with it")
    return memory[start : start + size].view(dtype).view(shape)


def _named_tuple(module: str, name: str) -> Any:
    found: Any = sys.modules[module]
    for part in name.split("."):
        found = getattr(found, part)
    if not (isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_fields")):
        raise ValueError(f"{module}.{name} is not a named tuple")
    return found
