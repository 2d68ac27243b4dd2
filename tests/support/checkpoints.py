"""Small checkpoints to do things to."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from paceline.state.files import manifest
from paceline.state.files import save as writing

PARTS = (
    {"model/weight": torch.arange(6.0).view(2, 3), "model/steps": torch.tensor(7)},
    {"rank.1/rng": torch.arange(5, dtype=torch.uint8)},
)


def save(
    root: Path,
    step: int,
    parts: tuple[Mapping[str, torch.Tensor], ...] = PARTS,
    content: Any = None,
) -> Path:
    """Save as two workers and their publisher do."""
    staging = writing.begin(root, step, secrets.token_hex(4))
    for number, tensors in enumerate(parts):
        record = writing.write_part(staging, number, tensors)
        writing.write_record(staging, number, record, {"number": number})
    left = writing.collect_records(staging, range(len(parts)))
    assert [each.plain for each in left.values()] == [{"number": n} for n in range(len(parts))]
    records = [each.record for each in left.values()]
    described = manifest.make(
        step=step,
        world=len(parts),
        content={"pace": "allreduce", "step": step} if content is None else content,
        parts=[record for record in records if record is not None],
    )
    return writing.publish(staging, described)


def bits(tensor: torch.Tensor) -> bytes:
    """Return a tensor's bytes in the order of its elements."""
    dense = (
        tensor.resolve_conj().resolve_neg().flatten().clone(memory_format=torch.contiguous_format)
    )
    return dense.view(torch.uint8).numpy().tobytes()
