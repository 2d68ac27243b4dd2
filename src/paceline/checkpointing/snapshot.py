"""A copy of tensors, taken in the time of one memcpy, so that training can go on at once.

The memory is used again for the next copy: fresh pages from the kernel would cost more than the
copying itself.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

_ALIGNMENT = 64


class SnapshotMemory:
    """One piece of memory for one copy at a time. Whoever takes a copy is done with the last."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def copy(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return copies, contiguous and on the CPU."""
        sizes = {name: _room(tensor) for name, tensor in tensors.items()}
        total = sum(sizes.values())
        if self._memory.numel() < total:
            self._memory = torch.empty(total, dtype=torch.uint8)
        copies, at = dict[str, torch.Tensor](), 0
        for name, tensor in tensors.items():
            num_bytes = tensor.numel() * tensor.element_size()
            place = self._memory[at : at + num_bytes].view(tensor.dtype).view(tensor.shape)
            copies[name] = place.copy_(tensor.detach())
            at += sizes[name]
        return copies


def _room(tensor: torch.Tensor) -> int:
    num_bytes = tensor.numel() * tensor.element_size()
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
