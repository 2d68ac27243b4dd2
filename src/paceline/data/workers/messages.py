"""What askers and data workers say to each other.

An ORDER says which samples make a batch and from which seed their random numbers follow, so that
whoever carries it out makes the same. A REPLY has the batch, or samples between two stages, taken
apart: a PARCEL of plain data, with its tensors in memory that the asker can read (a SLOT), or after
it as bytes. An order also gives back slots whose tensors the asker no longer holds: no message of
their own.

Nothing is pickled: numbers, texts, lists, tuples, dicts, tensors and arrays travel, and arrive as
the types that they were. Named tuples do too, since asker and maker run the same script: only a
named tuple that the asker knows already is made again. Whatever else a batch has in it is refused.

Frames are those of the parameter servers (ps/messages.py): a fixed size, and a rest if need be.
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

ORDER, ORDER_REST = 0, 1
_REPLY, _REST, _PAYLOAD, _TAIL = range(4)
# What a reply may say instead of a batch.
RAISED = "raised"  # the dataset did
UNKNOWN = "unknown"  # no such loader there
DIFFERS = "differs"  # another loader there
ENDED = "ended"  # the stream has no such place any more

_ALIGNED = 64
_TENSOR, _ARRAY, _SCALAR, _TUPLE, _DICT, _NAMED = "t", "a", "s", "u", "d", "n"
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}


class Order(msgspec.Struct, array_like=True, frozen=True):
    """What to make."""

    seq: int
    loader: int  # the loaders of a script are counted
    facts: str  # what that loader is: it must be the same one
    epoch: int
    seed: int
    indices: Any = None  # as data/split/order.py writes them
    stream: tuple[int, int, int] | None = None  # without indices: workers, rank, samples of a step
    place: int = 0  # in a stream
    released: tuple[int, ...] = ()  # slots that may be used again
    room: int = 0  # bytes that the asker is ready to receive; between hosts


class Slot(msgspec.Struct, array_like=True, frozen=True):
    """Where the tensors of a reply lie in the memory of who made them."""

    number: int
    segment: int
    offset: int


class Reply(msgspec.Struct, array_like=True, frozen=True):
    """What was made, or why it could not be."""

    seq: int
    plain: Any = None
    num_bytes: int = 0  # of all tensors
    slot: Slot | None = None  # None: they follow
    problem: str = ""  # RAISED, UNKNOWN, DIFFERS or ENDED
    text: str = ""


_orders = msgspec.msgpack.Decoder(Order)
_replies = msgspec.msgpack.Decoder(Reply)


def read_order(frame: np.ndarray, rest: np.ndarray | None) -> Order:
    """Decode an order; BadFrame if it is none."""
    return decode(_orders, frame, rest)  # type: ignore[no-any-return]


def read_reply(frame: np.ndarray, rest: np.ndarray | None) -> Reply:
    """Decode a reply; BadFrame if it is none."""
    return decode(_replies, frame, rest)  # type: ignore[no-any-return]


def reply_tag(seq: int) -> int:
    """Under which the frame of a reply travels."""
    return seq << 2 | _REPLY


def rest_tag(seq: int) -> int:
    """The rest of a frame."""
    return seq << 2 | _REST


def payload_tag(seq: int) -> int:
    """The bytes of the tensors, as many as there was room for."""
    return seq << 2 | _PAYLOAD


def tail_tag(seq: int) -> int:
    """The bytes for which there was no room."""
    return seq << 2 | _TAIL


# -- values taken apart ---------------------------------------------------------------------------


@dataclass
class Parcel:
    """Plain data, and the tensors that belong to it with their places."""

    plain: Any = None
    num_bytes: int = 0
    _tensors: list[tuple[torch.Tensor, int]] = field(default_factory=list)

    def add(self, tensor: torch.Tensor) -> int:
        """Give a tensor its place."""
        start = self.num_bytes
        self._tensors.append((tensor, start))
        self.num_bytes = -(-(start + tensor.nbytes) // _ALIGNED) * _ALIGNED
        return start

    def write(self, memory: torch.Tensor) -> None:
        """Copy the tensors into flat memory of at least `num_bytes`."""
        for tensor, start in self._tensors:
            if tensor.nbytes:
                place = memory[start : start + tensor.nbytes].view(tensor.dtype)
                place.view(tensor.shape).copy_(tensor)


def pack(value: Any, what: str) -> Parcel:
    """Take a value apart; UsageError names what cannot travel."""
    parcel = Parcel()
    parcel.plain = _taken_apart(value, parcel, what)
    return parcel


def _taken_apart(thing: Any, parcel: Parcel, what: str) -> Any:
    kind = type(thing)
    if thing is None or kind in (bool, float, str, bytes):
        return thing
    if kind is int and -(2**63) <= thing < 2**64:
        return thing
    if kind is list:
        return [_taken_apart(item, parcel, what) for item in thing]
    if kind is tuple:
        return {_TUPLE: [_taken_apart(item, parcel, what) for item in thing]}
    if kind is dict:
        pairs = [(_taken_apart(k, parcel, what), item) for k, item in thing.items()]
        return {_DICT: [[k, _taken_apart(item, parcel, what)] for k, item in pairs]}
    if kind in (torch.Tensor, torch.nn.Parameter) and thing.layout is torch.strided:
        if thing.device.type == "cpu" and not thing.is_quantized:
            return _placed(_TENSOR, thing.detach(), str(thing.dtype).removeprefix("torch."), parcel)
    elif kind is np.ndarray or isinstance(thing, np.generic):
        if thing.dtype.kind in "biufc" and thing.dtype.isnative:
            flat = np.ascontiguousarray(thing).reshape(-1).view(np.uint8)
            form = _ARRAY if kind is np.ndarray else _SCALAR
            return {form: [thing.dtype.str, list(thing.shape), parcel.add(torch.from_numpy(flat))]}
    elif isinstance(thing, tuple) and hasattr(thing, "_fields"):
        name = [kind.__module__, kind.__qualname__]
        return {_NAMED: [*name, [_taken_apart(item, parcel, what) for item in thing]]}
    raise UsageError(
        f"{what} has a {kind.__module__}.{kind.__qualname__} in it, which cannot be sent from one"
        " process to another; only numbers, texts, lists, tuples, dicts, tensors of the CPU and"
        " numpy arrays of numbers can: convert it in the dataset, the stage or collate_fn"
    )


def _placed(form: str, tensor: torch.Tensor, dtype: str, parcel: Parcel) -> Any:
    return {form: [dtype, list(tensor.shape), parcel.add(tensor.resolve_conj().resolve_neg())]}


def unpack(plain: Any, memory: torch.Tensor | None) -> Any:
    """Put a value together again; its tensors lie in `memory`. ProtocolError if they cannot."""
    try:
        return _put_together(plain, memory)
    except (TypeError, ValueError, KeyError, IndexError, RuntimeError, AttributeError) as error:
        raise ProtocolError(f"a batch arrived that cannot be put together: {error}") from error


def _put_together(plain: Any, memory: torch.Tensor | None) -> Any:
    if isinstance(plain, list):
        return [_put_together(item, memory) for item in plain]
    if not isinstance(plain, dict):
        return plain
    ((form, content),) = plain.items()
    if form == _TUPLE:
        return tuple(_put_together(item, memory) for item in content)
    if form == _DICT:
        return {_put_together(k, memory): _put_together(item, memory) for k, item in content}
    if form == _NAMED:
        module, name, items = content
        return _named_tuple(module, name)._make(_put_together(item, memory) for item in items)
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
    assert memory is not None, "tensors come with their memory"
    return memory[start : start + size].view(dtype).view(shape)


def _named_tuple(module: str, name: str) -> Any:
    found: Any = sys.modules[module]
    for part in name.split("."):
        found = getattr(found, part)
    if not (isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_fields")):
        raise ValueError(f"{module}.{name} is no named tuple")
    return found
