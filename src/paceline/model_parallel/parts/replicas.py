"""Numbers that several processes of a unit hold, kept the same.

What tp leaves whole, and parameters that are tied across stages, are in several columns. In exact
lockstep all columns do the same to them. Otherwise (servers that are asked at different moments,
codecs whose scales depend on what else is in a bucket) copies would slowly part, and with them the
halves of one model: then the first holder's values are given to the others behind each step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.comm.object_collectives import all_gather_object
from paceline.compress.registry import parse_codec
from paceline.data_parallel.training import Training
from paceline.model_parallel.parts.layout import Holding, Part
from paceline.model_parallel.unit import Unit

# At these, without codecs, what is done to a parameter depends on its own gradients only.
_EXACT = ("allreduce", "ps", "local", "diloco", "bmuf", "easgd", "eamsgd")


class Replicas:
    """The parameters of this process that others of its unit hold too."""

    def __init__(self, unit: Unit, holding: Holding) -> None:
        """Find them. Collective among the unit."""
        self._group, self._holding = unit.group, holding
        here = {name: [h.counts, list(h.param.shape), _slices(h.part)] for name, h in holding}
        told = all_gather_object(unit.group, here)
        self._by_first: dict[int, list[tuple[str, int]]] = {}  # rank -> names and sizes
        for first, names in enumerate(told):
            for name, (counts, shape, slices) in names.items():
                others = [
                    rank
                    for rank, theirs in enumerate(told)
                    if rank != first and name in theirs and theirs[name][2] == slices
                ]
                if counts and others:
                    size = int(torch.Size(shape).numel())
                    self._by_first.setdefault(first, []).append((name, size))

    @property
    def are_there(self) -> bool:
        """Whether there is anything that several hold."""
        return bool(self._by_first)

    def bring_together(self) -> None:
        """Give the first holder's values to the others. Collective among the unit."""
        with torch.no_grad():
            for first, names in self._by_first.items():
                self._bring(first, names)

    def _bring(self, first: int, names: Sequence[tuple[str, int]]) -> None:
        held = self._holding.held
        flat = torch.zeros(sum(size for _, size in names), dtype=torch.float64)
        if self._group.rank == first:
            torch.cat([held[name].param.reshape(-1).double() for name, _ in names], out=flat)
        self._group.broadcast(flat, first)
        if self._group.rank == first:
            return
        for (name, _), values in zip(names, flat.split([n for _, n in names]), strict=True):
            mine = held.get(name)
            if mine is not None and not mine.counts:
                theirs = values.view(mine.param.shape).to(mine.param.dtype)
                if not torch.equal(mine.param, theirs):
                    mine.param.copy_(theirs)


def can_part(training: Training) -> bool:
    """Say whether columns may do different things to the same numbers at this pace."""
    options = training.options
    codec = parse_codec(options.own.get("compress", options.compress))
    narrow = {options.server_dtype, options.wire} != {"fp32"}
    is_exact = training.pace.name in _EXACT and not training.is_free
    return codec.is_on or (training.serving is not None and narrow) or not is_exact


def _slices(part: Part) -> list[list[int]]:
    return [[one.dim, one.index, one.count, one.blocks] for one in part.slices]
