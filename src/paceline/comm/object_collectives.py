"""Collectives of small Python values, for example to check that all members of a group agree.

For rare use (once at the start, or after a failure), not on the data path. Values are plain data
(numbers, strings, lists, dicts), encoded as msgpack.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from paceline.comm.group import Group
from paceline.errors import ProtocolError, UsageError


def all_gather_object(group: Group, value: Any) -> list[Any]:
    """Return the values of all members, in rank order. Collective and blocking."""
    mine = torch.frombuffer(bytearray(msgspec.msgpack.encode(value)), dtype=torch.uint8)
    sizes = [torch.empty(1, dtype=torch.int64) for _ in range(group.size)]
    group.all_gather(torch.tensor([mine.numel()]), out=sizes)
    messages = [torch.empty(int(size), dtype=torch.uint8) for size in sizes]
    group.all_gather(mine, out=messages)
    return [decode(message.numpy().tobytes()) for message in messages]


def broadcast_object(group: Group, value: Any, root: int = 0) -> Any:
    """Return the value of `root`; other members' values are ignored. Collective and blocking."""
    encoded = msgspec.msgpack.encode(value) if group.rank == root else b""
    size = torch.tensor([len(encoded)])
    group.broadcast(size, root=root)
    message = torch.empty(int(size), dtype=torch.uint8)
    if group.rank == root:
        message = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    group.broadcast(message, root=root)
    return decode(message.numpy().tobytes())


def decode(data: bytes) -> Any:
    """Return the value of another member; raise ProtocolError if these bytes are none."""
    try:
        return msgspec.msgpack.decode(data)
    except (ValueError, TypeError, RecursionError) as error:  # ValueError: msgspec's and Unicode's
        raise ProtocolError(f"a value of {len(data)} bytes cannot be decoded: {error}") from None


def raise_first_problem(ranks: Sequence[int], what: str, problems: Sequence[str | None]) -> None:
    """Raise UsageError for the first problem in the list, and name the ranks that have it.

    If `problems` comes from `all_gather_object`, all members raise the same error.
    """
    first = next((problem for problem in problems if problem is not None), None)
    if first is None:
        return
    having = [str(rank) for rank, p in zip(ranks, problems, strict=True) if p == first]
    named = "" if len(having) == len(ranks) else f" (rank {', '.join(having)})"
    raise UsageError(f"{what}{named}: {first}")


def first_difference(group: Group, entries: list[str]) -> str | None:
    """Compare lists of lines; return the first line in which a member differs from rank 0.

    Every member gets the same answer; None if all lists are equal. Collective and blocking.
    """
    reference: list[str] = broadcast_object(group, entries)
    index = next(
        (i for i, (a, b) in enumerate(zip(reference, entries, strict=False)) if a != b),
        min(len(reference), len(entries)) if len(reference) != len(entries) else -1,
    )
    mine = entries[index] if 0 <= index < len(entries) else "nothing"
    found = [
        (i, group.ranks[r], m) for r, (i, m) in enumerate(all_gather_object(group, (index, mine)))
    ]
    differing = [entry for entry in found if entry[0] >= 0]
    if not differing:
        return None
    index, rank, theirs = min(differing)
    expected = reference[index] if index < len(reference) else "nothing"
    return f"rank {rank} has {theirs}, rank {group.ranks[0]} has {expected}"
