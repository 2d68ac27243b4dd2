"""Tags and field names of messages and files do not follow the names of classes.

Processes of one job may run different builds of one protocol version, `events.jsonl` and the
checkpoints outlive the version that wrote them, and a journal is read by the coordinator's
replacement. wire_formats.txt has what is sent and written. If a change of it is meant, write it
again with `WIRE_FORMATS=write`, and raise the version of the format if older readers cannot
read the new one.
"""

from __future__ import annotations

import os
import typing
from pathlib import Path
from typing import Any

import msgspec

from paceline.control import messages, operator_messages
from paceline.control.coordinator import journal
from paceline.control.transport import auth
from paceline.data.workers import messages as data_messages
from paceline.observe.telemetry import file_formats
from paceline.ps import messages as ps_messages
from paceline.ps.replication import messages as replication_messages
from paceline.state.files import manifest

LIST = Path(__file__).with_name("wire_formats.txt")
ROOTS = {
    "handshake": (auth.Hello, auth.Challenge, auth.Proof),
    "control": (
        messages.MemberMessage,
        messages.CoordinatorMessage,
        operator_messages.OperatorMessage,
        operator_messages.ToOperator,
    ),
    "journal": (journal.Entry,),
    "servers": (ps_messages.AnyRequest, ps_messages.Reply),
    "replication": (replication_messages.AnyMessage,),
    "data workers": (data_messages.BatchRequest, data_messages.BatchReply),
    "events.jsonl": (file_formats.EventLine,),
    "checkpoint": (manifest.Manifest,),
}


def structs_in(kind: Any, found: dict[type, None]) -> None:
    """Collect the structs that a value of this type can contain."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        if kind not in found:
            found[kind] = None
            for inner in typing.get_type_hints(kind).values():
                structs_in(inner, found)
        return
    for inner in typing.get_args(kind):
        structs_in(inner, found)


def format_of(struct: type[msgspec.Struct]) -> str:
    tag = struct.__struct_config__.tag
    return f"{'-' if tag is None else tag}: {' '.join(struct.__struct_encode_fields__)}".rstrip()


def test_tags_and_fields_are_the_listed_ones() -> None:
    lines = []
    for title, roots in ROOTS.items():
        found: dict[type, None] = {}
        for root in roots:
            structs_in(root, found)
        lines += [f"[{title}]", *sorted(map(format_of, found)), ""]
    if os.environ.get("WIRE_FORMATS") == "write":
        LIST.write_text("\n".join(lines))
    assert lines == LIST.read_text().split("\n")
