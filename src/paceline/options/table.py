"""The option table: the options of training that a script or the command line can set.

One field is one option: its type, its default, and for each group of paces the allowed values and a
line of help. Everything else follows from the field:

    parsing of `pace[option=value]` and of keywords of `pl.distribute`, and errors for other values
    `paceline paces`, and the tables in docs/guides (docs/option_tables.py writes them)
    for a field of `ServerOptions`: keywords of `pl.ps.Client`, the message to the servers
    (ps/spec.py: Rule), and the servers' checks (ps/server/checks.py)

Options that only a method (pace/method.py) reads are declared with their pace (pace/registry.py).
The command line imports this module, so it does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, get_type_hints

import msgspec

from paceline.compress.registry import CODEC
from paceline.errors import UsageError
from paceline.options.grammar import ABOVE_0, COUNT, FROM_0, WHOLE, Kind, Number, Option, near

PRECISIONS = ("fp32", "bf16", "fp16")
# Gradients are unscaled before they are sent (data_parallel/amp/grad_scaler.py). Sent as float16,
# whose smallest number is 6e-8, the values that loss scaling has preserved would be lost. bfloat16
# also has 16 bits, and the range of float32.
_WIRE = {"fp32": "fp32", "bf16": "bf16", "fp16": "bf16"}

_SERVED = ("ps", "backup", "async", "ssp")
_FREE = ("async", "ssp")
_AVERAGED = ("allreduce", "ps", "partial", "bitmap")  # workers agree on the gradients of each step
_OUTER = ("local", "post_local", "bmuf", "diloco")
_APART = (*_OUTER, "easgd", "eamsgd", "hogwild")  # workers have their own parameters or states
_ALL = ("allreduce", *_SERVED, "partial", "bitmap", *_APART, "gossip")


_NONFINITE = (
    "NaN or infinite gradients: `raise` on all ranks; `skip` the step on all (a GradScaler skips"
    " such steps itself: leave it at `ignore`)"
)


@dataclass(frozen=True)
class At:
    """The allowed values of a field for some paces."""

    paces: tuple[str, ...]
    kind: Kind
    help: str
    otherwise: str = ""  # description of the default, if the value does not explain itself


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options that servers receive: each field is also a field of their Rule."""

    unit: Annotated[
        str,
        At(
            ("ssp",),
            ("clock", "version"),
            "`version`: the bound is on the staleness of each update, so that workers take turns",
        ),
    ] = "clock"
    push: Annotated[
        str,
        At(
            _FREE,
            ("grad", "delta", "params"),
            "`delta`: the optimizer runs on the worker, and the servers add the change that it"
            " made; `params`: the servers take the worker's values, and updates of other workers"
            " are lost (the servers warn, and the report counts them)",
        ),
    ] = "grad"
    compensate: Annotated[
        str,
        At(
            _FREE,
            ("none", "dc"),
            "`dc`: correct each gradient towards its value at the current parameters (DC-ASGD)."
            " Costs one copy of the parameters per worker on the servers",
        ),
    ] = "none"
    dc_lambda: Annotated[float, At(_FREE, FROM_0, "strength of `compensate=dc`")] = 0.04
    lr: Annotated[
        str,
        At(
            _FREE,
            ("plain", "staleness"),
            "`staleness`: the rate of an update t >= 1 versions old is divided by t",
        ),
    ] = "plain"
    softsync: Annotated[
        int,
        At(
            ("async",),
            WHOLE,
            "n: with w workers, w // n gradients (at least one) are pooled and their mean is"
            " applied",
            otherwise="off",
        ),
    ] = 0
    max_staleness: Annotated[
        int | None,
        At(
            _FREE,
            COUNT,
            "older gradients are dropped, with a warning, and counted",
            otherwise="no limit",
        ),
    ] = None
    nonfinite: Annotated[
        str,
        At(
            _SERVED,
            ("ignore", "raise", "skip", "quarantine"),
            f"{_NONFINITE}; `quarantine`: leave out that worker's gradient",
        ),
        At(
            ("allreduce",),
            ("ignore", "raise", "skip"),
            _NONFINITE,
        ),
    ] = "ignore"
    server_dtype: Annotated[
        str,
        At(
            _SERVED,
            PRECISIONS,
            "dtype of the parameters on the servers: `bf16` and `fp16` halve their memory; updates"
            " are computed in float32 and rounded stochastically. `fp32` does not change float64,"
            " and keeps a float32 master copy of 16-bit parameters",
        ),
    ] = "fp32"
    seed: Annotated[
        int,
        At(
            _SERVED,
            COUNT,
            "seed of the stochastic rounding: the same seed and order of updates give the same"
            " bits",
        ),
    ] = 0


class Options(ServerOptions, frozen=True, kw_only=True):
    """All options of a pace; those of its method (pace/method.py) are in `own`, as text."""

    update: Annotated[
        str,
        At(
            ("allreduce",),
            ("auto", "replicated", "sharded"),
            "`replicated`: every worker updates its own copy; `sharded`: parameters and optimizer"
            " state exist once per host, and each worker updates its part; `auto`: sharded if"
            " several workers share a host and the optimizer allows it",
        ),
    ] = "auto"
    buffers: Annotated[
        str,
        At(
            _AVERAGED,
            ("broadcast", "average", "local"),
            "after each step: `broadcast` rank 0's, `average`, `local`",
        ),
        At(("backup", *_FREE), ("local",), "they stay local to each worker"),
        At(
            _APART,
            ("average", "broadcast", "local"),
            "in each averaging round: `average`, `broadcast` rank 0's, `local`",
        ),
        At(
            ("gossip",),
            ("local", "average", "broadcast"),
            "after each step: `local`, `average`, `broadcast` rank 0's",
        ),
    ] = "broadcast"
    batchnorm: Annotated[
        str, At(_AVERAGED, ("local", "global"), "`global`: statistics of all workers' batches")
    ] = "local"
    unused: Annotated[
        str,
        At(
            _AVERAGED,
            ("warn", "error", "ignore"),
            "parameters without gradient: `warn` once, `error`, `ignore`",
        ),
        At(("backup",), ("ignore",), "parameters without gradient are ignored"),
    ] = "warn"
    bucket_mb: Annotated[
        float, At(_ALL, ABOVE_0, "gradients are sent in buckets of about this size")
    ] = 16.0
    precision: Annotated[
        str,
        At(
            _ALL,
            PRECISIONS,
            "dtype of the workers' computation ([mixed precision](mixed-precision.md)); parameters"
            " stay float32; `fp16` needs `pl.GradScaler`",
        ),
    ] = "fp32"
    resize_lr: Annotated[
        str,
        At(
            ("allreduce", "ps"),
            ("keep", "linear", "sqrt"),
            "in an [elastic job](elastic.md): `linear`, `sqrt`: the learning rate follows the"
            ' number of workers (for `pl.shard(..., resize="worker")`)',
        ),
    ] = "keep"
    wire: Annotated[
        str,
        At(
            _SERVED,
            PRECISIONS,
            "dtype of gradients and parameters sent between hosts: `bf16`, `fp16`. On one host"
            " nothing is sent",
            otherwise="`fp32`, with a 16-bit `precision` `bf16`",
        ),
    ] = "fp32"
    compress: Annotated[
        str,
        At(
            ("allreduce", *_SERVED),
            CODEC,
            "gradients are compressed with [a codec](compression.md) (`int8`, `topk:0.01`, ...)",
        ),
        At(
            _OUTER,
            CODEC,
            "[a codec](compression.md) for each worker's change since the last averaging round",
        ),
    ] = "auto"
    via: Annotated[
        str,
        At(
            ("allreduce",),
            ("auto", "device", "host"),
            "gradients on [a device](devices.md): `device`: its own collectives (NCCL); `host`:"
            " through host memory, for slow networks; `auto`: its own if it has some",
        ),
    ] = "auto"
    placement: Annotated[
        str,
        At(
            _ALL,
            ("one", "mixed"),
            "`mixed`: some parameters are on [a device](devices.md), others on the CPU, on purpose",
        ),
    ] = "one"
    wait: Annotated[
        str,
        At(
            ("ps",),
            ("step", "layer"),
            "where a worker waits for fresh parameters: for all at the end of the `step`, or for"
            " those of each `layer` in the next forward pass",
        ),
    ] = "step"
    own: Mapping[str, str] = {}


@cache
def _declared(kind: type[msgspec.Struct]) -> tuple[tuple[At, Option], ...]:
    """Return the options that are fields of a class, each with the paces that have it."""
    hints = get_type_hints(kind, include_extras=True)
    return tuple(
        (at, _option(field.name, at, field.default))
        for field in msgspec.structs.fields(kind)
        for at in getattr(hints[field.name], "__metadata__", ())
    )


def _option(name: str, at: At, default: Any) -> Option:
    has_value = isinstance(at.kind, Number) and default is not None and at.kind.has(default)
    return Option(name, at.kind, at.help, default if has_value else None, at.otherwise)


def options_at(pace: str) -> tuple[Option, ...]:
    """Return the options of a pace of this package, without those of its method."""
    return tuple(option for at, option in _declared(Options) if pace in at.paces)


def server_options() -> Iterator[Option]:
    """Yield each option of servers once, with all values that it may have."""
    seen: set[str] = set()
    for _, option in _declared(ServerOptions):
        if option.name not in seen:
            seen.add(option.name)
            yield option


# A pace from outside the package has this option too.
PRECISION = next(option for option in options_at("allreduce") if option.name == "precision")


def wire_dtype(precision: str) -> str:
    """Return the dtype of gradients sent between hosts if the script does not choose one.

    >>> wire_dtype("fp16")
    'bf16'
    """
    return _WIRE[precision]


def require_precision(text: str) -> str:
    """Return the text if it names a precision; raise UsageError with the choices otherwise."""
    if text in PRECISIONS:
        return text
    hint, all_of_them = near(text, PRECISIONS), ", ".join(PRECISIONS)
    raise UsageError(f"precision {text[:40]!r} is unknown{hint}; choose {all_of_them}")
