"""Exchange through parameter servers: lockstep, free-running, or bounded in between.

Buckets are pushed while backward still runs and stay provisional until the worker commits its step;
the servers then run the optimizer, and fresh parameters come back. `ps`, `backup`, `async` and
`ssp` differ in the rule that the servers get. Here the first two differ in one point: when backward
returns, gradients have been averaged, and the script sees the average.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.pace.exchange import Bucket, Exchange, ExchangeTraits
from paceline.ps import messages as m
from paceline.ps.client.remote_table import RemoteTable
from paceline.ps.client.transfer import Packets
from paceline.ps.packing import Packing
from paceline.ps.spec import Rule
from paceline.runtime.work import Together, Work
from paceline.state.protocol import Change, Part, State


class ServerExchange(Exchange):
    """Exchanges buckets through tables on the servers; a table has one or more buckets."""

    def __init__(self, rule: Rule, packing: Packing | None = None) -> None:
        self._rule = rule
        # A free-running step is compressed once, with the script's changes to its gradients.
        self.pushes_late = packing is not None and not rule.aggregate
        keeps = packing is not None and not self.pushes_late and packing.codec.has_feedback
        self.traits = ExchangeTraits(verb="push", keeps_residual=keeps, work_is_whole=True)
        self.tables: list[RemoteTable] = []
        self._location: dict[int, tuple[RemoteTable, int]] = {}  # by bucket: its table, its number
        self._first: dict[int, int] = {}  # by bucket: number of its first parameter in the mask
        self._num_params = 0
        self._pushed: list[tuple[Bucket, Work[Any]]] = []
        self.speakers = {0}  # lockstep: the workers that send changes to the averages for all
        self.nonfinite = ""  # why the last averages must not be applied, in lockstep

    def add(self, buckets: Sequence[Bucket], table: RemoteTable) -> None:
        """Exchange these buckets through that table, of which they are the items."""
        self.tables.append(table)
        for number, bucket in enumerate(buckets):
            self._location[bucket.index] = (table, number)
            self._first[bucket.index] = self._num_params
            self._num_params += len(table.items[number].held)

    def submit(self, bucket: Bucket, step: int) -> Work[Any]:
        if self._rule.push != "grad" or self.pushes_late:  # what is pushed does not exist yet
            return Together(()).work()
        work = self.push(bucket, bucket.absent, step)
        self._pushed.append((bucket, work))
        return work

    def reduce_used_mask(self, here: torch.Tensor) -> torch.Tensor:
        pushed, self._pushed = self._pushed, []
        if not self._rule.aggregate:
            return here
        had, notices, speakers = torch.ones_like(here), set[str](), set[int]()
        for bucket, work in pushed:
            first = self._first[bucket.index]
            for reply in work.wait():
                notices.add(reply.notice)
                speakers.add(reply.speaker)
                had[[first + number for number in reply.absent]] = 0.0
        self.nonfinite = "; ".join(sorted(notices - {""}))
        self.speakers = speakers or self.speakers
        return had

    def push(self, bucket: Bucket, absent: Sequence[int], key: int | None = None) -> Work[Any]:
        """Push a bucket, perhaps again; the newest one counts. See RemoteTable for `key`."""
        table, number = self._location[bucket.index]
        return table.push(number, absent, key)

    def left_out(self, bucket: Bucket) -> torch.Tensor | None:
        """Return the part of a bucket's gradients that has not been sent yet, or None."""
        table, number = self._location[bucket.index]
        return table.left_out(number)

    @property
    def residuals(self) -> Part:
        return _Packed([table.packets for table in self.tables])

    def outbox(self, bucket: Bucket) -> torch.Tensor:
        """Return the memory from which a bucket is pushed."""
        table, number = self._location[bucket.index]
        return table.items[number].grads

    def replace(self, bucket: Bucket, absent: Sequence[int]) -> None:
        """Send the servers the script's changes to the averaged gradients of a bucket."""
        table, number = self._location[bucket.index]
        table.replace(number, absent)

    def assign(self, bucket: Bucket, numbers: Sequence[int]) -> None:
        """Send the servers the script's changes to parameters of a bucket."""
        table, number = self._location[bucket.index]
        table.assign(number, numbers)

    def commit(
        self, settings: Sequence[dict[str, Any]] | None, *, stops: bool = False
    ) -> Work[list[list[m.Reply]]]:
        """End the step; done when fresh values are in the buckets' `params`."""
        return Together([table.commit(settings, stops=stops) for table in self.tables]).work()

    def commit_each(
        self, settings: Sequence[dict[str, Any]] | None, *, stops: bool = False
    ) -> list[tuple[RemoteTable, Work[list[m.Reply]]]]:
        """End the step table by table, the first layers' first; each is done on its own."""
        return [(table, table.commit(settings, stops=stops)) for table in reversed(self.tables)]

    def show(self, buckets: Sequence[Bucket]) -> None:
        """Bring fresh values from the tables' memory to the buckets' `params`: they are the same
        memory here, but not on a device (through_host/served.py)."""

    def collect(self, bucket: Bucket) -> None:
        """Bring a bucket's `params` to the tables' memory."""

    def table_of(self, bucket: Bucket) -> RemoteTable:
        """Return the table that a bucket is exchanged through."""
        return self._location[bucket.index][0]

    def pull(self, *, in_turn: bool = False) -> Work[list[list[m.Reply]]]:
        """Read the newest values into the buckets' `params`, without a step."""
        return Together([table.pull(in_turn=in_turn) for table in self.tables]).work()


class _Packed(Part):
    """The packets of all tables, as one part."""

    def __init__(self, packets: Sequence[Packets]) -> None:
        self._packets = packets

    def state(self) -> State:
        kept = [tensor for packets in self._packets for tensor in packets.own()]
        return State(
            counts=[packets.counts() for packets in self._packets],
            own={str(number): tensor for number, tensor in enumerate(kept)},
        )

    def load(self, state: State, change: Change | None) -> None:  # noqa: ARG002
        self.state().fill(state)
        for packets, theirs in zip(self._packets, state.counts, strict=True):
            packets.recount(theirs)
