"""The state of a training that elastic jobs transfer to newcomers.

A newcomer needs parameters, the buffers that all agreed on last, the optimizer's state and
settings, and the number of steps done. With parameter servers, the servers hold the parameters and
the optimizer's state, and a newcomer reads them there.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from paceline.data_parallel.bucket_allocator import BucketAllocator, CommonMemory
from paceline.data_parallel.model_state.buffers import Buffers
from paceline.data_parallel.reducer import Reducer
from paceline.data_parallel.setup import TrainingSetup
from paceline.data_parallel.update.coordinated_step import ElasticStep
from paceline.data_parallel.update.elastic_sharding import ElasticShardedUpdate
from paceline.errors import InconsistentRanks
from paceline.pace.method import PaceState
from paceline.runtime.job import Job
from paceline.state.protocol import Change, Part, State

_NO_SETTINGS = ("params", "param_names")
_USES = ("", " pace", " memory", " codec", " update")


class TrainingState(Part):
    """The state of one distributed model, as a newcomer receives it."""

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        buffers: Buffers,
        is_local: bool,
        update: ElasticShardedUpdate | None = None,
    ) -> None:
        self._job = job
        self._model = weakref.ref(model)
        self._optimizer = weakref.ref(optimizer)
        self._buffers = buffers
        self._is_local = is_local  # parameters and optimizer state are on the workers
        self._update = update  # which finishes the step under way before the state is asked for

    def state(self) -> State:
        """Return everything, as it was after the last step that all agreed on."""
        model, optimizer = self._both()
        shared: dict[str, Any] = {
            "buffers": self._buffers.agreed,
            "settings": group_settings(optimizer),
        }
        if self._is_local:
            shared["params"] = {name: p.detach() for name, p in model.named_parameters()}
            shared["optimizer"] = optimizer.state_dict()["state"]
        what = f"the optimizer {type(optimizer).__name__}"
        steps = self._job.steps_done + (self._update is not None and self._update.has_uncounted)
        return State(counts=steps, shared=shared, what=what)

    def load(self, state: State, change: Change | None) -> None:  # noqa: ARG002
        """Load everything."""
        model, optimizer = self._both()
        if state.shared["buffers"].numel():
            self._buffers.load_agreed(state.shared["buffers"])
        if self._is_local:
            _load_params(dict(model.named_parameters()), state.shared["params"])
            groups = numbered_groups(optimizer, state.shared["settings"])
            content = {"state": state.shared["optimizer"], "param_groups": groups}
            optimizer.load_state_dict(content)
        else:
            set_group_settings(optimizer, state.shared["settings"])
        self._job.reporter.steps_done = state.counts

    def _both(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        model, optimizer = self._model(), self._optimizer()
        assert model is not None and optimizer is not None, "this worker trains, so it has both"
        return model, optimizer


def register_elastic(
    setup: TrainingSetup,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    reducer: Reducer,
    buffers: Buffers,
    allocator: BucketAllocator,
) -> ElasticStep | None:
    """Register the state of a training with an elastic job.

    Returns how steps are taken where all workers exchange gradients, else None.
    """
    elastic, step = setup.job.elastic, None
    elastic.may_diverge = setup.may_diverge
    if not elastic.is_on:
        return None
    is_served = setup.serving is not None
    elastic.is_lockstep = not setup.is_free
    if setup.method is None:
        step = ElasticStep(
            setup.job,
            optimizer,
            reducer,
            buffers,
            setup.form("flags"),
            is_served=is_served,
            resize_lr=setup.options.resize_lr,
        )
    parts = (model, optimizer, buffers, not is_served, setup.elastic_update)
    kept = TrainingState(setup.job, *parts)
    elastic.register(setup.name, kept)
    if setup.method is not None:
        elastic.register(f"{setup.name} pace", PaceState(setup.method))
    # The state on servers stays there; only the workers' is transferred.
    if setup.exchange.traits.is_collective and setup.exchange.residuals is not None:
        elastic.register(f"{setup.name} codec", setup.exchange.residuals)
    if setup.elastic_update is not None:
        elastic.register(f"{setup.name} update", setup.elastic_update)
    if setup.is_common:
        memory = CommonMemory(setup.host, allocator, is_newcomer=elastic.is_joining)
        elastic.register(f"{setup.name} memory", memory)
    return step


def unregister_elastic(setup: TrainingSetup) -> None:
    """Remove all of it."""
    for use in _USES:
        setup.job.elastic.unregister(setup.name + use)


def group_settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the settings of each param group: all but its parameters."""
    return [{k: v for k, v in g.items() if k not in _NO_SETTINGS} for g in optimizer.param_groups]


def set_group_settings(
    optimizer: torch.optim.Optimizer, settings: Sequence[Mapping[str, Any]]
) -> None:
    """Set the settings of the param groups."""
    for group, mine in zip(optimizer.param_groups, settings, strict=True):
        group.update(mine)


def numbered_groups(
    optimizer: torch.optim.Optimizer, settings: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return these settings with the parameters of each group as numbers, as in a state_dict."""
    groups, first = [], 0
    for group, mine in zip(optimizer.param_groups, settings, strict=True):
        count = len(group["params"])
        groups.append({**mine, "params": list(range(first, first + count))})
        first += count
    return groups


def _load_params(mine: dict[str, nn.Parameter], theirs: dict[str, torch.Tensor]) -> None:
    here = [[name, list(param.shape)] for name, param in mine.items()]
    there = [[name, list(value.shape)] for name, value in theirs.items()]
    if here != there:
        raise _difference(here, there)
    with torch.no_grad():
        for name, value in theirs.items():
            mine[name].copy_(value)


def _difference(mine: list[Any], theirs: list[Any]) -> InconsistentRanks:
    pairs = [(a, b) for a, b in zip(mine, theirs, strict=False) if a != b]
    here, there = pairs[0] if pairs else (f"{len(mine)} parameters", f"{len(theirs)}")
    return InconsistentRanks(
        f"a newcomer has built another model than the job trains: {here} here, {there} there;"
        " start it with the same script and arguments",
        name=str(here),
    )
