"""stub"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.ps.replication import Replica
from paceline.ps.server import Server


class Filler:
    def __init__(self, server: Server, replica: Replica, peer: int, house: Any) -> None:
        self.is_over = False

    def send_outline(self) -> None: ...
    def is_due(self, now_s: float) -> bool:
        return False

    def send_some(self, now_s: float) -> None: ...


def restore(server: Server, part: Any, tensors: Sequence[torch.Tensor]) -> None: ...
