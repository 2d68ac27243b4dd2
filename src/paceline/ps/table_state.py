"""What the servers' optimizer remembers about a table, as a worker fetches it and sends it back.

Entries are about PIECES: what a shard has of one parameter. Any one worker may fetch, whenever it
likes; who sends replaces what was there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from paceline.ps import messages as m
from paceline.ps.optimizer import StateEntry
from paceline.ps.placement import Part
from paceline.ps.remote_table import RemoteTable
from paceline.ps.spec import ShardSpec
from paceline.ps.state_wire import from_entries, landing, to_entries


def fetch(table: RemoteTable) -> Iterator[tuple[Part, ShardSpec, list[StateEntry]]]:
    """Yield the entries of every shard."""
    for link, number, spec, part in table.shards():
        landed: list[torch.Tensor] = []

        def land(reply: m.Reply, landed: list[torch.Tensor] = landed) -> Sequence[torch.Tensor]:
            landed[:] = landing(reply.entries)
            return landed

        on_server = table.table_on(link)
        reply = link.ask(
            lambda seq, t=on_server, n=number: m.FetchState(seq, t, n),  # type: ignore[misc]
            into=land,
        ).wait()
        yield part, spec, list(from_entries(reply.entries, landed))


def send(table: RemoteTable, entries: Callable[[Part, ShardSpec], list[StateEntry]]) -> None:
    """Replace the entries of every shard. Blocks."""
    for link, number, spec, part in table.shards():
        told, tensors = to_entries(entries(part, spec))
        on_server = table.table_on(link)
        link.ask(
            lambda seq, t=on_server, n=number, e=told: m.LoadState(seq, t, n, e),  # type: ignore[misc]
            payload=lambda tensors=tensors: tensors,  # type: ignore[misc]
        ).wait()
