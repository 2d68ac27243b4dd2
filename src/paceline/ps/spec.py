"""The description of a table: what workers send to servers when they open it.

A TABLE is everything that shares one set of clocks and one optimizer: a model, or one key of
`ps.Client`. Its flat tensors are cut into SHARDS, each on one server; a PIECE is what a shard has
of one parameter. A RULE says when pushes are applied and when workers may read; a pace's rule is
the same for a model and for a client's keys. Plain values that travel as msgpack, and are checked
when they arrive: a `Count` cannot be negative, nor so large that its bytes overflow. No torch.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeAlias

import msgspec

from paceline.errors import UsageError
from paceline.options.table import ServerOptions

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
_FORM = re.compile(r"(ps|async)|(ssp)(?::([0-9]+))?")
_DEFAULT_STALENESS = 3


class ShardPiece(msgspec.Struct, frozen=True):
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
    pieces: tuple[ShardPiece, ...]
    first_sign: Count = 0  # votes: index in the model of the element that its first bit is of


class OptimizerSpec(msgspec.Struct, frozen=True):
    """A class of torch.optim, and the settings of each param group."""

    name: str
    groups: tuple[dict[str, Any], ...]


class Rule(ServerOptions, frozen=True):
    """When a push is applied and when a worker may read; see ps/server/staleness_bound.py and
    docs/consistency.md.

    What a person can choose of it are the fields of `ServerOptions` (options/table.py).
    """

    bound: int | None  # None: no worker waits
    aggregate: bool = False  # synchronous: the workers' mean is applied, once per step
    backup: int = 0  # synchronous: so many workers are not waited for
    votes: bool = False  # the average is the majority of signs, as bits; nothing is applied
    mean_codec: str = ""  # synchronous: averages go to the workers through it, if that is less
    all_speak: bool = False  # every worker sends what the script has changed, not only the first
    is_elastic: bool = False  # backups: of the workers that are there, not of those at the start

    @property
    def takes_turns(self) -> bool:
        """Whether a worker must ask the servers one after the other.

        A bound in versions lets some workers read at a time. If two asked two servers at once, each
        could be let in by one of them and wait for the other (ps/server/staleness_bound.py). For
        the same reason a step is committed on all servers before any of them is asked again.
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


def rule_of(name: str, number: int, options: ServerOptions, *, is_elastic: bool = False) -> Rule:
    """Return the rule of a server pace; ssp:0 and backup:0 are `ps`: all wait for all.

    >>> rule_of("ssp", 2, ServerOptions(nonfinite="skip")).bound
    2
    """
    chosen = {field: getattr(options, field) for field in ServerOptions.__struct_fields__}
    if name == "backup" and number:
        # No worker is bound to the slowest one's clock; and the first worker may be the slowest.
        return Rule(
            None, aggregate=True, backup=number, all_speak=True, is_elastic=is_elastic, **chosen
        )
    # A bound of 0 clocks is lockstep: then the mean is applied, once.
    is_lockstep = name == "ssp" and number == 0 and options.unit != "version"
    if name in ("ps", "backup") or is_lockstep:
        return Rule(0, aggregate=True, all_speak=is_elastic, **chosen)
    return Rule(None if name == "async" else number, all_speak=is_elastic, **chosen)


def client_rule(pace: str, options: dict[str, Any]) -> Rule:
    """Read a client's pace, with options as keywords; UsageError says what would be right.

    >>> client_rule("ssp:2", {}).bound
    2
    """
    found = _FORM.fullmatch(pace) if isinstance(pace, str) else None
    if found is None:
        raise UsageError(
            f"pace {pace!r:.80}: a client's pace is ps, async, ssp or ssp:3 (a bound >= 0); options"
            " are keywords, as in Client('async', nonfinite='skip')"
        )
    known = ServerOptions.__struct_fields__
    for name in options:
        if name not in known:
            raise UsageError(f"a client has no option {name!r}; it has {', '.join(known)}")
    number = int(found[3] or _DEFAULT_STALENESS)
    return rule_of(found[1] or found[2], number, ServerOptions(**options))
