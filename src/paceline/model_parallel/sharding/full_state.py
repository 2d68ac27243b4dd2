"""The checkpoint of a sharded model: full tensors, which every other mesh can read.

The processes of one copy of the model assemble what each of them would save
(data_parallel/model_state/model_snapshot.py): a parameter, and the optimizer's state of it, is
written in full, by one of the processes that hold shards of it. The state of a pace or a codec lies
in buckets, which differ on other meshes: it is written unchanged, under the process's index in the
unit, and read only if the shards are the same.

    model/layer.weight   optimizer/layer.weight/exp_avg      full
    part3/pace/begin.0   rank.7/codec/0                      of one unit index, of one worker

A checkpoint of any mesh is read in two steps: `to_full_state` turns the state of each worker into
the state of each copy of the model, and `to_shard` cuts the local shard out of every tensor. On the
same mesh all other state is restored unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from paceline.comm.object_collectives import all_gather_object
from paceline.data_parallel.model_state.model_snapshot import ModelSnapshot, SavedModel
from paceline.model_parallel.mesh_model import MeshModel
from paceline.model_parallel.sharding.gather import Tensors, assemble, to_holders_in_turn
from paceline.model_parallel.sharding.layout import LocalShard, Slice, SliceSpec
from paceline.runtime.mesh import Mesh

_BY_UNIT_INDEX = ("layout", "method")  # plain state that differs between the shards of a model
_SUFFIX = " by place"  # of their names in checkpoints


def full_state(mesh_model: MeshModel) -> ModelSnapshot:
    """Return the full model's state; in all units but the first only what is each worker's own.
    Collective among all workers."""
    local = mesh_model.switcher.take_snapshot()
    shard = mesh_model.shard
    if shard.pipeline is not None:
        local.own.update(shard.pipeline.random_states)
    if not mesh_model.switcher.training.is_first:
        return ModelSnapshot(own=local.own, plain=local.plain, own_plain=local.own_plain)
    index, group = mesh_model.unit.rank, mesh_model.unit.group
    shards, kept = dict[str, LocalShard](), Tensors()
    for name, tensor in {**local.common, **local.first}.items():
        if name.startswith("pace/"):
            kept[f"part{index}/{name}"] = tensor
        else:
            shards[name] = _shard_of(mesh_model, name, tensor)
    found = assemble(group, shards, to_holders_in_turn(group.size))
    gathered = all_gather_object(group, [local.plain, _plain_specs(mesh_model)])
    plain = _merged(mesh_model, [one for one, _ in gathered])
    plain["parts"] = [specs for _, specs in gathered]
    return ModelSnapshot(
        first={**found, **kept}, own=local.own, plain=plain, own_plain=local.own_plain
    )


def _shard_of(mesh_model: MeshModel, name: str, tensor: torch.Tensor) -> LocalShard:
    """Return a tensor of this process's state with its spec."""
    known = _find_shard(mesh_model, name)
    if known is not None and tensor.shape == known.tensor.shape:
        return replace(known, tensor=tensor)
    return mesh_model.buffer_shard(name.removeprefix("model/"), tensor)


def _find_shard(mesh_model: MeshModel, name: str) -> LocalShard | None:
    """Return the local shard of the parameter that a tensor of a checkpoint belongs to."""
    param = _param_name(name)
    if param is None:
        return None
    return mesh_model.shard.shards.get(mesh_model.shard.aliases.get(param, param))


def _param_name(name: str) -> str | None:
    kind, _, rest = name.partition("/")
    if kind == "optimizer":
        return rest.rpartition("/")[0]
    return rest if kind == "model" else None


def _merged(mesh_model: MeshModel, plains: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the plain state of all processes of the unit as one."""
    merged: dict[str, Any] = {**plains[0], "mesh": str(mesh_model.unit.mesh)}
    for name in _BY_UNIT_INDEX:
        if name in plains[0]:
            merged[f"{name}{_SUFFIX}"] = [plain[name] for plain in plains]
            del merged[name]
    order = {name: number for number, name in enumerate(mesh_model.shard.names.values())}
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


def _plain_specs(mesh_model: MeshModel) -> dict[str, Any]:
    """Return the specs of the local shards as plain data."""
    return {
        name: [list(one.spec.shape), one.spec.plain_slices()]
        for name, one in mesh_model.shard.shards.items()
    }


def _has_same_shards(mesh_model: MeshModel, plain: Mapping[str, Any]) -> bool:
    """Return whether the processes that wrote a checkpoint held the same shards as this unit's."""
    if "parts" not in plain or len(plain["parts"]) != mesh_model.unit.size:
        return False
    return bool(plain["parts"][mesh_model.unit.rank] == _plain_specs(mesh_model))


def _saved_mesh(saved: SavedModel) -> Mesh:
    """Return the mesh on which a model was saved, with the number of copies at that time."""
    return Mesh.parse(saved.plain.get("mesh", "dp=1")).of_workers(len(saved.owns))


def to_full_state(saved: SavedModel) -> SavedModel:
    """Return a checkpoint as a job without a mesh, or with another mesh, reads it."""
    if "mesh" not in saved.plain:
        return saved
    mesh = _saved_mesh(saved)
    plain = {key: value for key, value in saved.plain.items() if not key.endswith("by place")}
    units = [list(mesh.unit(u * mesh.unit_size)) for u in range(mesh.dp)]
    return replace(
        saved,
        plain={**plain, "layout": None},
        owns=[_assembled(saved, members) for members in units],
        own_plains=[_own_plain(saved, members) for members in units],
    )


def _own_plain(saved: SavedModel, members: Sequence[int]) -> dict[str, Any] | None:
    """Return the own plain state of the processes of one copy as one; None if one had left."""
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
    """Return a function that reads and assembles the own tensors of the processes of one copy."""

    def read() -> Tensors:
        full: Tensors = {}
        for index, rank in enumerate(members):
            specs = saved.plain["parts"][index]
            for name, tensor in saved.owns[rank]().items():
                param = _param_name(name)
                if param is None:
                    continue
                shape, slices = specs.get(param, ((), ()))
                if not slices or tensor.dim() == 0:
                    full[name] = tensor
                    continue
                if name not in full:
                    full[name] = torch.zeros(shape, dtype=tensor.dtype)
                spec = SliceSpec(tuple(shape), tuple(Slice(*numbers) for numbers in slices))
                spec.put(full[name], tensor)
        return full

    return read


def to_shard(saved: SavedModel, mesh_model: MeshModel) -> SavedModel:
    """Return what this process needs of a checkpoint."""
    index, plain, here = mesh_model.unit.rank, saved.plain, set(mesh_model.state_shards())

    def take_shards(tensors: Mapping[str, torch.Tensor]) -> Tensors:
        needed = {n: t for n, t in tensors.items() if _is_needed(mesh_model, n, here)}
        return {name: _take_shard(mesh_model, name, tensor) for name, tensor in needed.items()}

    common = take_shards(saved.common)
    if _has_same_shards(mesh_model, plain):
        kept = f"part{index}/"
        common |= {n.removeprefix(kept): t for n, t in saved.common.items() if n.startswith(kept)}
        own = {k.removesuffix(_SUFFIX): v[index] for k, v in plain.items() if k.endswith(_SUFFIX)}
        same_index = _saved_mesh(saved).data_parallel_numbers(index)
        return SavedModel(
            common,
            _plain_of_shards(mesh_model, {**plain, **own}),
            [saved.owns[rank] for rank in same_index],
            [saved.own_plains[rank] for rank in same_index],
        )
    full = to_full_state(saved)

    def read_own(read: Callable[[], Tensors]) -> Callable[[], Tensors]:
        return lambda: take_shards(read())

    plain = {**full.plain, "layout": None}
    plain.pop("method", None)
    return SavedModel(
        common,
        _plain_of_shards(mesh_model, plain),
        [read_own(read) for read in full.owns],
        [one if one is None else _plain_of_shards(mesh_model, one) for one in full.own_plains],
    )


def _is_needed(mesh_model: MeshModel, name: str, here: set[str]) -> bool:
    """Return whether this process needs a tensor of a checkpoint."""
    kind, _, rest = name.partition("/")
    if kind == "optimizer":
        return _find_shard(mesh_model, name) is not None
    if kind == "model":
        return rest in here
    return not kind.startswith("part") and kind != "pace"


def _take_shard(mesh_model: MeshModel, name: str, tensor: torch.Tensor) -> torch.Tensor:
    shard = _find_shard(mesh_model, name)
    if shard is not None:
        is_full = tuple(tensor.shape) == shard.spec.shape
        return shard.spec.of(tensor).contiguous() if is_full else tensor
    spec = mesh_model.buffer_spec(name.removeprefix("model/"))
    return tensor if spec is None else spec.of(tensor).contiguous()


def _plain_of_shards(mesh_model: MeshModel, plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return plain state without that of parameters which this process does not hold."""
    result = dict(plain)
    if "optimizer values" in result:
        shards = mesh_model.shard.shards
        values = result["optimizer values"]
        result["optimizer values"] = {k: v for k, v in values.items() if k in shards}
    if "extra" in result:
        here = mesh_model.state_shards()
        result["extra"] = {k: v for k, v in result["extra"].items() if k in here}
    return result
