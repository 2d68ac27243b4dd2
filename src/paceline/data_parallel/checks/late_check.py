"""Are the gradients on a device finite? The answer comes later, so that no worker waits for it.

After each exchange the device reduces every gradient to one number, and copies whether each is
finite into pinned memory. The host looks at it in a later step, when the copy is complete. Then the
used-parameter mask reports it to all workers, so that all raise the same error in the same step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

from paceline.comm.device_route import Copied, DeviceRoute
from paceline.comm.devices import pinned_like


class _Pending(NamedTuple):
    step: int
    names: Sequence[str]  # of this worker's gradients; the numbers after them are of averages
    is_finite: torch.Tensor  # in host memory, valid when it is copied
    copied: Copied


class NotFinite(NamedTuple):
    """A step whose average was not finite, and this worker's gradients that were not."""

    step: int
    names: list[str]


class LateCheck:
    """The checks of one training. Main thread and autograd's, one at a time."""

    def __init__(self, device: torch.device) -> None:
        self._route = DeviceRoute(device)
        self._pending: deque[_Pending] = deque()
        self.found: NotFinite | None = None  # the first

    def launch(
        self,
        step: int,
        named: Sequence[tuple[str, torch.Tensor]],
        averages: Sequence[torch.Tensor],
    ) -> None:
        """Start to check this worker's gradients of a step, and the averages."""
        tensors = [*(grad for _, grad in named), *averages]
        is_finite = are_finite(tensors)
        host = pinned_like(is_finite, is_finite.device)
        host = torch.empty(is_finite.shape, dtype=is_finite.dtype) if host is None else host
        copied = self._route.to_host(is_finite, host)
        self._pending.append(_Pending(step, [name for name, _ in named], host, copied))

    def look(self) -> bool:
        """Return whether a step was bad, as far as that is known by now. Never waits."""
        while self.found is None and self._pending and self._pending[0].copied.done():
            one = self._pending.popleft()
            flags = one.is_finite.tolist()
            if not all(flags[len(one.names) :]):
                bad = [name for name, good in zip(one.names, flags, strict=False) if not good]
                self.found = NotFinite(one.step, bad)
        return self.found is not None


def are_finite(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return for each tensor of a device whether all of its elements are finite, there."""
    # The largest magnitude; NaN if any element is.
    norms = torch._foreach_norm(list(tensors), ord=float("inf"))
    return torch.isfinite(torch.stack([norm.float() for norm in norms]))
