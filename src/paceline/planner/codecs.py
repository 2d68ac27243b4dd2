"""What codecs send and cost, for the planner: shares of the bytes, and passes over the gradient.

The shares of quantizers are those of their formats. The passes were measured with
bench/compression.py and bench/slow_network.py on one core, relative to a copy of the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.compress.registry import CodecSpec
from paceline.errors import UsageError

# Bytes of a value that was sent instead of 4, and passes: encode and decode in copies of the
# gradient.
_QUANTIZERS = {
    "fp16": (0.5, 2.0),
    "bf16": (0.5, 2.0),
    "int8": (0.258, 3.5),
    "int4": (0.133, 4.0),
    "onebit": (0.033, 3.5),
}
_SELECTION_PASSES = 5.0
_INDEX_BYTES = 0.9  # of a sparse index, entropy-coded in blocks
_POWER_SHARE = 0.0013  # of rank 1, of matrices of 1000 to 3000 rows
_POWER_PASSES = 5.0


@dataclass(frozen=True)
class CodecCost:
    """`first` and `second`: bytes of the two hops of a compressed exchange, relative to M."""

    first: float = 1.0
    second: float = 1.0
    passes: float = 0.0  # of each worker, over M bytes

    def ring_share(self, num_workers: int) -> float:
        """Return the bytes that a worker sends relative to M, both hops.

        A slice goes to its owner, and its sum to everybody.
        """
        others = (num_workers - 1) / num_workers
        return others * self.first + others * self.second


def cost_of(spec: CodecSpec, num_workers: int) -> CodecCost:
    """Return the costs of a codec; UsageError for one that cannot be planned."""
    if not spec.is_on:
        return CodecCost()
    if spec.name in _QUANTIZERS:
        share, passes = _QUANTIZERS[spec.name]
        return CodecCost(share, share, passes)
    if spec.name in ("topk", "dgc", "randomk"):
        value_bytes = {"": 4.0, "fp16": 2.0, "bf16": 2.0, "int8": 1.0}[spec.values]
        index_bytes = 0.0 if spec.name == "randomk" else _INDEX_BYTES
        share = spec.value * (value_bytes + index_bytes) / 4
        # Workers choose different elements: the sum of a slice has up to n times as many.
        union = share if spec.name == "randomk" else min(1.0, share * num_workers)
        return CodecCost(share, union, _SELECTION_PASSES)
    if spec.name == "powersgd":
        share = _POWER_SHARE * spec.value
        return CodecCost(share, share, _POWER_PASSES)
    raise UsageError(
        f"codec {spec.name!r} cannot be planned: its bytes are not known;"
        " measure it with `paceline compare`"
    )
