"""StageLinks: how stages exchange tensors on a device.

The device's backend (NCCL) has no tags: what is sent first arrives first. And what waits for the
other process delays what comes after it in the same group. So each direction between two stages of
different processes has a group of its own, its LINK. Every schedule computes the microbatches of a
stage in their order, so both ends of a link use it in the same order. Processes that hold the same
tied parameter have links, too.

The host never waits: an exchange runs after what the current stream has launched, and `Work.wait()`
lets the current stream wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from paceline.comm.device_group import DeviceGroup

# Forms the link with this name between two processes of the pipeline.
FormLink = Callable[[str, tuple[int, int]], DeviceGroup]


class StageLinks:
    """The links of this process, and the group of all processes of the pipeline."""

    def __init__(
        self,
        device: torch.device,
        group: Any,
        rank: int,
        owners: Sequence[int],  # rank by stage
        shared: Mapping[str, Sequence[int]],  # stages by tied parameter
        form: FormLink,
    ) -> None:
        """Form the links, in one order on all processes. Collective; blocks."""
        self.device, self.group = device, group
        self._by_stages: dict[tuple[int, int], DeviceGroup] = {}
        self._by_ranks: dict[tuple[int, int], DeviceGroup] = {}
        for stage in range(len(owners) - 1):
            for ends in ((stage, stage + 1), (stage + 1, stage)):
                pair = owners[ends[0]], owners[ends[1]]
                if pair[0] != pair[1] and rank in pair:
                    self._by_stages[ends] = form(f"stages {ends[0]} to {ends[1]}", pair)
        holders = [{owners[stage] for stage in stages} for stages in shared.values()]
        tied = {(a, b) for ranks in holders for a in ranks for b in ranks if a != b}
        for pair in sorted(tied):
            if rank in pair:
                self._by_ranks[pair] = form(f"tied {pair[0]} to {pair[1]}", pair)

    def between(self, source: int, target: int) -> DeviceGroup:
        """Return the link from a stage to a neighbour."""
        return self._by_stages[source, target]

    def of_tied(self, source: int, target: int) -> DeviceGroup:
        """Return the link from a process to another that holds the same parameters."""
        return self._by_ranks[source, target]
