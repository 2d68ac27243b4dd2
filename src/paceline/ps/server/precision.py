"""In which precision a shard is kept, computed and stored.

OWN is the dtype that the workers have. A shard is KEPT in its own dtype, or in the narrower one
that `server_dtype` asks for; half-precision parameters on an fp32 server are kept as a float32
master copy. It is COMPUTED in at least float32 when it is kept in another dtype than its own.

Rounding to nearest would lose every update that is smaller than half a step of bfloat16; rounded
STOCHASTICALLY, up with the probability of the part that is cut off, updates are right on average.
"""

from __future__ import annotations

import hashlib

import torch

from paceline import _core
from paceline.comm.tensors import Buffer

SERVER_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FLOATING: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in ("float32", "float64", "float16", "bfloat16")
}


def kept_dtype(own: torch.dtype, server_dtype: str) -> torch.dtype:
    """Return the dtype of a shard's memory on the server."""
    return own if server_dtype == "fp32" and own is torch.float64 else SERVER_DTYPES[server_dtype]


def computed_dtype(kept: torch.dtype) -> torch.dtype:
    """Return the dtype in which updates are computed."""
    return kept if kept is torch.float64 else torch.float32


def round_stochastically(source: torch.Tensor, target: torch.Tensor, *, seed: int) -> None:
    """Store float32 values in a narrower dtype; the same seed gives the same bits."""
    to = Buffer(target)
    _core.round_stochastic(source.data_ptr(), to.address, to.count, to.dtype, seed)


def seed_of(seed: int, label: str, version: int) -> int:
    """Return the seed of one store: another one for every shard and every version."""
    digest = hashlib.blake2b(f"{seed}/{label}/{version}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


class Scratch:
    """Memory for intermediate results that all shards of a table take turns in."""

    def __init__(self, most_elements: int) -> None:
        self._most_elements = most_elements
        self._flats: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def flat(self, use: str, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory for one use; valid until the next call for the same use."""
        flat = self._flats.get((use, dtype))
        if flat is None:
            flat = self._flats[use, dtype] = torch.empty(self._most_elements, dtype=dtype)
        return flat[:count]
