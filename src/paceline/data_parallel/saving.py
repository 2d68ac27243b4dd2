"""What a checkpoint has of one distributed model, however its pace has spread it.

    common   the same whoever asks: what stands for all workers. Parameters and buffers under the
             names of `state_dict()`, the optimizer's state by the parameter's name, what a method
             keeps for all
    own      this worker's alone, of use only to a job with as many workers at the same pace: values
             that have gone apart from the others', what a codec or a method has not sent yet

    model/layer.weight   optimizer/layer.weight/exp_avg   pace/begin.0   codec/0

To take a picture is collective and changes nothing; the tensors in it are live, to be copied
before the next step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from msgspec import structs
from torch import nn

from paceline.data_parallel.handover import params_of
from paceline.data_parallel.training import Training
from paceline.data_parallel.training_state import settings_of
from paceline.pace.method import PaceState
from paceline.state.plain import write_down
from paceline.state.protocol import Part

Tensors = dict[str, torch.Tensor]


@dataclass
class Picture:
    """A distributed model at one moment, as one worker has it."""

    common: Tensors = field(default_factory=dict)  # every worker has all of it, or the first alone
    first: Tensors = field(default_factory=dict)  # common too, but only the first worker has it
    own: Tensors = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)  # common
    own_plain: dict[str, Any] = field(default_factory=dict)


def take_picture(training: Training, model: nn.Module, optimizer: torch.optim.Optimizer) -> Picture:
    """Return what a checkpoint has of a model. Collective where workers have gone apart."""
    picture = Picture()
    serving, apart = training.serving, training.is_apart
    is_first = training.is_first
    if serving is not None:
        serving.update.settle()
        if is_first:
            serving.update.pull()
    agreed = training.agreed_values()
    is_shared = serving is None
    groups = _groups(model, optimizer, picture.common)
    picture.plain = {
        "pace": str(training.pace),
        "options": {k: str(value) for k, value in structs.asdict(training.options).items()},
        "optimizer": {"class": type(optimizer).__name__, "groups": groups},
        "layout": layout_of(training),
    }
    state = model.state_dict()
    params = dict(model.named_parameters(remove_duplicate=False))  # tied ones have several names
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            picture.common[f"model/{name}"] = agreed.get(params.get(name), value.detach())
        else:
            written = write_down(value, f"extra/{name}", picture.common)
            picture.plain.setdefault("extra", {})[name] = written
    own_optimizer = apart or (serving is not None and serving.optimizer_state is None)
    if own_optimizer:
        picture.own.update(_optimizer_state(model, optimizer, picture.own_plain))
    elif is_first or is_shared:
        picture.common.update(_optimizer_state(model, optimizer, picture.plain))
    if apart:
        # By all of their names, as the common ones: the last that is loaded counts.
        picture.own.update({f"model/{name}": p.detach() for name, p in params.items()})
    if apart or training.buffers_are_local:
        named = {name for name, _ in model.named_buffers()}
        own = {f"model/{name}": value for name, value in state.items() if name in named}
        picture.own.update(own)
    _add_pace(picture, training, is_first=is_first)
    if not is_shared:
        picture.first, picture.common = (
            ({**picture.first, **picture.common} if is_first else {}),
            {},
        )
    return picture


def layout_of(training: Training) -> list[list[Any]]:
    """Say how parameters lie in buckets: flat tensors fit only where this is the same."""
    return [
        [[slot.name, slot.place.start, slot.place.count] for slot in bucket.slots]
        for bucket in training.reducer.buckets
    ]


def codec_of(training: Training) -> Part | None:
    """Return what keeps the residuals of gradients at this pace; None: nothing does."""
    return training.exchange.residuals


def _add_pace(picture: Picture, training: Training, *, is_first: bool) -> None:
    """Add what the pace and the codec have: what is kept for all is written by the first worker."""
    if training.method is not None:
        state = PaceState(training.method).state()
        picture.own_plain["method"] = picture.plain["method"] = state.counts
        picture.own.update(_named("pace", {**state.copied, **state.own}))
        if is_first:
            fetched = {name: fetch() for name, fetch in state.served.items()}
            picture.first.update(_named("pace", {**state.shared, **fetched}))
    codec = codec_of(training)
    if codec is not None:
        state = codec.state()
        picture.own_plain["codec"] = state.counts
        picture.own.update(_named("codec", {**state.copied, **state.own}))


def _named(kind: str, tensors: Mapping[str, torch.Tensor]) -> Tensors:
    return {f"{kind}/{name}": tensor for name, tensor in tensors.items()}


def names_of(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return the name of every parameter; of one with several, the first."""
    return {param: name for name, param in model.named_parameters()}


def _groups(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Tensors
) -> list[dict[str, Any]]:
    names, groups = names_of(model), []
    pairs = zip(optimizer.param_groups, settings_of(optimizer), strict=True)
    for number, (group, settings) in enumerate(pairs):
        written = write_down(settings, f"optimizer-group-{number}", tensors)
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
                values.setdefault(name, {})[key] = write_down(value, what, found)
    plain["optimizer values"] = values
    return found
