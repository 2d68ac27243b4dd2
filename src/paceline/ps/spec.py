"""What servers are told about the parameters that they hold.

A TABLE is everything that shares one set of clocks and one optimizer: a model, or one key of the
neutral client. Its flat tensors are cut into SHARDS, each on one server; a PIECE is what a shard
has of one parameter. Plain values that travel as msgpack, and are checked when they arrive: a
`Count` cannot be negative, nor so large that its bytes overflow. No torch.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec

from paceline.options.table import ServerOptions

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]


class Piece(msgspec.Struct, frozen=True):
    """One parameter's part of a shard, in elements of the shard's flat tensor."""

    name: str
    param: Count  # number of the parameter in its bucket
    group: Count  # number of its param group in the optimizer
    start: Count
    count: Count
    shape: tuple[Count, ...]  # the parameter's own when the piece is all of it, else (count,)


class ShardSpec(msgspec.Struct, frozen=True):
    """A contiguous range of a table, on one server."""

    label: str  # for messages
    dtype: str  # of the parameters as the workers have them: "float32"
    count: Count
    pieces: tuple[Piece, ...]
    first_sign: Count = 0  # votes: index in the model of the element that its first bit is of


class OptimizerSpec(msgspec.Struct, frozen=True):
    """A class of torch.optim, and the settings of each param group."""

    name: str
    groups: tuple[dict[str, Any], ...]


class Rule(ServerOptions, frozen=True):
    """When a push is applied and when a worker may read; see ps/server/clock.py and
    docs/consistency.md.

    What a person can choose of it are the fields of `ServerOptions` (options/table.py).
    """

    bound: int | None  # None: nobody waits
    aggregate: bool = False  # synchronous: the workers' mean is applied, once per step
    backup: int = 0  # synchronous: so many workers are not waited for
    votes: bool = False  # the average is the majority of signs, as bits; nothing is applied
    mean_codec: str = ""  # synchronous: averages go to the workers through it, if that is less
    all_speak: bool = False  # every worker tells what the script has changed, not only the first
    is_elastic: bool = False  # backups: of the workers that are there, not of those at the start

    @property
    def takes_turns(self) -> bool:
        """Whether a worker must ask the servers one after the other.

        A bound in versions lets some workers read at a time. If two asked two servers at once, each
        could be let in by one of them and wait for the other (ps/server/clock.py). For the same
        reason a step is committed on all servers before any of them is asked again.
        """
        return self.unit == "version" and self.bound is not None

    @property
    def is_lockstep(self) -> bool:
        """Whether all workers take the same steps together."""
        return self.aggregate and not self.backup


class TableSpec(msgspec.Struct, frozen=True):
    """One server's part of a table."""

    name: str
    workers: tuple[int, ...]
    shards: tuple[ShardSpec, ...]
    optimizer: OptimizerSpec
    rule: Rule
    shape: tuple[int, ...] | None = None  # of the whole array: the table is a key of the client
