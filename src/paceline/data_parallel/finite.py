"""Are these numbers all finite? One pass over memory, without a copy."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def all_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Say whether no element of these is NaN or infinite; sparse ones are coalesced first."""
    for tensor in tensors:
        values = tensor.coalesce().values() if tensor.is_sparse else tensor
        if values.numel():
            low, high = torch.aminmax(values)  # both are NaN if any element is
            if not (torch.isfinite(low) and torch.isfinite(high)):
                return False
    return True
