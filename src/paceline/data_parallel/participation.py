"""Participation: what of a training follows workers that come and go, registered under its name."""

from __future__ import annotations

import torch
from torch import nn

from paceline.data_parallel.averaging import Compressing
from paceline.data_parallel.buffers import Buffers
from paceline.data_parallel.common_memory import CommonMemory
from paceline.data_parallel.elastic_step import ElasticStep
from paceline.data_parallel.groundwork import Groundwork
from paceline.data_parallel.housing import Housing
from paceline.data_parallel.reducer import Reducer
from paceline.data_parallel.training_state import TrainingState
from paceline.pace.method import PaceState

_USES = ("", " pace", " memory", " codec")


def take_part(
    ground: Groundwork,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    reducer: Reducer,
    buffers: Buffers,
    housing: Housing,
) -> ElasticStep | None:
    """Be ready for workers that come and go; return how steps are taken where those are an
    exchange of all."""
    elastic, step = ground.job.elastic, None
    elastic.may_part = ground.may_part
    if not elastic.is_on:
        return None
    is_served = ground.serving is not None
    elastic.is_lockstep = not ground.is_free
    if ground.method is None:
        step = ElasticStep(
            ground.job,
            optimizer,
            reducer,
            buffers,
            ground.form("flags"),
            is_served=is_served,
            resize_lr=ground.options.resize_lr,
        )
    kept = TrainingState(ground.job, model, optimizer, buffers, not is_served)
    elastic.register(ground.name, kept)
    if ground.method is not None:
        elastic.register(f"{ground.name} pace", PaceState(ground.method))
    if isinstance(ground.exchange, Compressing) and ground.exchange.journeys is not None:
        elastic.register(f"{ground.name} codec", ground.exchange.journeys)
    if ground.is_common:
        memory = CommonMemory(ground.host, housing, is_newcomer=elastic.is_candidate)
        elastic.register(f"{ground.name} memory", memory)
    return step


def leave(ground: Groundwork) -> None:
    """Take all of it back."""
    for use in _USES:
        ground.job.elastic.unregister(ground.name + use)
