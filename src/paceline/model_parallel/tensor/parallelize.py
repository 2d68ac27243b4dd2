"""Shard a model over the tp axis: trace, shard, probe, keep or undo, report.

See sharded_tensor.py for how a model's own code still works, tracing.py for what can be sharded,
and probing.py for why a plan is right.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from paceline.comm.devices import CPU, devices_of, random_state_of, set_random_state_of
from paceline.errors import InconsistentRanks, UsageError
from paceline.model_parallel.dry_run import unfuse
from paceline.model_parallel.tensor import cross_entropy, rules
from paceline.model_parallel.tensor import math_rules as mathematics
from paceline.model_parallel.tensor import shape_rules as shapes
from paceline.model_parallel.tensor.axis import Axis
from paceline.model_parallel.tensor.example_input import Run, find_runs
from paceline.model_parallel.tensor.layers import LayerSharding, SharedInput
from paceline.model_parallel.tensor.plan import (
    TensorPlan,
    make_rows,
    missing_input_note,
    replicated_modules,
    resolve,
)
from paceline.model_parallel.tensor.probing import (
    RegionCall,
    count_collectives,
    difference,
    observe,
    record_calls,
)
from paceline.model_parallel.tensor.sharded_tensor import map_tensors
from paceline.model_parallel.tensor.styles import ModuleSharder, Style, apply_torch_styles
from paceline.model_parallel.tensor.tracing import PlanTracer, TraceResult

__all__ = ["parallelize", "tensor_plan"]

RULES_IN = (cross_entropy, mathematics, rules, shapes)  # imported to register them


def parallelize(
    model: nn.Module,
    device_mesh: DeviceMesh,
    plan: Mapping[str, Any] | None = None,
    example: tuple[Any, ...] | None = None,
    host_mesh: DeviceMesh | None = None,
) -> TensorPlan:
    """Shard the model in place over the mesh's one axis. Collective.

    `host_mesh`: the same axis for tensors on the CPU, if the model is on a device.

    Without a plan, what can be sharded is found by running the model on the example, or on a
    guessed input. Parameters keep their objects and names, and hold the local shards. All processes
    start with the values, and the random state, of the first process of the axis.
    """
    axis = _axis_of(device_mesh, host_mesh)
    forced = None if plan is None else resolve(model, plan, axis.count)
    if axis.count == 1:
        return TensorPlan(1)
    broadcast_model(model, axis)
    if any(isinstance(style, ParallelStyle) for style in (forced or {}).values()):
        return _parallelize_by_hand(model, device_mesh, axis, forced or {})
    runs = find_runs(model, broadcast_example(example, axis))
    found = PlanTracer(model, axis.count, forced).trace(runs)
    if forced is not None:
        _require_all(forced, found, runs, axis.count)
    require_same_plan(found.styles, axis)
    made = TensorPlan(axis.count)
    _shard_and_probe(model, axis, found, runs, made, is_forced=forced is not None)
    unfuse(model)
    axis.num_forward.clear()
    axis.num_backward.clear()
    count_collectives(runs)
    counts = {n: (axis.num_forward[n], axis.num_backward[n]) for n in found.styles}
    made.styles.update(found.styles)
    made.rows = make_rows(model, found.styles, counts, made.parts)
    made.replicated = replicated_modules(model, found, bool(runs))
    made.note = missing_input_note(model, runs)
    return made


def tensor_plan(model: nn.Module, tp: int, example: tuple[Any, ...] | None = None) -> TensorPlan:
    """Return the automatic plan without changing the model; needs no other process."""
    if tp < 1:
        raise UsageError(f"tensor plan: tp={tp}; expected a number of at least 1")
    runs = find_runs(model, example)
    found = PlanTracer(model, tp, None).trace(runs)
    made = TensorPlan(tp, dict(found.styles))
    made.rows = make_rows(model, found.styles, _expected(found), None, tp)
    made.replicated = replicated_modules(model, found, bool(runs))
    made.note = missing_input_note(model, runs)
    return made


def _axis_of(device_mesh: DeviceMesh, host_mesh: DeviceMesh | None) -> Axis:
    if device_mesh.ndim != 1:
        raise UsageError(
            f"tensor parallel: the device mesh has {device_mesh.ndim} dimensions"
            f" {device_mesh.mesh_dim_names}; pass the one of tp, as in device_mesh['tp']"
        )
    group = device_mesh.get_group()
    on_host = None if host_mesh is None else host_mesh.get_group()
    return Axis(group, device_mesh.get_local_rank(), device_mesh.size(), on_host)


def _parallelize_by_hand(
    model: nn.Module, device_mesh: DeviceMesh, axis: Axis, forced: dict[str, Any]
) -> TensorPlan:
    """Apply a plan with styles of torch: its author knows what the model's code expects."""
    ours = {name: style for name, style in forced.items() if isinstance(style, Style)}
    of_torch = {name: style for name, style in forced.items() if name not in ours}
    made = TensorPlan(axis.count, dict(forced))
    made.parts |= apply_torch_styles(model, device_mesh, of_torch)
    modules, sharder = dict(model.named_modules()), ModuleSharder(axis)
    for name, style in ours.items():
        sharder.shard_module(LayerSharding(axis, name, style.blocks), modules[name], style)
    _keep(model, sharder, made)
    made.rows = make_rows(model, forced, {}, made.parts)
    made.replicated = replicated_modules(model, TraceResult(styles=forced), True)
    return made


def _require_all(
    forced: Mapping[str, Style], found: TraceResult, runs: list[Run], count: int
) -> None:
    """Raise UsageError if any style of a plan by hand cannot be applied."""
    if not runs:
        for name, style in forced.items():
            found.styles[name] = style
            found.groups.append(frozenset([name]))
        return
    for name, style in forced.items():
        if name in found.refused:
            raise UsageError(
                f"tensor plan: {name} cannot be sharded as {style} on the axis tp={count}:"
                f" {found.refused[name]}; write 'replicate', or use another tp"
            )
        if name not in found.styles:
            raise UsageError(
                f"tensor plan: {name} was not used as {style} when the model ran on the example;"
                " write 'replicate', or pass an example that reaches it"
            )


def _shard_and_probe(
    model: nn.Module,
    axis: Axis,
    found: TraceResult,
    runs: list[Run],
    made: TensorPlan,
    is_forced: bool,
) -> None:
    """Shard one group after the other; undo and list those whose results differ."""
    modules = dict(model.named_modules())
    groups = group_modules(modules, found)
    regions = {modules[region] for group in groups for region in group.regions}
    calls = record_calls(regions, runs)
    shared_inputs: dict[str, SharedInput] = {}
    for names in (shared for shared in found.shared_inputs if len(shared) > 1):
        shared_inputs |= dict.fromkeys(names, SharedInput())
    for group in groups:
        sharder, why = _try(group, modules, axis, found, calls, shared_inputs)
        if why is None:
            _keep(model, sharder, made)
            continue
        sharder.undo()
        if is_forced:
            raise UsageError(
                f"tensor plan: {', '.join(sorted(group.names))}: {why}; write 'replicate'"
            )
        for name in group.names:
            del found.styles[name]
            found.refused[name] = why


def _try(
    group: ModuleGroup,
    modules: dict[str, nn.Module],
    axis: Axis,
    found: TraceResult,
    calls: dict[nn.Module, RegionCall],
    shared_inputs: dict[str, SharedInput],
) -> tuple[ModuleSharder, str | None]:
    # In the same order on all processes: running a region is collective.
    regions = [modules[name] for name in sorted(group.regions) if modules[name] in calls]
    before = [observe(region, calls[region]) for region in regions]
    sharder = ModuleSharder(axis)
    for name in sorted(group.names):
        style = found.styles[name]
        columns = [n for g in found.groups if name in g for n in g if n in shared_inputs]
        releases = tuple({id(shared_inputs[n]): shared_inputs[n] for n in columns}.values())
        sharding = LayerSharding(axis, name, style.blocks, shared_inputs.get(name), releases)
        sharder.shard_module(sharding, modules[name], style)
    why = None
    for region, full in zip(regions, before, strict=True):
        try:
            after = observe(region, calls[region])
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            why = f"sharded, it fails: {type(error).__name__}: {str(error).splitlines()[0]}"
            break
        why = why or difference(full, after, sharder)
    # Because of rounding, processes may be on different sides of a bound.
    is_bad = axis.all_reduce(torch.tensor([0.0 if why is None else 1.0]))
    if float(is_bad) and why is None:
        why = "sharded, it differs on another process"
    return sharder, why


def _keep(model: nn.Module, sharder: ModuleSharder, made: TensorPlan) -> None:
    """Write the specs of what was sharded into the plan."""
    for name, param in model.named_parameters(remove_duplicate=False):
        if part := sharder.spec_of(param):
            made.parts[name] = part
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if part := sharder.spec_of(buffer):
            made.buffer_parts[name] = part


def _expected(found: TraceResult) -> dict[str, tuple[int, int]]:
    """Return the planned number of collectives of each module, forward and backward."""
    # Styles are in the order of calls.
    first = {next(n for n in found.styles if n in names) for names in found.shared_inputs}
    known = {"row": (1, 0), "embedding": (1, 0), "attention": (1, 1)}
    counts = {}
    for name, style in found.styles.items():
        if style.kind == "vocabulary":
            counts[name] = (2, 1)
        else:
            counts[name] = known.get(style.kind, (0, int(name in first)))
    return counts


def broadcast_model(model: nn.Module, axis: Axis) -> None:
    """Broadcast the first process's parameters, buffers and random states."""
    tensors = [*model.parameters(), *model.buffers()]
    states = {device: random_state_of(device) for device in [CPU, *devices_of(tensors)]}
    with torch.no_grad():
        for tensor in [*tensors, *states.values()]:
            tensor.copy_(_broadcast_from_first(tensor, axis))
    for device, state in states.items():
        set_random_state_of(device, state)


def broadcast_example(example: tuple[Any, ...] | None, axis: Axis) -> tuple[Any, ...] | None:
    """Return the first process's example."""
    same: tuple[Any, ...] | None = map_tensors(example, lambda t: _broadcast_from_first(t, axis))
    return same


def require_same_plan(styles: Mapping[str, Any], axis: Axis) -> None:
    """Raise InconsistentRanks on all processes if one of them would shard other modules."""
    text = repr(sorted((name, str(style)) for name, style in styles.items()))
    numbers = axis.all_gather(torch.tensor([zlib.crc32(text.encode())]))
    differing = [index for index, number in enumerate(numbers) if number != numbers[0]]
    if differing:
        raise InconsistentRanks(
            f"tensor parallel: the processes {differing} of the axis tp={axis.count} would shard"
            " other modules than process 0; what the model computes must not depend on the rank"
        )


def _broadcast_from_first(tensor: Tensor, axis: Axis) -> Tensor:
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    dist.broadcast(copy, group_src=0, group=axis.group_of(copy))
    return copy


@dataclass
class ModuleGroup:
    """Modules that are sharded together or not at all; tied weights can join several regions."""

    names: set[str]
    regions: set[str]


def group_modules(modules: dict[str, nn.Module], found: TraceResult) -> list[ModuleGroup]:
    """Return the groups in the order in which the model uses them."""
    linked = _joined(g & found.styles.keys() for g in found.groups)
    owners: dict[int, set[str]] = {}
    for name in found.styles:
        for param in modules[name].parameters():
            owners.setdefault(id(param), set()).add(name)
    decisions = _joined([*linked, *owners.values()])
    called = found.called
    return [
        ModuleGroup(names, {_around(one, called) for one in linked if one <= names})
        for names in decisions
    ]


def _joined(sets: Iterable[Iterable[str]]) -> list[set[str]]:
    """Join sets that have a common element."""
    result: list[set[str]] = []
    for given in sets:
        new = set(given)
        if not new:
            continue
        apart = [one for one in result if not one & new]
        touching = [one for one in result if one & new]
        for one in touching:
            new |= one
        result = [*apart, new]
    return result


def _around(names: set[str], called: set[str]) -> str:
    """Return the smallest module that was called and contains all of these."""
    first, *others = [name.split(".") for name in sorted(names)]
    if not others:
        return ".".join(first)
    length = 0
    while all(len(o) > length and o[length] == first[length] for o in others):
        length += 1
        if length == len(first):
            break
    steps = first[:length]
    while steps and ".".join(steps) not in called:
        steps = steps[:-1]
    return ".".join(steps)
