"""How much a server has to do: counted where it happens, told with the reports of its tables."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Load:
    """What one partition has cost its primary so far."""

    requests: int = 0
    num_bytes: int = 0  # of tensors that came with them
    busy_s: float = 0.0  # spent on them

    def __sub__(self, other: Load) -> Load:
        return Load(
            self.requests - other.requests,
            self.num_bytes - other.num_bytes,
            self.busy_s - other.busy_s,
        )

    def __add__(self, other: Load) -> Load:
        return Load(
            self.requests + other.requests,
            self.num_bytes + other.num_bytes,
            self.busy_s + other.busy_s,
        )
