"""The reductions of Horovod's interface, and the scale factors around them."""

from __future__ import annotations

import struct
import zlib

from paceline.errors import UsageError


class ReduceOp(int):
    """One of Average, Sum, Min, Max, Product, Adasum; the numbers are Horovod's."""

    def __new__(cls, number: int, name: str) -> ReduceOp:
        op = super().__new__(cls, number)
        op.name = name
        return op

    name: str

    def __repr__(self) -> str:
        return self.name


Average = ReduceOp(0, "Average")
Sum = ReduceOp(1, "Sum")
Adasum = ReduceOp(2, "Adasum")
Min = ReduceOp(3, "Min")
Max = ReduceOp(4, "Max")
Product = ReduceOp(5, "Product")

_ENGINE = {Average: "mean", Sum: "sum", Min: "min", Max: "max", Product: "product"}


def choose_op(op: int | None, average: bool | None) -> int:
    """Return the reduction that a call asks for; the default is Average."""
    if average is not None:
        if op is not None:
            raise UsageError("op and average are both given; pass only op (average is deprecated)")
        return Average if average else Sum
    if op is None:
        return Average
    engine_op(op)
    return op


def engine_op(op: int) -> str:
    """Return the engine's name of a reduction; refuse Adasum and unknown ones."""
    name = _ENGINE.get(op)  # type: ignore[call-overload]
    if name is not None:
        return str(name)
    if op == Adasum:
        raise UsageError(
            "op=Adasum is not supported: it combines gradients by their angles, which neither the"
            " engine's reductions nor the parameter servers do. Use op=Average with a learning-rate"
            " warm-up (pl.GradualWarmup), or layer-wise rates (LARS, LAMB)"
        )
    raise UsageError(f"op={op!r} is not a reduction; pass Average, Sum, Min, Max or Product")


def check_gradient_op(op: int, predivide: float) -> None:
    """Raise UsageError unless gradients can be reduced like this."""
    engine_op(op)
    if op not in (Average, Sum):
        raise UsageError(f"DistributedOptimizer: op={op!r}; pass Average or Sum")
    if predivide != 1.0 and op != Average:
        raise UsageError("gradient_predivide_factor needs op=Average")
    if predivide <= 0:
        raise UsageError(f"gradient_predivide_factor={predivide}: expected more than 0")


def detail_of(prescale: float, postscale: float, described: str = "") -> int:
    """Return a hash of what is the same on all ranks: factors, and a description; 0 by default."""
    if prescale == 1.0 and postscale == 1.0 and not described:
        return 0
    return zlib.crc32(struct.pack("dd", prescale, postscale) + described.encode()) or 1
