"""Where a model's tensors are, and whether a pace can train them there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from paceline.comm.devices import collective_backend, devices_of, is_on_device
from paceline.options.table import Options
from paceline.pace.parse import PaceSpec

_SHOWN = 3


def device_of(model: nn.Module) -> torch.device | None:
    """Return the accelerator on which a model's trainable parameters are; None: all on the CPU."""
    found = devices_of(param for param in model.parameters() if param.requires_grad)
    return found[0] if found else None


def find_problem_with_devices(
    model: nn.Module, here: torch.device, pace: PaceSpec, options: Options, *, is_elastic: bool
) -> str | None:
    """Return why a model cannot be trained where its tensors are, or None.

    `here`: the device of this process.
    """
    found = devices_of((*model.parameters(), *model.buffers()))
    if not found:
        return None
    device = found[0]
    return (
        _find_another(model, here)
        or _find_mixture(model, device, options.placement)
        or _find_unsupported(device, pace, options, is_elastic)
    )


def find_problem_on_mesh(
    model: nn.Module, device: torch.device, here: torch.device, mesh: str
) -> str | None:
    """Return why a model on this device cannot be divided over a mesh, or None."""
    if device.type == "cpu":
        return None
    problem = _find_another(model, here) or _find_mixture(model, device, "whole")
    if problem is None and collective_backend(device) is None:
        problem = (
            f"{mesh}: {device.type} has no collective backend of its own in this build of torch,"
            " and the shards of a model are exchanged by it; train on the CPU (--devices cpu), or"
            " with dp alone, which goes through host memory"
        )
    return problem


def _find_another(model: nn.Module, here: torch.device) -> str | None:
    """Refuse a model that is on several devices, or on that of another process."""
    found = devices_of((*model.parameters(), *model.buffers()))
    if len(found) > 1:
        return (
            f"the model is on several devices, {_examples(model, found)}; a worker trains on one:"
            " start a worker for each device"
        )
    if found and found[0] != here:
        return (
            f"the model is on {found[0]}, but the device of this process is {here}:"
            f" {_examples(model, found)}; move it with model.to(pl.device()), or choose the"
            " device with --devices"
        )
    return None


def _find_mixture(model: nn.Module, device: torch.device, placement: str) -> str | None:
    """Refuse a model half on the device: as a rule a part of it was forgotten."""
    on_host = [
        name
        for name, p in model.named_parameters()
        if p.requires_grad and not is_on_device(p) and not p.is_meta
    ]
    if not on_host or placement == "mixed":
        return None
    return (
        f"the model is on {device}, but {_list(on_host)} on the CPU: move the whole model with"
        " model.to(pl.device()), or say that it is meant: distribute(..., placement='mixed')"
    )


def _find_unsupported(
    device: torch.device, pace: PaceSpec, options: Options, is_elastic: bool
) -> str | None:
    where = f"parameters on {device}"
    if pace.name == "hogwild":
        return (
            "pace hogwild: all workers write to one memory of the host, and not to"
            f" {where}; use async, local or allreduce, or train on the CPU"
        )
    if is_elastic and options.via == "device":
        return (
            f"via=device: the collectives of {device.type} cannot follow the members of an elastic"
            " job; leave out via, and gradients are exchanged through host memory"
        )
    if options.update == "sharded":
        return (
            "update=sharded divides the step among workers that share the memory of a host, and not"
            f" {where}; use update=replicated, or --mesh fsdp=N, which also divides parameters,"
            " gradients and optimizer state over the devices"
        )
    if options.batchnorm == "global" and (why := _without_collectives(device, options, is_elastic)):
        return (
            f"batchnorm=global adds up statistics in each layer by the collectives of {device.type}"
            f" itself, and {why}; use batchnorm=local, or torch's nn.SyncBatchNorm with a process"
            " group of your own"
        )
    if options.via == "device" and collective_backend(device) is None:
        return (
            f"via=device: {device.type} has no collective backend of its own in this build of"
            " torch; use via=host, which exchanges gradients through host memory"
        )
    return None


def _without_collectives(device: torch.device, options: Options, is_elastic: bool) -> str | None:
    """Return why workers do not use the collectives of the device; None: they do."""
    if is_elastic:
        return "those cannot follow the members of an elastic job"
    if options.via == "host":
        return "via=host does without them"
    if collective_backend(device) is None:
        return "this build of torch has none"
    return None


def _examples(model: nn.Module, devices: Sequence[torch.device]) -> str:
    """Return the names of some tensors on each of these devices."""
    return "; ".join(f"{device}: {_list(list(_names_on(model, device)))}" for device in devices)


def _names_on(model: nn.Module, device: torch.device) -> Iterator[str]:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device == device:
            yield name


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
