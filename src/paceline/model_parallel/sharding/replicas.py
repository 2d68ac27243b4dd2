"""Replicated parameters within a unit, kept equal.

What tp leaves unsharded, and parameters that are tied across stages, are in several data-parallel
groups. In exact lockstep all groups apply the same updates to them. Otherwise (servers that are
asked at different moments, codecs whose scales depend on the rest of a bucket) the replicas would
slowly diverge, and with them the shards of one model. Then the first holder sends its values to the
other holders after each step, through host memory: on a device that waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.comm.object_collectives import all_gather_object
from paceline.compress.registry import parse_codec
from paceline.data_parallel.training import Training
from paceline.model_parallel.sharding.layout import LocalShards
from paceline.model_parallel.unit import MeshUnit

# At these paces, without codecs, the update of a parameter depends on its own gradients only.
_EXACT = ("allreduce", "ps", "local", "diloco", "bmuf", "easgd", "eamsgd")


class Replicas:
    """The parameters of this process that other processes of its unit hold too."""

    def __init__(self, unit: MeshUnit, shards: LocalShards) -> None:
        """Find them. Collective among the unit."""
        self._group, self._shards = unit.group, shards
        here = {
            name: [one.is_counted, list(one.tensor.shape), one.spec.plain_slices()]
            for name, one in shards.items()
        }
        described = all_gather_object(unit.group, here)
        self._by_first: dict[int, list[tuple[str, int]]] = {}  # rank -> names and sizes
        for first, names in enumerate(described):
            for name, (is_counted, shape, slices) in names.items():
                is_replicated = any(
                    rank != first and name in theirs and theirs[name][2] == slices
                    for rank, theirs in enumerate(described)
                )
                if is_counted and is_replicated:
                    size = int(torch.Size(shape).numel())
                    self._by_first.setdefault(first, []).append((name, size))

    @property
    def exist(self) -> bool:
        """Whether several processes hold a parameter."""
        return bool(self._by_first)

    def synchronize(self) -> None:
        """Send the first holder's values to the other holders. Collective among the unit."""
        with torch.no_grad():
            for first, names in self._by_first.items():
                self._broadcast(first, names)

    def _broadcast(self, first: int, names: Sequence[tuple[str, int]]) -> None:
        flat = torch.zeros(sum(size for _, size in names), dtype=torch.float64)
        if self._group.rank == first:
            own = [self._shards[name].tensor.reshape(-1).double() for name, _ in names]
            flat.copy_(torch.cat(own))
        self._group.broadcast(flat, first)
        if self._group.rank == first:
            return
        for (name, _), values in zip(names, flat.split([n for _, n in names]), strict=True):
            shard = self._shards.get(name)
            if shard is not None and not shard.is_counted:
                theirs = values.view(shard.tensor.shape).to(shard.tensor)
                if not torch.equal(shard.tensor, theirs):
                    shard.tensor.copy_(theirs)


def can_diverge(training: Training) -> bool:
    """Return whether data-parallel groups may update the same values differently at this pace."""
    options = training.options
    codec = parse_codec(options.own.get("compress", options.compress))
    narrow = {options.server_dtype, options.wire} != {"fp32"}
    is_exact = training.pace.name in _EXACT and not training.is_free
    return codec.is_on or (training.serving is not None and narrow) or not is_exact
