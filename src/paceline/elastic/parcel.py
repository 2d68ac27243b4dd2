"""State on its way from one worker to another: plain data and tensors, by participant.

The donor packs once and sends to each receiver; memory for the tensors is made on arrival, from
shapes that were told before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from paceline.collectives.group import Group
from paceline.elastic.protocol import Parcel
from paceline.errors import ProtocolError

_HEAD, _BODY, _TENSOR = 1, 2, 16  # tags


class _Content(msgspec.Struct, frozen=True):
    """What is in a shipment, apart from the numbers in its tensors."""

    plain: dict[str, Any]
    tensors: dict[str, list[tuple[str, list[int]]]]  # by participant: dtype and shape of each
    result: Any  # of the last point that the donor has passed


class Shipment(msgspec.Struct, frozen=True):
    """What a receiver gets."""

    parcels: dict[str, Any]
    result: Any


def send(
    group: Group, receivers: Sequence[int], parcels: Mapping[str, Parcel], result: Any
) -> None:
    """Send everything to these members of the group (ranks in it). Blocks."""
    content = _Content(
        plain={name: plain for name, (plain, _) in parcels.items()},
        tensors={
            name: [(str(t.dtype).removeprefix("torch."), list(t.shape)) for t in tensors]
            for name, (_, tensors) in parcels.items()
        },
        result=result,
    )
    body = torch.frombuffer(bytearray(msgspec.msgpack.encode(content)), dtype=torch.uint8)
    every = [t.detach().contiguous() for _, tensors in parcels.values() for t in tensors]
    for receiver in receivers:
        group.send(torch.tensor([body.numel()]), receiver, tag=_HEAD)
        group.send(body, receiver, tag=_BODY)
        for number, tensor in enumerate(every):
            if tensor.numel():
                group.send(tensor, receiver, tag=_TENSOR + number)


def receive(group: Group, donor: int) -> Shipment:
    """Receive what the donor (a rank in the group) sends. Blocks."""
    size = torch.zeros(1, dtype=torch.int64)
    group.recv(size, donor, tag=_HEAD)
    body = torch.empty(int(size), dtype=torch.uint8)
    group.recv(body, donor, tag=_BODY)
    content = msgspec.msgpack.decode(body.numpy().tobytes(), type=_Content)
    parcels: dict[str, Any] = {}
    number = 0
    for name, shapes in content.tensors.items():
        tensors = []
        for dtype, shape in shapes:
            tensors.append(torch.empty(shape, dtype=_dtype(dtype)))
            if tensors[-1].numel():
                group.recv(tensors[-1], donor, tag=_TENSOR + number)
            number += 1
        parcels[name] = (content.plain[name], tensors)
    return Shipment(parcels, content.result)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ProtocolError(
            f"a peer sent a tensor of dtype {name!r:.40}, which torch does not have"
        )
    return found
