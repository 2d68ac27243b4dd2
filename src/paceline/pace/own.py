"""Each worker for itself: gradients are not exchanged."""

from __future__ import annotations

from typing import Any

import torch

from paceline.cluster.member import Membership
from paceline.pace.exchange import Bucket
from paceline.work import Together, Work


class OwnGradients:
    """Leaves every worker with its own gradients; what the workers agree on comes later."""

    is_at_rest = True

    def submit(self, bucket: Bucket, step: int) -> Work[Any]:  # noqa: ARG002
        return Together(()).work()

    def call_roll(self, here: torch.Tensor) -> torch.Tensor:
        return here

    def reconfigure(self, membership: Membership) -> None:
        """Nobody takes part."""
