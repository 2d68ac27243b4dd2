"""Paceline: train PyTorch models across processes and machines at the pace you choose.

The names below are looked up when they are first used, so that the command line and the launcher
never pay for importing torch.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "init": "paceline.runtime.job",
    "shutdown": "paceline.runtime.job",
    "rank": "paceline.runtime.job",
    "world_size": "paceline.runtime.job",
    "local_rank": "paceline.runtime.job",
    "device": "paceline.runtime.job",
    "data_rank": "paceline.runtime.job",
    "data_world_size": "paceline.runtime.job",
    "is_data_worker": "paceline.runtime.job",
    "world": "paceline.runtime.job",
    "new_group": "paceline.runtime.job",
    "empty": "paceline.runtime.job",
    "report": "paceline.runtime.job",
    "should_stop": "paceline.runtime.job",
    "carry": "paceline.runtime.job",
    "launch": "paceline.launcher.function.launch",
    "distribute": "paceline.model_parallel.distribute",
    "clip_grad_norm_": "paceline.model_parallel.distribute",
    "tensor_plan": "paceline.model_parallel.tensor.parallelize",
    "check_consistency": "paceline.data_parallel.checks.model",
    "measure_layers": "paceline.model_parallel.pipeline.measuring",
    "shard": "paceline.data.shard",
    "data_warmup": "paceline.data.split.plan",
    "Checkpoint": "paceline.state.checkpoint.checkpoint",
    "GradScaler": "paceline.data_parallel.amp.grad_scaler",
    "GradualWarmup": "paceline.data_parallel.update.gradual_warmup",
    "steps": "paceline.data.loops",
    "epochs": "paceline.data.loops",
    "Trainer": "paceline.trainer.trainer",
    "Callback": "paceline.trainer.callbacks",
    "Group": "paceline.comm.group",
    "Work": "paceline.runtime.work",
    "Membership": "paceline.control.member",
    "PacelineError": "paceline.errors",
}

_MODULES = ("errors", "extend", "ps", "ray")

__all__ = [*_HOME, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"paceline.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


if "torch" in sys.modules:
    # An installed Paceline is found by `import torch` itself; one on PYTHONPATH is not.
    importlib.import_module("paceline.runtime.torch_plugin").register()


if TYPE_CHECKING:
    from paceline import errors as errors
    from paceline import extend as extend
    from paceline import ps as ps
    from paceline import ray as ray
    from paceline.comm.group import Group as Group
    from paceline.control.member import Membership as Membership
    from paceline.data.loops import epochs as epochs
    from paceline.data.loops import steps as steps
    from paceline.data.shard import shard as shard
    from paceline.data.split.plan import data_warmup as data_warmup
    from paceline.data_parallel.amp.grad_scaler import GradScaler as GradScaler
    from paceline.data_parallel.checks.model import check_consistency as check_consistency
    from paceline.data_parallel.update.gradual_warmup import GradualWarmup as GradualWarmup
    from paceline.errors import PacelineError as PacelineError
    from paceline.launcher.function.launch import launch as launch
    from paceline.model_parallel.distribute import clip_grad_norm_ as clip_grad_norm_
    from paceline.model_parallel.distribute import distribute as distribute
    from paceline.model_parallel.pipeline.measuring import measure_layers as measure_layers
    from paceline.model_parallel.tensor.parallelize import tensor_plan as tensor_plan
    from paceline.runtime.job import carry as carry
    from paceline.runtime.job import data_rank as data_rank
    from paceline.runtime.job import data_world_size as data_world_size
    from paceline.runtime.job import device as device
    from paceline.runtime.job import empty as empty
    from paceline.runtime.job import init as init
    from paceline.runtime.job import is_data_worker as is_data_worker
    from paceline.runtime.job import local_rank as local_rank
    from paceline.runtime.job import new_group as new_group
    from paceline.runtime.job import rank as rank
    from paceline.runtime.job import report as report
    from paceline.runtime.job import should_stop as should_stop
    from paceline.runtime.job import shutdown as shutdown
    from paceline.runtime.job import world as world
    from paceline.runtime.job import world_size as world_size
    from paceline.runtime.work import Work as Work
    from paceline.state.checkpoint.checkpoint import Checkpoint as Checkpoint
    from paceline.trainer.callbacks import Callback as Callback
    from paceline.trainer.trainer import Trainer as Trainer
