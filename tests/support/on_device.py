"""Run the body of a test that was written for the CPU with its model on the test device.

`adapted` changes what the body gets from outside: `pl.distribute` moves the model to this worker's
device first, its forward pass takes tensors of the CPU and returns such, and so does the body. The
loss is computed on the CPU, so a test has the numbers that it has there if the device has them. The
sharded update, which divides memory of a host, becomes the replicated one, which has its bits.

Chosen with TEST_ON_DEVICE=<schedule> in the environment of pytest (support/ranks.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map


def adapted(body: Callable[..., Any], schedule: str) -> Callable[..., Any]:
    """Return a body that trains on the device, on this schedule, and fails if a race was found."""
    from support.devices import load_device

    laggard = load_device()
    from laggard.pytest_plugin import schedule_named

    def on_device(*arguments: Any) -> Any:
        use_the_same_attention()
        _move_what_is_distributed()
        with schedule_named(schedule):
            value = _to_cpu(body(*arguments))
        if races := laggard.take_races():
            raise AssertionError(f"laggard found {len(races)} races:\n{races[0].report}")
        return value

    return on_device


def use_the_same_attention() -> None:
    """Compute attention on the CPU from separate operations, as the device does: the CPU's fused
    kernel rounds differently."""
    torch.backends.cuda.enable_flash_sdp(False)


def on_host(exchange: Any) -> Any:
    """Return the exchange that sees host memory: on a device the inner one, else the same."""
    return getattr(exchange, "inner", exchange)


def _to_cpu(value: Any) -> Any:
    """Return containers, data classes and tensors with all tensors on the CPU."""

    def move(thing: Any) -> Any:
        if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
            fields = {f.name: getattr(thing, f.name) for f in dataclasses.fields(thing)}
            return dataclasses.replace(thing, **_to_cpu(fields))
        return thing.cpu() if isinstance(thing, torch.Tensor) else thing

    return tree_map(move, value)


def _without_sharding(given: Any) -> Any:
    def replace(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        value = value.replace("update=sharded", "update=replicated")
        return "replicated" if value == "sharded" else value

    return tree_map(replace, given)


def _move_what_is_distributed() -> None:
    import paceline as pl

    distribute = pl.distribute

    def distribute_there(
        model: nn.Module, optimizer: torch.optim.Optimizer, *arguments: Any, **options: Any
    ) -> Any:
        device = pl.device()
        arguments, options = _without_sharding((arguments, options))
        swap = torch.__future__.set_swap_module_params_on_conversion
        swap(True)  # the optimizer has the parameters already
        model.to(device)
        swap(False)
        is_fused = any(group.get("fused") for group in optimizer.param_groups)
        for state in optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and (value.dim() or is_fused):
                    state[name] = value.to(device)

        def inputs(module: nn.Module, given: Any, named: Any) -> Any:
            def move(thing: Any) -> Any:
                return thing.to(device) if isinstance(thing, torch.Tensor) else thing

            return tree_map(move, (given, named))

        model.register_forward_pre_hook(inputs, with_kwargs=True)
        found = distribute(model, optimizer, *arguments, **options)
        model.register_forward_hook(lambda module, given, output: _to_cpu(output))
        return found

    pl.distribute = distribute_there
