"""The state of one distributed model in a checkpoint, however its pace has spread it.

    common   the same on every worker: what the workers agree on. Parameters and buffers under the
             names of `state_dict()`, the optimizer's state by the parameter's name, what a method
             keeps for all
    own      this worker's alone, useful only to a job with as many workers at the same pace: values
             that have diverged from the others', what a codec or a method has not sent yet

    model/layer.weight   optimizer/layer.weight/exp_avg   pace/begin.0   codec/0

Taking a snapshot is collective and changes nothing; the tensors in it are live, to be copied before
the next step.

A snapshot can be loaded at any pace and with any number of workers. The common state is loaded
everywhere. With as many workers as there were, at the same pace, each also gets its own state back
and resumes bit for bit. Otherwise the workers' own states are combined: diverged optimizers become
their mean, residuals the mean of the residuals (so that what was left out is still sent, and as
much of it), and a pace restarts from the common values. The loader returns notices of that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from msgspec import structs
from torch import nn

from paceline.data_parallel.model_state.elastic_state import group_settings, numbered_groups
from paceline.data_parallel.pace_switch.handover import mean_state, params_of
from paceline.data_parallel.training import Training
from paceline.errors import CheckpointMismatch
from paceline.pace.method import PaceState
from paceline.state.protocol import Part, State
from paceline.state.serializer import state_from_json, state_to_json

Tensors = dict[str, torch.Tensor]


@dataclass
class ModelSnapshot:
    """A distributed model at one moment, as one worker sees it."""

    common: Tensors = field(default_factory=dict)  # every worker has all of it, or the first alone
    first: Tensors = field(default_factory=dict)  # common too, on the first worker only
    own: Tensors = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)  # common
    own_plain: dict[str, Any] = field(default_factory=dict)


def take_snapshot(
    training: Training, model: nn.Module, optimizer: torch.optim.Optimizer
) -> ModelSnapshot:
    """Return the state of a model for a checkpoint. Collective where workers have diverged."""
    snapshot = ModelSnapshot()
    serving, apart = training.serving, training.is_apart
    is_first = training.is_first
    if serving is not None:
        serving.update.settle()
        if is_first:
            serving.update.pull()
    agreed = training.agreed_values()
    is_shared = serving is None
    groups = _groups(model, optimizer, snapshot.common)
    snapshot.plain = {
        "pace": str(training.pace),
        "options": {k: str(value) for k, value in structs.asdict(training.options).items()},
        "optimizer": {"class": type(optimizer).__name__, "groups": groups},
        "layout": layout_of(training),
    }
    state = model.state_dict()
    params = dict(model.named_parameters(remove_duplicate=False))  # tied ones have several names
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            snapshot.common[f"model/{name}"] = agreed.get(params.get(name), value.detach())
        else:
            written = state_to_json(value, f"extra/{name}", snapshot.common)
            snapshot.plain.setdefault("extra", {})[name] = written
    own_optimizer = apart or (serving is not None and serving.optimizer_state is None)
    if own_optimizer:
        snapshot.own.update(_optimizer_state(model, optimizer, snapshot.own_plain))
    elif is_first or is_shared:
        snapshot.common.update(_optimizer_state(model, optimizer, snapshot.plain))
    if apart:
        # Under all of their names, like the common ones: the last that is loaded counts.
        snapshot.own.update({f"model/{name}": p.detach() for name, p in params.items()})
    if apart or training.buffers_are_local:
        named = {name for name, _ in model.named_buffers()}
        own = {f"model/{name}": value for name, value in state.items() if name in named}
        snapshot.own.update(own)
    _add_pace(snapshot, training, is_first=is_first)
    if not is_shared:
        snapshot.first, snapshot.common = (
            ({**snapshot.first, **snapshot.common} if is_first else {}),
            {},
        )
    return snapshot


def layout_of(training: Training) -> list[list[Any]]:
    """Return how parameters lie in buckets: flat tensors fit only where this is the same."""
    return [
        [[slot.name, slot.segment.start, slot.segment.count] for slot in bucket.slots]
        for bucket in training.reducer.buckets
    ]


def residuals_of(training: Training) -> Part | None:
    """Return what keeps the residuals of gradients at this pace, or None."""
    return training.exchange.residuals


def _add_pace(snapshot: ModelSnapshot, training: Training, *, is_first: bool) -> None:
    """Add the state of pace and codec; the first worker adds what is kept for all."""
    if training.method is not None:
        state = PaceState(training.method).state()
        snapshot.own_plain["method"] = snapshot.plain["method"] = state.counts
        snapshot.own.update(_named("pace", {**state.copied, **state.own}))
        if is_first:
            fetched = {name: fetch() for name, fetch in state.served.items()}
            snapshot.first.update(_named("pace", {**state.shared, **fetched}))
    codec = residuals_of(training)
    if codec is not None:
        state = codec.state()
        snapshot.own_plain["codec"] = state.counts
        snapshot.own.update(_named("codec", {**state.copied, **state.own}))


def _named(kind: str, tensors: Mapping[str, torch.Tensor]) -> Tensors:
    return {f"{kind}/{name}": tensor for name, tensor in tensors.items()}


def names_of(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return the name of every parameter; of one with several, the first."""
    return {param: name for name, param in model.named_parameters()}


def _groups(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Tensors
) -> list[dict[str, Any]]:
    names, groups = names_of(model), []
    pairs = zip(optimizer.param_groups, group_settings(optimizer), strict=True)
    for number, (group, settings) in enumerate(pairs):
        written = state_to_json(settings, f"optimizer-group-{number}", tensors)
        groups.append({"params": [names[p] for p in group["params"]], "settings": written})
    return groups


def _optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, plain: dict[str, Any]
) -> Tensors:
    names, found = names_of(model), Tensors()
    params = params_of(optimizer)
    values: dict[str, dict[str, Any]] = {}
    for number, entries in optimizer.state_dict()["state"].items():
        name = names[params[number]]
        for key, value in entries.items():
            if isinstance(value, torch.Tensor):
                found[f"optimizer/{name}/{key}"] = value.detach()
            else:
                what = f"optimizer-value/{name}/{key}"
                values.setdefault(name, {})[key] = state_to_json(value, what, found)
    plain["optimizer values"] = values
    return found


_SHOWN = 5


@dataclass(frozen=True)
class SavedModel:
    """The state of one model in a checkpoint that was saved."""

    common: Mapping[str, torch.Tensor]
    plain: Mapping[str, Any]
    owns: Sequence[Callable[[], Tensors]]  # by worker; read when they are needed
    own_plains: Sequence[Mapping[str, Any] | None]  # None: the worker had left

    @property
    def num_workers(self) -> int:
        """How many workers saved it."""
        return len(self.owns)

    @property
    def present(self) -> list[tuple[Tensors, Mapping[str, Any]]]:
        """The own states of the workers that had not left."""
        pairs = zip(self.owns, self.own_plains, strict=True)
        return [(read(), plain) for read, plain in pairs if plain is not None]


class ModelLoader:
    """Loads one model from a checkpoint. Collective, on the main thread."""

    def __init__(
        self, training: Training, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        self._training, self._model, self._optimizer = training, model, optimizer
        self.notices: list[str] = []

    def run(self, saved: SavedModel, rank: int, world_size: int) -> None:
        """Load everything; `rank` is this worker's index among `world_size`."""
        training = self._training
        fits = saved.plain["layout"] == layout_of(training)
        is_same_pace = saved.plain["pace"] == str(training.pace) and fits
        is_same_world = saved.num_workers == world_size and None not in saved.own_plains
        own: Tensors = {}
        resumes = is_same_pace and is_same_world
        if resumes:
            own = saved.owns[rank]()
        elif saved.plain["pace"] != str(training.pace):
            self._notice(f"pace {training.pace} instead of {saved.plain['pace']}")
        elif not fits and training.method is not None:
            self._notice(f"what pace {training.pace} keeps starts afresh: other buckets")
        self.load_values(saved)
        self._load_optimizer(saved, rank, own if resumes else None)
        self._load_method(saved, rank, own, is_same_pace=is_same_pace, resumes=resumes)
        self._load_codec(saved, rank, own, fits=fits, resumes=resumes)
        if resumes:
            self._load_model(saved, own)

    def load_values(self, saved: SavedModel) -> None:
        """Load parameters and buffers, the same on all workers."""
        self._load_model(saved, {})
        self._training.take_over_values()
        if self._training.method is not None:
            self._training.method.begin()

    def _notice(self, text: str) -> None:
        if text not in self.notices:
            self.notices.append(text)

    # -- values -------------------------------------------------------------------------------

    def _load_model(self, saved: SavedModel, own: Mapping[str, torch.Tensor]) -> None:
        """Load the common values, or with `own` those that this worker had instead."""
        source = {**saved.common, **own} if own else saved.common
        found = _under("model/", source)
        extra = saved.plain.get("extra", {})
        found |= {name: state_from_json(value, saved.common) for name, value in extra.items()}
        expected = self._model.state_dict()
        lacking = [name for name in expected if name not in found]
        foreign = [name for name in found if name not in expected]
        if lacking or foreign:
            raise CheckpointMismatch(
                "the checkpoint is of another model: it has no"
                f" {_some(lacking) or 'missing names'}, and the model has no"
                f" {_some(foreign) or 'missing names'}; build the model that was saved"
            )
        for name, value in expected.items():
            _require_shape(name, value, found[name])
        if own and not any(name.startswith("model/") for name in own):
            return
        self._model.load_state_dict(found, strict=True)

    def _load_optimizer(self, saved: SavedModel, rank: int, own: Tensors | None) -> None:
        optimizer, names = self._optimizer, names_of(self._model)
        described = saved.plain["optimizer"]
        if described["class"] != type(optimizer).__name__:
            raise CheckpointMismatch(
                f"the checkpoint has the state of {described['class']}, and the script's optimizer"
                f" is {type(optimizer).__name__}; use the same one, or load only the weights:"
                " pl.Checkpoint(..., resume='weights')"
            )
        entries = self._entries(saved, rank, own)
        numbers = {names[p]: n for n, p in enumerate(params_of(optimizer))}
        foreign = [name for name in entries if name not in numbers]
        if foreign:
            raise CheckpointMismatch(
                f"the checkpoint has the optimizer's state of {_some(foreign)}, which the script's"
                " optimizer does not update"
            )
        groups = self._groups(saved, described["groups"])
        state = {numbers[name]: values for name, values in entries.items()}
        optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _entries(
        self, saved: SavedModel, rank: int, own: Tensors | None
    ) -> dict[str, dict[str, Any]]:
        """Return the optimizer's state by the names of parameters."""
        if "optimizer values" in saved.plain:
            return _entries_of(saved.common, saved.plain["optimizer values"])
        if own is not None:
            return _entries_of(own, _own(saved, rank)["optimizer values"])
        if saved.num_workers > 1:
            self._notice("the diverged optimizers of the workers became their mean")
        states = [_entries_of(own, plain["optimizer values"]) for own, plain in saved.present]
        return mean_state(states)

    def _groups(self, saved: SavedModel, described: Sequence[Any]) -> list[dict[str, Any]]:
        mine = self._optimizer.param_groups
        if len(described) != len(mine):
            raise CheckpointMismatch(
                f"the checkpoint's optimizer has {len(described)} param groups, the script's"
                f" {len(mine)}; make the same groups"
            )
        settings = [state_from_json(theirs["settings"], saved.common) for theirs in described]
        return numbered_groups(self._optimizer, settings)

    # -- pace and codec -----------------------------------------------------------------------

    def _load_method(
        self, saved: SavedModel, rank: int, own: Tensors, *, is_same_pace: bool, resumes: bool
    ) -> None:
        method = self._training.method
        if method is None or not is_same_pace or "method" not in saved.plain:
            return  # it has started from the values that were loaded
        counts = _own(saved, rank)["method"] if resumes else saved.plain["method"]
        shared = _under("pace/", saved.common)
        PaceState(method).load(State(counts, shared, own=_under("pace/", own)), None)

    def _load_codec(
        self, saved: SavedModel, rank: int, own: Tensors, *, fits: bool, resumes: bool
    ) -> None:
        codec = residuals_of(self._training)
        (_, first), *_ = saved.present
        if codec is None or "codec" not in first:
            return
        state = codec.state()
        kept = {**state.copied, **state.own}
        if not kept:
            return
        is_same_codec = saved.plain["options"].get("compress") == str(
            self._training.options.compress
        )
        if not fits or not is_same_codec:
            self._notice("what the codec had left out of gradients was dropped")
        elif resumes:
            codec.load(State(_own(saved, rank)["codec"], own=_under("codec/", own)), None)
        else:
            self._notice("each worker starts with the mean of what the codecs had left out")
            theirs = [_under("codec/", own) for own, _ in saved.present]
            codec.load(State(first["codec"], own=_means_of(kept, theirs)), None)


def _means_of(
    mine: Mapping[str, torch.Tensor], theirs: Sequence[Mapping[str, torch.Tensor]]
) -> Tensors:
    """Return the means of the workers' tensors, as far as their shapes fit here."""
    means = Tensors()
    for name, tensor in mine.items():
        found = [one[name] for one in theirs if name in one]
        if found and all(one.shape == tensor.shape for one in found):
            means[name] = torch.stack(found).mean(0)
    return means


def _own(saved: SavedModel, rank: int) -> Mapping[str, Any]:
    plain = saved.own_plains[rank]
    assert plain is not None, "a worker that resumes had not left"
    return plain


def _under(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def _entries_of(
    tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    entries: dict[str, dict[str, Any]] = {}
    for name, tensor in _under("optimizer/", tensors).items():
        param, _, key = name.rpartition("/")
        entries.setdefault(param, {})[key] = tensor
    for param, by_key in values.items():
        for key, written in by_key.items():
            entries.setdefault(param, {})[key] = state_from_json(written, tensors)
    return entries


def _require_shape(name: str, mine: Any, theirs: Any) -> None:
    if not isinstance(mine, torch.Tensor):
        return
    if not isinstance(theirs, torch.Tensor) or mine.shape != theirs.shape:
        found = list(theirs.shape) if isinstance(theirs, torch.Tensor) else type(theirs).__name__
        raise CheckpointMismatch(
            f"the checkpoint has {name} as {found}, expected {list(mine.shape)} as the script's"
            " model has it; build the model that was saved"
        )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
