"""A checkpoint of any mesh, as the processes of this one need it.

    whole     what each worker had for itself becomes what each copy of the model had
    cut       of every tensor the part that is held here

On the same mesh everything else (what a pace or a codec keeps) is given back as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from paceline.data_parallel.restoring import SavedModel
from paceline.mesh import Mesh
from paceline.model_parallel.meshed import Meshed
from paceline.model_parallel.picturing import held_of, read_part, same_parts

Tensors = dict[str, torch.Tensor]


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
        column = mesh_of(plain, len(saved.owns)).column(place)
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
