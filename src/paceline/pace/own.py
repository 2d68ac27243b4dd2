"""Each worker for itself: gradients are not exchanged."""

from __future__ import annotations

from typing import Any

from paceline.pace.exchange import Bucket, Exchange, ExchangeTraits
from paceline.work import Together, Work


class OwnGradients(Exchange):
    """Leaves every worker with its own gradients; what the workers agree on comes later."""

    traits = ExchangeTraits(is_local=True, may_be_local=True)

    def submit(self, bucket: Bucket, step: int) -> Work[Any]:  # noqa: ARG002
        return Together(()).work()
