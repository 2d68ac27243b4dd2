"""Targets of data workers, of state for a joining worker, and of values that processes return."""

from __future__ import annotations

import msgspec
import torch

from fuzz.control_targets import receive_all
from fuzz.server_targets import _frame_and_rest, framed
from fuzz.target import target
from paceline.comm import object_collectives
from paceline.data.workers import messages as batches
from paceline.errors import BadFrame, PacelineError
from paceline.launcher.function import plain_values
from paceline.launcher.hosts import agent, connect
from paceline.launcher.hosts.messages import Invitation
from paceline.launcher.processes import template_main
from paceline.state import serializer, transfer

_MEMORY = torch.zeros(512, dtype=torch.uint8)


@target(BadFrame, form="msgpack")
def batch_request(data: bytes) -> None:
    batches.read_request(*_frame_and_rest(framed(data)))


@target(PacelineError, form="msgpack")
def batch_reply(data: bytes) -> None:
    reply = batches.read_reply(*_frame_and_rest(framed(data)))
    batches.unpack(reply.plain, _MEMORY if reply.num_bytes else None)


@target(PacelineError, form="msgpack")
def state_of_a_peer(data: bytes) -> None:
    """What a joining worker receives: the message, without its tensors."""
    content = transfer.decode_content(data)
    small = [(dtype, shape) for dtype, shape in content.tensors if _is_small(shape)]
    if len(small) == len(content.tensors):
        transfer.build_states(content, transfer.allocate(content))


def _is_small(shape: list[int]) -> bool:
    """Tensors of a peer may be as large as the model: that is not looked for."""
    product = 1
    for size in shape:
        product *= max(size, 1)
    return product < 1 << 16


@target(PacelineError, form="json")
def state_in_a_checkpoint(data: bytes) -> None:
    try:
        written = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    serializer.state_from_json(written, {"part/0": _MEMORY})


@target(PacelineError, form="msgpack")
def returned_value(data: bytes) -> None:
    """What a launched function returns to its caller."""
    plain_values.unpack(data)


@target(PacelineError, form="msgpack")
def template_reply(data: bytes) -> None:
    """The template's answer to the launcher."""
    template_main.read_reply(data)


@target(BadFrame, form="json")
def invitation_of_an_agent(data: bytes) -> None:
    Invitation.decode(data)


@target(PacelineError, form="msgpack")
def message_to_agent(data: bytes) -> None:
    receive_all([data], agent._decoder)


@target(PacelineError, form="msgpack")
def message_of_agent(data: bytes) -> None:
    receive_all([data], connect._decoder)


@target(PacelineError, form="msgpack")
def gathered_object(data: bytes) -> None:
    object_collectives.decode(data)
