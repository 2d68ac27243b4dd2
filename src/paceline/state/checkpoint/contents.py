"""What a worker saves in a checkpoint, and what it loads from one.

    model/..., optimizer/..., pace/...     of the first distributed model; of others model.1/...
    object/NAME/...                        objects that the script gave by name, or to pl.carry
    rank.3/...                             worker 3's own state: random generators, and everything
                                           that differs between workers

State that is the same on all workers is written once: each worker writes a share of it, by size.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from paceline.comm.devices import random_state_of, set_random_state_of
from paceline.data.cursor.resumption import data_state, resume_data
from paceline.data_parallel.distribute import distributed
from paceline.data_parallel.model_state.model_snapshot import ModelSnapshot, SavedModel
from paceline.data_parallel.pace_switch.switcher import PaceSwitcher
from paceline.errors import CheckpointMismatch, UsageError
from paceline.model_parallel.distribute import find_mesh_model, mesh_models
from paceline.runtime.job import Job
from paceline.runtime.mesh import Mesh
from paceline.state.files.load import LoadedCheckpoint
from paceline.state.protocol import State, UserObject
from paceline.state.serializer import state_from_json, state_to_json

_TORCH, _NUMPY, _DEVICE = "random/torch", "random/numpy", "random/device"


def rng_state(tensors: dict[str, torch.Tensor], device: torch.device) -> dict[str, Any]:
    """Return the state of torch's, Python's and numpy's generators; add tensors to `tensors`.

    `device`: that of this process. Its type is part of the state: other types have other formats.
    """
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    tensors[_TORCH] = torch.get_rng_state()
    tensors[_NUMPY] = torch.from_numpy(np.asarray(keys, dtype=np.uint32).view(np.int32).copy())
    if device.type != "cpu":
        tensors[f"{_DEVICE}/{device.type}"] = random_state_of(device)
    return {
        "python": [version, list(internal), gauss],
        "numpy": [kind, int(position), int(has_gauss), float(cached)],
    }


def set_rng_state(plain: Any, tensors: dict[str, torch.Tensor], device: torch.device) -> bool:
    """Set the state of the random generators; return False if there is none for the device."""
    version, internal, gauss = plain["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, position, has_gauss, cached = plain["numpy"]
    keys = tensors[_NUMPY].clone().numpy().view(np.uint32)
    np.random.set_state((kind, keys, position, has_gauss, cached))
    torch.set_rng_state(
        tensors[_TORCH].clone()
    )  # torch reads it as a struct, which must be aligned
    if device.type == "cpu":
        return True
    state = tensors.get(f"{_DEVICE}/{device.type}")
    if state is not None:
        set_random_state_of(device, state.clone())
    return state is not None


_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _distributed() -> list[tuple[Any, PaceSwitcher]]:
    """Return the script's distributed models, in order."""
    on_mesh = {id(made.switcher): model for model, made in mesh_models.items()}
    return [(on_mesh.get(id(one), model), one) for model, one in distributed()]


def saved_models(given: Mapping[str, Any]) -> list[PaceSwitcher]:
    """Return the distributed models that are saved: those given by name, or all there are."""
    known = _distributed()
    chosen = [one for model, one in known if any(thing is model for thing in given.values())]
    return chosen or [one for _, one in known]


def saved_objects(job: Job, given: Mapping[str, Any]) -> dict[str, UserObject]:
    """Return the given objects and those of `pl.carry`, without distributed ones."""
    pairs = [(model, one.optimizer) for model, one in _distributed()]
    covered = {id(thing) for pair in pairs for thing in pair}
    found: dict[str, UserObject] = {}
    for name, thing in {**job.carried, **given}.items():
        if not _NAME.fullmatch(name):
            raise UsageError(f"Checkpoint({name!r}=...): expected a plain name")
        part = UserObject(name, thing, "Checkpoint")
        is_known = any(thing is other.thing for other in found.values())
        if id(thing) not in covered and not is_known:
            found[name] = part
    return found


Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class WorkerState:
    """What one worker saves."""

    tensors: Tensors
    per_worker: dict[str, Any]  # JSON, of this worker
    shared: dict[str, Any]  # JSON; the first worker's is saved


def gather(
    job: Job, saved: Sequence[PaceSwitcher], objects: Mapping[str, UserObject], steps: int
) -> WorkerState:
    """Return what this worker saves in a checkpoint. Collective."""
    shared, mine, models = Tensors(), Tensors(), list[dict[str, Any]]()
    rank, size = job.world.rank, job.world.size
    own: dict[str, Any] = {"models": [], "steps": steps}
    for number, switcher in enumerate(saved):
        full = _full_state(switcher)
        shared.update(_prefixed(full.common, number))
        mine.update(_prefixed(full.first, number))
        mine.update({f"rank.{rank}/{n}": t for n, t in _prefixed(full.own, number).items()})
        models.append({**full.plain, "steps": switcher.steps})
        own["models"].append({**full.own_plain, "steps": switcher.steps})
    written, found = {}, Tensors()
    for name, part in objects.items():
        written[name] = state_to_json(part.state().shared["state"], f"object/{name}", found)
    if rank == 0:
        mine.update(found)
    generators = Tensors()
    own["random"] = rng_state(generators, job.device)
    mine.update({f"rank.{rank}/{name}": tensor for name, tensor in generators.items()})
    own["data"] = data_state(job.batch_view)
    common = {
        "models": models,
        "objects": written,
        "steps": steps,
        "steps_done": job.steps_done,
        "is_lockstep": is_lockstep(saved),
        "mesh": str((job.mesh or Mesh()).of_workers(size)),
    }
    return WorkerState({**mine, **_share(shared, size, rank)}, own, common)


def _full_state(switcher: PaceSwitcher) -> ModelSnapshot:
    made = find_mesh_model(switcher)
    if made is None:
        return switcher.take_snapshot()
    from paceline.model_parallel.sharding.full_state import full_state

    return full_state(made)


def _mapped(saved: SavedModel, switcher: PaceSwitcher) -> SavedModel:
    """Return the state of a model for this worker's mesh, whatever mesh it was saved on."""
    made = find_mesh_model(switcher)
    if made is None and "mesh" not in saved.plain:
        return saved
    from paceline.model_parallel.sharding.full_state import to_full_state, to_shard

    return to_full_state(saved) if made is None else to_shard(saved, made)


def steps_of(loaded: LoadedCheckpoint, rank: int) -> int:
    """Return how often a worker had called `step()`."""
    return _own_or_shared(loaded.content, rank)["steps"]  # type: ignore[no-any-return]


def _steps_of_model(content: Any, number: int, rank: int) -> int:
    return _own_or_shared(content, rank)["models"][number]["steps"]  # type: ignore[no-any-return]


def _own_or_shared(content: Any, rank: int) -> Any:
    """Return the counts of a worker: free-running workers are at different steps."""
    owns, common = content["workers"], content["common"]
    own = owns[rank] if rank < len(owns) else None
    return common if own is None or common["is_lockstep"] else own


def is_lockstep(saved: Sequence[PaceSwitcher]) -> bool:
    """Return whether all workers do the same step at the same time."""
    return not any(switcher.training.is_free for switcher in saved)


def departure_state(job: Job, saved: Sequence[PaceSwitcher], steps: int) -> dict[str, Any]:
    """Return the counters of a worker that exits before the other workers."""
    counts = [{"steps": switcher.steps} for switcher in saved]
    return {"has_left": True, "steps": steps, "models": counts, "data": data_state(job.batch_view)}


def restore(
    job: Job,
    loaded: LoadedCheckpoint,
    models: Sequence[PaceSwitcher],
    objects: Mapping[str, UserObject],
) -> list[str]:
    """Restore everything from a checkpoint; return sentences about what differs. Collective."""
    content, tensors = loaded.content, loaded.tensors
    common, owns = content["common"], content["workers"]
    if len(models) != len(common["models"]):
        raise CheckpointMismatch(
            f"{loaded.path} has {len(common['models'])} distributed models, the script has"
            f" {len(models)}; create pl.Checkpoint after all calls of pl.distribute, with the same"
            " models"
        )
    notices, rank = list[str](), job.world.rank
    before, now = _mesh_of(content), (job.mesh or Mesh()).of_workers(job.world.size)
    for number, switcher in enumerate(models):
        saved = _mapped(_saved_model(content, tensors, number), switcher)
        notices += switcher.restore(saved, _steps_of_model(content, number, rank))
    _restore_objects(loaded, common["objects"], objects)
    job.reporter.steps_done = common["steps_done"]
    if len(owns) != job.world.size:
        notices.insert(0, f"{_workers(job.world.size)} instead of {len(owns)}")
    if before != now and max(before.unit_size, now.unit_size) > 1:
        notices.insert(0, f"mesh {now} instead of {before}")
    states = [owns[number] for number in before.batch_numbers(0)]
    notices += resume_data(
        job.batch_view, _data_states(states, notices), is_lockstep=common["is_lockstep"]
    )
    # On another mesh: one source for all workers of a unit, which must draw the same numbers.
    source = rank if before == now else now.unit_of(job.env.number)
    if source < len(owns) and _was_there(owns[source]):
        theirs = _of_rank(tensors, source)
        if not set_rng_state(owns[source]["random"], theirs, job.device):
            notices.append(
                f"{job.device} keeps the random state of the script: the job that saved had none"
            )
        _set_stage_state(models, tensors, source, is_same=before == now)
    elif job.world.size > len(owns):
        notices.append("workers beyond those that saved keep the random state of the script")
    return notices


def _mesh_of(content: Any) -> Mesh:
    return Mesh.parse(content["common"].get("mesh", "dp=1")).of_workers(len(content["workers"]))


def _set_stage_state(
    models: Sequence[PaceSwitcher], tensors: Tensors, rank: int, *, is_same: bool
) -> None:
    """Restore the random state of pipeline stages."""
    for number, switcher in enumerate(models):
        made = find_mesh_model(switcher)
        found = _unprefixed(_of_rank(tensors, rank), number)
        if is_same and made is not None and made.shard.pipeline is not None:
            states = made.shard.pipeline.random_states
            states.update({name: found[name].clone() for name in states if name in found})


def restore_weights(loaded: LoadedCheckpoint, models: Sequence[PaceSwitcher]) -> None:
    """Load only the models' values, for a new training that starts from them."""
    for number, switcher in enumerate(models):
        saved = _saved_model(loaded.content, loaded.tensors, number)
        switcher.restore_values(_mapped(saved, switcher))


def _was_there(own: Any) -> bool:
    """Return whether a worker took part in the save and had not left before."""
    return own is not None and not own.get("has_left")


def _data_states(owns: Sequence[Any], notices: list[str]) -> list[Any]:
    """Return the data position of each worker; for an unknown one, that of the first known one."""
    known = [own["data"] for own in owns if own is not None]
    unknown = [str(index) for index, own in enumerate(owns) if own is None]
    if unknown:
        notices.append(f"the data position of worker {', '.join(unknown)} is unknown")
    states = [known[0] if own is None else own["data"] for own in owns]
    return [{**state, "number": index} for index, state in enumerate(states)]


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"


def _restore_objects(
    loaded: LoadedCheckpoint, written: Mapping[str, Any], objects: Mapping[str, UserObject]
) -> None:
    lacking = [name for name in objects if name not in written]
    foreign = [name for name in written if name not in objects]
    if lacking or foreign:
        raise CheckpointMismatch(
            f"{loaded.path} has the objects {sorted(written)}, the script gives {sorted(objects)};"
            " give pl.Checkpoint the same objects, by the same names"
        )
    for name, part in objects.items():
        part.load(State(shared={"state": state_from_json(written[name], loaded.tensors)}), None)


def _saved_model(content: Any, tensors: Tensors, number: int) -> SavedModel:
    plain = content["common"]["models"][number]
    owns = content["workers"]

    def own(rank: int) -> Tensors:
        return _unprefixed(_of_rank(tensors, rank), number)

    return SavedModel(
        _unprefixed(tensors, number),
        plain,
        [lambda rank=rank: own(rank) for rank in range(len(owns))],  # type: ignore[misc]
        [one["models"][number] if _was_there(one) else None for one in owns],
    )


def _of_rank(tensors: Mapping[str, torch.Tensor], rank: int) -> Tensors:
    prefix = f"rank.{rank}/"
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def _prefixed(tensors: Mapping[str, torch.Tensor], number: int) -> Tensors:
    """Add the number of the model to the names."""
    if number == 0:
        return dict(tensors)
    return {f"{h}.{number}/{r}": t for n, t in tensors.items() for h, _, r in [n.partition("/")]}


def _unprefixed(tensors: Mapping[str, torch.Tensor], number: int) -> Tensors:
    ending, found = f".{number}" if number else "", Tensors()
    for name, tensor in tensors.items():
        head, _, rest = name.partition("/")
        if head.endswith(ending) and (number or "." not in head):
            found[f"{head.removesuffix(ending)}/{rest}"] = tensor
    return found


def _share(tensors: Mapping[str, torch.Tensor], size: int, rank: int) -> Tensors:
    """Return this worker's share of the shared tensors: about the same bytes on each worker."""
    loads, mine = [0] * size, Tensors()
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    for name in sorted(tensors, key=lambda name: (-sizes[name], name)):
        lightest = loads.index(min(loads))
        loads[lightest] += sizes[name]
        if lightest == rank:
            mine[name] = tensors[name]
    return mine
