"""A distributed model as a checkpoint has it, at whatever pace and with however many workers.

What stands for all workers is loaded everywhere. With as many workers as there were, at the same
pace, each also gets its own back and goes on to the bit. Otherwise what was each worker's own is
brought to what all can begin with: optimizers that had gone apart become their mean, residuals the
mean of the residuals (so that what was left out still comes, and as much of it), and a pace begins
anew at the values that stand for all. What was done is returned in words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.data_parallel.handover import mean_state, params_of
from paceline.data_parallel.saving import Tensors, codec_of, layout_of, names_of
from paceline.data_parallel.training import Training
from paceline.data_parallel.training_state import numbered_groups
from paceline.errors import CheckpointMismatch
from paceline.pace.method import PaceState
from paceline.state.plain import read_back
from paceline.state.protocol import State

_SHOWN = 5


@dataclass(frozen=True)
class SavedModel:
    """What a checkpoint has of one model (saving.py)."""

    common: Mapping[str, torch.Tensor]
    plain: Mapping[str, Any]
    owns: Sequence[Callable[[], Tensors]]  # by worker; read when they are needed
    own_plains: Sequence[Mapping[str, Any] | None]  # None: it had left

    @property
    def num_workers(self) -> int:
        """How many workers saved it."""
        return len(self.owns)

    @property
    def those_there(self) -> list[tuple[Tensors, Mapping[str, Any]]]:
        """What each of those had who had not left."""
        pairs = zip(self.owns, self.own_plains, strict=True)
        return [(read(), plain) for read, plain in pairs if plain is not None]


class Restoring:
    """Puts one model to where a checkpoint has it. Collective, on the main thread."""

    def __init__(
        self, training: Training, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        self._training, self._model, self._optimizer = training, model, optimizer
        self.notices: list[str] = []

    def run(self, saved: SavedModel, rank: int, world_size: int) -> None:
        """Load everything; `rank` is this worker's place among `world_size`."""
        training = self._training
        fits = saved.plain["layout"] == layout_of(training)
        is_same_pace = saved.plain["pace"] == str(training.pace) and fits
        is_same_world = saved.num_workers == world_size and None not in saved.own_plains
        own: Tensors = {}
        goes_on = is_same_pace and is_same_world
        if goes_on:
            own = saved.owns[rank]()
        elif saved.plain["pace"] != str(training.pace):
            self._say(f"pace {training.pace} instead of {saved.plain['pace']}")
        elif not fits and training.method is not None:
            self._say(f"what pace {training.pace} keeps begins anew: parameters lie otherwise")
        self.load_values(saved)
        self._load_optimizer(saved, rank, own if goes_on else None)
        self._load_method(saved, rank, own, is_same_pace=is_same_pace, goes_on=goes_on)
        self._load_codec(saved, rank, own, fits=fits, goes_on=goes_on)
        if goes_on:
            self._load_model(saved, own)

    def load_values(self, saved: SavedModel) -> None:
        """Load parameters and buffers, the same on all workers."""
        self._load_model(saved, {})
        self._training.take_over_values()
        if self._training.method is not None:
            self._training.method.begin()

    def _say(self, text: str) -> None:
        if text not in self.notices:
            self.notices.append(text)

    # -- values -------------------------------------------------------------------------------

    def _load_model(self, saved: SavedModel, own: Mapping[str, torch.Tensor]) -> None:
        """Load what stands for all, or with `own` what this worker had in its place."""
        source = {**saved.common, **own} if own else saved.common
        found = _under("model/", source)
        extra = saved.plain.get("extra", {})
        found |= {name: read_back(value, saved.common) for name, value in extra.items()}
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
        told = saved.plain["optimizer"]
        if told["class"] != type(optimizer).__name__:
            raise CheckpointMismatch(
                f"the checkpoint has the state of {told['class']}, and the script's optimizer is"
                f" {type(optimizer).__name__}; use the same one, or load only the weights:"
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
        groups = self._groups(saved, told["groups"])
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
            self._say("the optimizers of the workers, which had gone apart, became their mean")
        states = [_entries_of(own, plain["optimizer values"]) for own, plain in saved.those_there]
        return mean_state(states)

    def _groups(self, saved: SavedModel, told: Sequence[Any]) -> list[dict[str, Any]]:
        mine = self._optimizer.param_groups
        if len(told) != len(mine):
            raise CheckpointMismatch(
                f"the checkpoint's optimizer has {len(told)} param groups, the script's"
                f" {len(mine)}; make the same groups"
            )
        settings = [read_back(theirs["settings"], saved.common) for theirs in told]
        return numbered_groups(self._optimizer, settings)

    # -- what a pace and a codec keep ---------------------------------------------------------

    def _load_method(
        self, saved: SavedModel, rank: int, own: Tensors, *, is_same_pace: bool, goes_on: bool
    ) -> None:
        method = self._training.method
        if method is None or not is_same_pace or "method" not in saved.plain:
            return  # it has begun at the values that were loaded
        counts = _own(saved, rank)["method"] if goes_on else saved.plain["method"]
        shared = _under("pace/", saved.common)
        PaceState(method).load(State(counts, shared, own=_under("pace/", own)), None)

    def _load_codec(
        self, saved: SavedModel, rank: int, own: Tensors, *, fits: bool, goes_on: bool
    ) -> None:
        codec = codec_of(self._training)
        (_, first), *_ = saved.those_there
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
            self._say("what the codec had left out of gradients was dropped")
        elif goes_on:
            codec.load(State(_own(saved, rank)["codec"], own=_under("codec/", own)), None)
        else:
            self._say("of what the codecs of the workers had left out, each begins with the mean")
            theirs = [_under("codec/", own) for own, _ in saved.those_there]
            codec.load(State(first["codec"], own=_means_of(kept, theirs)), None)


def _means_of(
    mine: Mapping[str, torch.Tensor], theirs: Sequence[Mapping[str, torch.Tensor]]
) -> Tensors:
    """Return the mean of what the workers had, as far as it has the shape that it has here."""
    means = Tensors()
    for name, tensor in mine.items():
        found = [one[name] for one in theirs if name in one]
        if found and all(one.shape == tensor.shape for one in found):
            means[name] = torch.stack(found).mean(0)
    return means


def _own(saved: SavedModel, rank: int) -> Mapping[str, Any]:
    plain = saved.own_plains[rank]
    assert plain is not None, "who goes on was there"
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
            entries.setdefault(param, {})[key] = read_back(written, tensors)
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
