"""State transfer to a peer: one message with all plain data, then the tensors.

The source takes the states once and sends them to each receiver; a receiver allocates tensors from
the dtypes and shapes in the message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from paceline.comm.group import Group
from paceline.errors import ProtocolError
from paceline.state.protocol import State
from paceline.state.serializer import flatten_state, unflatten_state

_HEAD, _BODY, _TENSOR = 1, 2, 16  # tags


class _Content(msgspec.Struct, frozen=True):
    """Everything except the values of tensors."""

    counts: dict[str, Any]  # by part
    entries: dict[str, Any]  # by part: [shared, copied, passing], flattened
    tensors: list[tuple[str, list[int]]]  # dtype and shape
    result: Any


def send(group: Group, receivers: Sequence[int], states: Mapping[str, State], result: Any) -> None:
    """Send states by part, and a plain result, to these ranks of the group. Blocks."""
    entries, tensors = dict[str, Any](), list[torch.Tensor]()
    for name, state in states.items():
        sent = [dict(kind) for kind in (state.shared, state.copied, state.passing)]
        entries[name], _ = flatten_state(sent, state.what or name, tensors)
    content = _Content(
        counts={name: state.counts for name, state in states.items()},
        entries=entries,
        tensors=[(str(t.dtype).removeprefix("torch."), list(t.shape)) for t in tensors],
        result=result,
    )
    body = torch.frombuffer(bytearray(msgspec.msgpack.encode(content)), dtype=torch.uint8)
    every = [tensor.contiguous().cpu() for tensor in tensors]  # from a device: through the host
    for receiver in receivers:
        group.send(torch.tensor([body.numel()]), receiver, tag=_HEAD)
        group.send(body, receiver, tag=_BODY)
        for number, tensor in enumerate(every):
            if tensor.numel():
                group.send(tensor, receiver, tag=_TENSOR + number)


def receive(group: Group, source: int) -> tuple[dict[str, State], Any]:
    """Return the states by part and the result that a rank of the group sends. Blocks."""
    size = torch.zeros(1, dtype=torch.int64)
    group.recv(size, source, tag=_HEAD)
    body = torch.empty(int(size), dtype=torch.uint8)
    group.recv(body, source, tag=_BODY)
    content = decode_content(body.numpy().tobytes())
    tensors = allocate(content)
    for number, tensor in enumerate(tensors):
        if tensor.numel():
            group.recv(tensor, source, tag=_TENSOR + number)
    return build_states(content, tensors), content.result


def decode_content(data: bytes) -> _Content:
    """Return the message of a peer; raise ProtocolError if these bytes are none."""
    try:
        return msgspec.msgpack.decode(data, type=_Content)
    except (ValueError, TypeError, RecursionError) as error:  # ValueError: msgspec's and Unicode's
        raise ProtocolError(f"the state of a peer cannot be decoded: {error}") from None


def allocate(content: _Content) -> list[torch.Tensor]:
    """Return memory for the tensors that follow a message."""
    try:
        return [torch.empty(shape, dtype=_dtype(dtype)) for dtype, shape in content.tensors]
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"a peer sent a tensor that cannot be allocated: {error}") from None


def build_states(content: _Content, tensors: Sequence[torch.Tensor]) -> dict[str, State]:
    """Return the states by part, with these tensors in them."""
    states = {}
    try:
        for name, entries in content.entries.items():
            shared, copied, passing = unflatten_state(entries, tensors)
            states[name] = State(content.counts[name], shared, copied, passing=passing)
    except (KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"the state {name!r:.80} of a peer is invalid: {error!r}") from None
    return states


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ProtocolError(
            f"a peer sent a tensor of dtype {name!r:.40}, which this version of torch does not have"
        )
    return found
