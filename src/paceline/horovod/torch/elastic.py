"""Elastic training of torch models: TorchState, beside the neutral parts of horovod/elastic.py."""

from __future__ import annotations

import copy
from typing import Any

import torch

from paceline.horovod.elastic import HostsUpdatedInterrupt as HostsUpdatedInterrupt
from paceline.horovod.elastic import ObjectState as ObjectState
from paceline.horovod.elastic import State as State
from paceline.horovod.elastic import run as run
from paceline.horovod.objects import broadcast_object
from paceline.horovod.torch.functions import broadcast_optimizer_state, broadcast_parameters
from paceline.horovod.torch.sampler import ElasticSampler as ElasticSampler


class StateHandler:
    """Keeps, restores and sends one object by its state_dict."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(self._saved)

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))
        self.save()

    def set_value(self, value: Any) -> None:
        """Handle another object from now on."""
        self.value = value
        self.save()


class ModelStateHandler(StateHandler):
    """Sends parameters and buffers tensor by tensor."""

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)
        self.save()


class OptimizerStateHandler(StateHandler):
    """Sends an optimizer's state and hyperparameters."""

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)
        self.save()


class SamplerStateHandler(StateHandler):
    """A restored sampler divides what is left among the present ranks."""


_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (torch.optim.lr_scheduler.LRScheduler, StateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """Return which handler keeps objects of which type."""
    return _registry


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """Replace the handlers."""
    global _registry
    _registry = registry


class TorchState(ObjectState):
    """Models, optimizers, schedulers and samplers, and plain values as attributes."""

    _handlers: dict[str, StateHandler]

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        handlers: dict[str, StateHandler] = {}
        for name, value in {**kwargs, "model": model, "optimizer": optimizer}.items():
            found = next((h for kind, h in _registry if isinstance(value, kind)), None)
            if found is not None:
                handlers[name] = found(value)
                object.__setattr__(self, name, value)
                kwargs.pop(name, None)
            elif name in ("model", "optimizer"):
                object.__setattr__(self, name, None)
        object.__setattr__(self, "_handlers", handlers)
        super().__init__(**kwargs)

    def save(self) -> None:
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def reset(self) -> None:
        for handler in self._handlers.values():
            if isinstance(handler.value, ElasticSampler):
                handler.value.reset()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._handlers:
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)
