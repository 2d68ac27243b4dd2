"""What a checkpoint has of a model in parts: the whole, as every other mesh can read it.

The processes of one copy of the model put together what each of them would save (saving.py): a
parameter, and what the optimizer remembers of it, is written whole, by one of those who have parts
of it. What a pace or a codec keeps lies in buckets, which are others on other meshes: it is written
as it is, under the process's place, and read only where the parts are the same.

    model/layer.weight   optimizer/layer.weight/exp_avg      whole
    part3/pace/begin.0   rank.7/codec/0                      of one place, of one worker

A checkpoint of any mesh is read in two steps: `as_whole` makes what each worker had for itself
what each copy of the model had, and `as_part` cuts the part that is held here out of every tensor.
On the same mesh everything else is given back as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from paceline.comm.object_collectives import all_gather_object
from paceline.data_parallel.model_state.checkpoint import ModelSnapshot, SavedModel
from paceline.model_parallel.mesh_model import Meshed
from paceline.model_parallel.parts.gather import Piece, Tensors, assemble, spread
from paceline.model_parallel.parts.layout import Held, Part, Slice
from paceline.runtime.mesh import Mesh

_BY_PLACE = ("layout", "method")  # what is of one part of the model only


def whole_picture(meshed: Meshed) -> ModelSnapshot:
    """Take a picture of the whole model; in the units behind the first one only what is each
    worker's own. Collective among all workers."""
    mine = meshed.switcher.take_snapshot()
    if meshed.cut.pipeline is not None:
        mine.own["stage/random"] = meshed.cut.pipeline.random_state
    if not meshed.switcher.training.is_first:
        return ModelSnapshot(own=mine.own, plain=mine.plain, own_plain=mine.own_plain)
    place, group = meshed.unit.rank, meshed.unit.group
    pieces, kept = dict[str, Piece](), Tensors()
    for name, tensor in {**mine.common, **mine.first}.items():
        if name.startswith("pace/"):
            kept[f"part{place}/{name}"] = tensor
        else:
            pieces[name] = _piece(meshed, name, tensor)
    found, _ = assemble(group, pieces, spread(group.size))
    told = all_gather_object(group, [mine.plain, _written_parts(meshed)])
    plain = _merged(meshed, [one for one, _ in told])
    plain["parts"] = [parts for _, parts in told]
    return ModelSnapshot(
        first={**found, **kept}, own=mine.own, plain=plain, own_plain=mine.own_plain
    )


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


def mesh_of(plain: Mapping[str, Any], num_workers: int) -> Mesh:
    """Return the mesh on which a model was saved, with the copies that were there then."""
    return Mesh.parse(plain.get("mesh", "dp=1")).of_workers(num_workers)


def as_whole(saved: SavedModel) -> SavedModel:
    """Return what a job without a mesh, or with another one, can read."""
    if "mesh" not in saved.plain:
        return saved
    mesh = mesh_of(saved.plain, len(saved.owns))
    plain = {key: value for key, value in saved.plain.items() if not key.endswith("by place")}
    units = [list(mesh.unit(u * mesh.unit_size)) for u in range(mesh.dp)]
    return replace(
        saved,
        plain={**plain, "layout": None},
        owns=[_assembled(saved, members) for members in units],
        own_plains=[_together(saved, members) for members in units],
    )


def _together(saved: SavedModel, members: Sequence[int]) -> dict[str, Any] | None:
    """Return what the processes of one copy said, as if one had; None if one had left."""
    plains = [saved.own_plains[rank] for rank in members]
    merged: dict[str, Any] = {}
    for plain in plains:
        if plain is None:
            return None
        merged.update({k: v for k, v in plain.items() if k not in ("method", "codec")})
    values = [
        plain["optimizer values"] for plain in plains if plain and "optimizer values" in plain
    ]
    if values:
        merged["optimizer values"] = {k: v for one in values for k, v in one.items()}
    return merged


def _assembled(saved: SavedModel, members: Sequence[int]) -> Callable[[], Tensors]:
    """Put together what the processes of one copy had for themselves, when it is asked for."""

    def read() -> Tensors:
        whole: Tensors = {}
        for place, rank in enumerate(members):
            parts = saved.plain["parts"][place]
            for name, tensor in saved.owns[rank]().items():
                kind, _, rest = name.partition("/")
                param = rest.rpartition("/")[0] if kind == "optimizer" else rest
                if kind not in ("model", "optimizer"):
                    continue
                part = read_part(parts[param]) if param in parts else None
                if part is None or not part.slices or tensor.dim() == 0:
                    whole[name] = tensor
                    continue
                if name not in whole:
                    whole[name] = torch.zeros(part.shape, dtype=tensor.dtype)
                part.put(whole[name], tensor)
        return whole

    return read


def as_part(saved: SavedModel, meshed: Meshed) -> SavedModel:
    """Return what this process needs of a checkpoint."""
    place, plain, here = meshed.unit.rank, saved.plain, set(meshed.pieces())

    def cut(tensors: Mapping[str, torch.Tensor]) -> Tensors:
        return {n: _cut(meshed, n, t) for n, t in tensors.items() if _is_here(meshed, n, here)}

    common = cut(saved.common)
    if same_parts(meshed, plain):
        kept = f"part{place}/"
        common |= {n.removeprefix(kept): t for n, t in saved.common.items() if n.startswith(kept)}
        mine = {k.removesuffix(" by place"): v[place] for k, v in plain.items() if _by_place(k)}
        column = mesh_of(plain, len(saved.owns)).data_parallel_numbers(place)
        return SavedModel(
            common,
            _of_here(meshed, {**plain, **mine}),
            [saved.owns[rank] for rank in column],
            [saved.own_plains[rank] for rank in column],
        )
    whole = as_whole(saved)

    def own(read: Callable[[], Tensors]) -> Callable[[], Tensors]:
        return lambda: cut(read())

    plain = {**whole.plain, "layout": None}
    plain.pop("method", None)
    return SavedModel(
        common,
        _of_here(meshed, plain),
        [own(read) for read in whole.owns],
        [one if one is None else _of_here(meshed, one) for one in whole.own_plains],
    )


def _by_place(name: str) -> bool:
    return name.endswith(" by place")


def _is_here(meshed: Meshed, name: str, here: set[str]) -> bool:
    """Say whether a tensor of a checkpoint has something to do with this process."""
    kind, _, rest = name.partition("/")
    if kind == "optimizer":
        return held_of(meshed, name) is not None
    if kind == "model":
        return rest in here
    return not kind.startswith("part") and kind != "pace"


def _cut(meshed: Meshed, name: str, tensor: torch.Tensor) -> torch.Tensor:
    held = held_of(meshed, name)
    if held is not None:
        whole = tuple(tensor.shape) == held.part.shape
        return held.part.of(tensor).contiguous() if whole else tensor
    part = meshed.buffer_part(name.removeprefix("model/"))
    return tensor if part is None else part.of(tensor).contiguous()


def _of_here(meshed: Meshed, plain: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what is said of parameters that are not here."""
    mine = dict(plain)
    if "optimizer values" in mine:
        held = meshed.cut.holding.held
        mine["optimizer values"] = {k: v for k, v in mine["optimizer values"].items() if k in held}
    if "extra" in mine:
        here = meshed.pieces()
        mine["extra"] = {k: v for k, v in mine["extra"].items() if k in here}
    return mine
