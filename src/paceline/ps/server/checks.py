"""Whether a table can work at all; looked at once, when it is made."""

from __future__ import annotations

import math

from paceline.errors import ShapeMismatch, UsageError
from paceline.options.table import ServerOptions, server_options
from paceline.ps.packing import can_send_means
from paceline.ps.server.optimizer import optimizer_class
from paceline.ps.server.precision import FLOATING
from paceline.ps.spec import Rule, ShardSpec, TableSpec

_DEFAULTS = ServerOptions()


def check_table(spec: TableSpec) -> None:
    """Raise UsageError for a table that cannot work; names the table and what to change."""
    try:
        _check_rule(spec.rule)
        if not spec.workers:
            raise UsageError("it has no workers")
        if not 0 <= spec.rule.backup < len(spec.workers) or (
            spec.rule.backup and not (spec.rule.aggregate and spec.rule.bound is None)
        ):
            raise UsageError(
                f"backup={spec.rule.backup} of {len(spec.workers)} workers: expected fewer than"
                " there are, and a synchronous table without a bound"
            )
        for shard in spec.shards:
            _check_dtype(shard)
            _check_pieces(shard)
        if spec.rule.push == "grad":
            _check_optimizer(spec)
    except UsageError as error:
        raise type(error)(f"table {spec.name!r}: {error}") from None


def _check_rule(rule: Rule) -> None:
    for option in server_options():
        value = getattr(rule, option.name)
        is_default = value == getattr(_DEFAULTS, option.name)  # "none of it" is one, maybe
        problem = "" if is_default else option.find_problem(value)
        if problem:
            raise UsageError(problem)
    if rule.mean_codec and not (rule.aggregate and can_send_means(rule.mean_codec)):
        raise UsageError(f"mean_codec={rule.mean_codec[:80]!r} is not one that averages go through")
    if rule.compensate == "dc" and rule.push != "grad":
        raise UsageError(f"compensate=dc corrects gradients, but push={rule.push}; use push=grad")
    if rule.aggregate and (
        rule.compensate != "none" or rule.lr != "plain" or rule.softsync or rule.max_staleness
    ):
        raise UsageError(
            "compensate, lr=staleness, softsync and max_staleness are about stale updates, which a"
            " synchronous table does not have; use the async pace"
        )


def _check_dtype(shard: ShardSpec) -> None:
    if shard.dtype not in FLOATING:
        raise UsageError(
            f"shard {shard.label!r} is of {shard.dtype}; servers keep {', '.join(FLOATING)}"
        )


def _check_pieces(shard: ShardSpec) -> None:
    end = 0
    for piece in shard.pieces:
        if piece.start < end or piece.start + piece.count > shard.count:
            raise ShapeMismatch(
                f"shard {shard.label!r} has {shard.count} elements, but {piece.name!r} is declared"
                f" as {piece.count} of them from {piece.start} on, after others that end at {end}"
            )
        if math.prod(piece.shape) != piece.count:
            raise ShapeMismatch(
                f"shard {shard.label!r} has {piece.count} elements of {piece.name!r}, which are not"
                f" of shape {list(piece.shape)}"
            )
        end = piece.start + piece.count


def _check_optimizer(spec: TableSpec) -> None:
    optimizer_class(spec.optimizer.name)
    num_groups = len(spec.optimizer.groups)
    for piece in (piece for shard in spec.shards for piece in shard.pieces):
        if not 0 <= piece.group < num_groups:
            raise UsageError(
                f"{piece.name!r} is in param group {piece.group}, but the optimizer has"
                f" {num_groups} groups"
            )
