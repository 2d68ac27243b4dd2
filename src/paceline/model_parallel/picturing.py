"""What a checkpoint has of a model in parts: the whole, as every other mesh can read it.

The processes of one copy of the model put together what each of them would save (saving.py): a
parameter, and what the optimizer remembers of it, is written whole, by one of those who have parts
of it. What a pace or a codec keeps lies in buckets, which are others on other meshes: it is written
as it is, under the process's place, and read only where the parts are the same.

    model/layer.weight   optimizer/layer.weight/exp_avg      whole
    part3/pace/begin.0   rank.7/codec/0                      of one place, of one worker
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from paceline.collectives.agreement import tell_all
from paceline.data_parallel.saving import Picture
from paceline.model_parallel.meshed import Meshed
from paceline.model_parallel.parts import Held, Part, Slice
from paceline.model_parallel.whole import Piece, Tensors, assemble, spread

_BY_PLACE = ("layout", "method")  # what is of one part of the model only


def whole_picture(meshed: Meshed) -> Picture:
    """Take a picture of the whole model; in the units behind the first one only what is each
    worker's own. Collective among all workers."""
    mine = meshed.succession.take_picture()
    if meshed.cut.pipeline is not None:
        mine.own["stage/random"] = meshed.cut.pipeline.random_state
    if not meshed.succession.training.is_first:
        return Picture(own=mine.own, plain=mine.plain, own_plain=mine.own_plain)
    place, group = meshed.unit.rank, meshed.unit.group
    pieces, kept = dict[str, Piece](), Tensors()
    for name, tensor in {**mine.common, **mine.first}.items():
        if name.startswith("pace/"):
            kept[f"part{place}/{name}"] = tensor
        else:
            pieces[name] = _piece(meshed, name, tensor)
    found, _ = assemble(group, pieces, spread(group.size))
    told = tell_all(group, [mine.plain, _written_parts(meshed)])
    plain = _merged(meshed, [one for one, _ in told])
    plain["parts"] = [parts for _, parts in told]
    return Picture(first={**found, **kept}, own=mine.own, plain=plain, own_plain=mine.own_plain)


def _piece(meshed: Meshed, name: str, tensor: torch.Tensor) -> Piece:
    """Say of which part of the whole a tensor of this process's picture is."""
    held = held_of(meshed, name)
    if held is not None and tuple(tensor.shape) == tuple(held.param.shape):
        return Piece(tensor, held.part, counts=held.counts)
    return meshed.buffer_piece(name.removeprefix("model/"), tensor)


def held_of(meshed: Meshed, name: str) -> Held | None:
    """Return the parameter that a tensor of a checkpoint belongs to, if it is held here."""
    kind, _, rest = name.partition("/")
    param = rest.rpartition("/")[0] if kind == "optimizer" else rest
    if kind not in ("model", "optimizer"):
        return None
    return meshed.cut.holding.held.get(meshed.cut.aliases.get(param, param))


def _merged(meshed: Meshed, plains: list[dict[str, Any]]) -> dict[str, Any]:
    """Put together what the parts of a model say in plain words."""
    merged: dict[str, Any] = {**plains[0], "mesh": str(meshed.unit.mesh)}
    for name in _BY_PLACE:
        if name in plains[0]:
            merged[f"{name} by place"] = [plain[name] for plain in plains]
            del merged[name]
    order = {name: number for number, name in enumerate(meshed.cut.names.values())}
    groups = [plain["optimizer"]["groups"] for plain in plains]
    together = []
    for same in zip(*groups, strict=True):
        names = {name for group in same for name in group["params"]}
        together.append({**same[0], "params": sorted(names, key=lambda name: order[name])})
    merged["optimizer"] = {**plains[0]["optimizer"], "groups": together}
    for name in ("optimizer values", "extra"):
        if any(name in plain for plain in plains):
            merged[name] = {k: v for plain in plains for k, v in plain.get(name, {}).items()}
    return merged


def _written_parts(meshed: Meshed) -> dict[str, Any]:
    """Write down what of each parameter is here."""
    return {
        name: [list(held.part.shape), [_numbers(one) for one in held.part.slices]]
        for name, held in meshed.cut.holding
    }


def _numbers(one: Slice) -> list[int]:
    return [one.dim, one.index, one.count, one.blocks]


def read_part(written: list[Any]) -> Part:
    """Return a part as `_written_parts` wrote it."""
    shape, slices = written
    return Part(tuple(shape), tuple(Slice(*numbers) for numbers in slices))


def same_parts(meshed: Meshed, plain: Mapping[str, Any]) -> bool:
    """Say whether a checkpoint's processes held what those of this job hold."""
    if "parts" not in plain or len(plain["parts"]) != meshed.unit.size:
        return False
    return bool(plain["parts"][meshed.unit.rank] == _written_parts(meshed))
