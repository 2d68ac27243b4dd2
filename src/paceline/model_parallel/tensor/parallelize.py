"""Cut a model over the tp axis: recognise, cut, probe, keep or put back, tell.

See sharded_tensor.py for how a model's own code goes on to work, tracing.py for what is recognised,
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

from paceline.errors import InconsistentRanks, UsageError
from paceline.model_parallel.tensor import cross_entropy, rules
from paceline.model_parallel.tensor import math_rules as mathematics
from paceline.model_parallel.tensor import shape_rules as shapes
from paceline.model_parallel.tensor.axis import Axis
from paceline.model_parallel.tensor.dry_run import unfuse
from paceline.model_parallel.tensor.example_input import Run, find_runs
from paceline.model_parallel.tensor.layers import Entrance, Place
from paceline.model_parallel.tensor.plan import TensorPlan, resolve
from paceline.model_parallel.tensor.probing import (
    Call,
    count_collectives,
    difference,
    observe,
    record_calls,
)
from paceline.model_parallel.tensor.report import note_of, replicated, rows_of
from paceline.model_parallel.tensor.sharded_tensor import mapped
from paceline.model_parallel.tensor.styles import Cutting, Style
from paceline.model_parallel.tensor.torch_styles import apply_torch_styles
from paceline.model_parallel.tensor.tracing import Findings, Tracing

__all__ = ["parallelize", "tensor_plan"]

RULES_IN = (cross_entropy, mathematics, rules, shapes)  # imported to register them


def parallelize(
    model: nn.Module,
    device_mesh: DeviceMesh,
    plan: Mapping[str, Any] | None = None,
    example: tuple[Any, ...] | None = None,
) -> TensorPlan:
    """Cut the model in place over the mesh's one axis; collective.

    Without a plan, what can be cut is found by running the model on the example, or on a guessed
    input. Parameters keep their objects and names, and hold this process's part. All processes
    begin with the values, and the random state, of the axis's first.
    """
    axis = _axis_of(device_mesh)
    forced = None if plan is None else resolve(model, plan, axis.count)
    if axis.count == 1:
        return TensorPlan(1)
    align(model, axis)
    if any(isinstance(style, ParallelStyle) for style in (forced or {}).values()):
        return _by_hand(model, device_mesh, axis, forced or {})
    runs = find_runs(model, same_example(example, axis))
    findings = Tracing(model, axis.count, forced).settle(runs)
    if forced is not None:
        _require_all(forced, findings, runs, axis.count)
    agree(findings.styles, axis)
    made = TensorPlan(axis.count)
    _cut_and_probe(model, axis, findings, runs, made, is_forced=forced is not None)
    unfuse(model)
    axis.num_forward.clear()
    axis.num_backward.clear()
    count_collectives(runs)
    counts = {n: (axis.num_forward[n], axis.num_backward[n]) for n in findings.styles}
    made.styles.update(findings.styles)
    made.rows = rows_of(model, findings.styles, counts, made.parts)
    made.replicated = replicated(model, findings, bool(runs))
    made.note = note_of(model, runs)
    return made


def tensor_plan(model: nn.Module, tp: int, example: tuple[Any, ...] | None = None) -> TensorPlan:
    """Return the automatic plan without changing the model; needs no other process."""
    if tp < 1:
        raise UsageError(f"tensor plan: tp={tp}; an axis has a size of at least 1")
    runs = find_runs(model, example)
    findings = Tracing(model, tp, None).settle(runs)
    made = TensorPlan(tp, dict(findings.styles))
    made.rows = rows_of(model, findings.styles, _expected(findings), None, tp)
    made.replicated = replicated(model, findings, bool(runs))
    made.note = note_of(model, runs)
    return made


def _axis_of(device_mesh: DeviceMesh) -> Axis:
    if device_mesh.ndim != 1:
        raise UsageError(
            f"tensor parallel: the device mesh has {device_mesh.ndim} dimensions"
            f" {device_mesh.mesh_dim_names}; give the one of tp, as in device_mesh['tp']"
        )
    group = device_mesh.get_group()
    return Axis(group, device_mesh.get_local_rank(), device_mesh.size())


def _by_hand(
    model: nn.Module, device_mesh: DeviceMesh, axis: Axis, forced: dict[str, Any]
) -> TensorPlan:
    """Carry out a plan with styles of torch: its author knows what the model's code expects."""
    ours = {name: style for name, style in forced.items() if isinstance(style, Style)}
    of_torch = {name: style for name, style in forced.items() if name not in ours}
    made = TensorPlan(axis.count, dict(forced))
    made.parts |= apply_torch_styles(model, device_mesh, of_torch)
    modules, cutting = dict(model.named_modules()), Cutting(axis)
    for name, style in ours.items():
        cutting.cut_module(Place(axis, name, style.blocks), modules[name], style)
    _keep(model, cutting, made)
    made.rows = rows_of(model, forced, {}, made.parts)
    made.replicated = replicated(model, Findings(styles=forced), True)
    return made


def _require_all(
    forced: Mapping[str, Style], findings: Findings, runs: list[Run], count: int
) -> None:
    """A plan by hand is carried out, or refused as a whole."""
    if not runs:
        for name, style in forced.items():
            findings.styles[name] = style
            findings.groups.append(frozenset([name]))
        return
    for name, style in forced.items():
        if name in findings.refused:
            raise UsageError(
                f"tensor plan: {name} cannot be cut as {style} on the axis tp={count}:"
                f" {findings.refused[name]}; write 'replicate', or take another tp"
            )
        if name not in findings.styles:
            raise UsageError(
                f"tensor plan: {name} was not used as {style} when the model ran on the example;"
                " write 'replicate', or give an example that reaches it"
            )


def _cut_and_probe(
    model: nn.Module,
    axis: Axis,
    findings: Findings,
    runs: list[Run],
    made: TensorPlan,
    is_forced: bool,
) -> None:
    """Cut group after group; what differs from the whole is put back and listed."""
    modules = dict(model.named_modules())
    groups = grouped(modules, findings)
    regions = {modules[region] for group in groups for region in group.regions}
    calls = record_calls(regions, runs)
    entrances: dict[str, Entrance] = {}
    for names in (shared for shared in findings.entrances if len(shared) > 1):
        entrances |= dict.fromkeys(names, Entrance())
    for group in groups:
        cutting, why = _try(group, modules, axis, findings, calls, entrances)
        if why is None:
            _keep(model, cutting, made)
            continue
        cutting.undo()
        if is_forced:
            raise UsageError(
                f"tensor plan: {', '.join(sorted(group.names))}: {why}; write 'replicate'"
            )
        for name in group.names:
            del findings.styles[name]
            findings.refused[name] = why


def _try(
    group: Group,
    modules: dict[str, nn.Module],
    axis: Axis,
    findings: Findings,
    calls: dict[nn.Module, Call],
    entrances: dict[str, Entrance],
) -> tuple[Cutting, str | None]:
    # In the same order everywhere: to run a region is collective.
    regions = [modules[name] for name in sorted(group.regions) if modules[name] in calls]
    before = [observe(region, calls[region]) for region in regions]
    cutting = Cutting(axis)
    for name in sorted(group.names):
        style = findings.styles[name]
        columns = [n for g in findings.groups if name in g for n in g if n in entrances]
        forgets = tuple({id(entrances[n]): entrances[n] for n in columns}.values())
        place = Place(axis, name, style.blocks, entrances.get(name), forgets)
        cutting.cut_module(place, modules[name], style)
    why = None
    for region, whole in zip(regions, before, strict=True):
        try:
            after = observe(region, calls[region])
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            why = f"cut, it fails: {type(error).__name__}: {str(error).splitlines()[0]}"
            break
        why = why or difference(whole, after, cutting)
    # Rounding may put the processes on different sides of a bound.
    is_bad = axis.sum(torch.tensor([0.0 if why is None else 1.0]))
    if float(is_bad) and why is None:
        why = "cut, it differs on another process"
    return cutting, why


def _keep(model: nn.Module, cutting: Cutting, made: TensorPlan) -> None:
    """Write the parts of what was cut into the plan."""
    for name, param in model.named_parameters(remove_duplicate=False):
        if part := cutting.part_of(param):
            made.parts[name] = part
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if part := cutting.part_of(buffer):
            made.buffer_parts[name] = part


def _expected(findings: Findings) -> dict[str, tuple[int, int]]:
    """Return the collectives of each module, forward and backward, as the plan has them."""
    # Styles are in the order of calls.
    first = {next(n for n in findings.styles if n in names) for names in findings.entrances}
    known = {"row": (1, 0), "embedding": (1, 0), "attention": (1, 1)}
    counts = {}
    for name, style in findings.styles.items():
        if style.word == "vocabulary":
            counts[name] = (2, 1)
        else:
            counts[name] = known.get(style.word, (0, int(name in first)))
    return counts


def align(model: nn.Module, axis: Axis) -> None:
    """Give everybody the first process's parameters, buffers and random state."""
    state = torch.get_rng_state()
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers(), state]:
            tensor.copy_(_of_the_first(tensor, axis))
    torch.set_rng_state(state)


def same_example(example: tuple[Any, ...] | None, axis: Axis) -> tuple[Any, ...] | None:
    """Return the first process's example."""
    same: tuple[Any, ...] | None = mapped(example, lambda t: _of_the_first(t, axis))
    return same


def agree(styles: Mapping[str, Any], axis: Axis) -> None:
    """Raise InconsistentRanks everywhere if somebody would cut other modules."""
    text = repr(sorted((name, str(style)) for name, style in styles.items()))
    numbers = axis.all_pieces(torch.tensor([zlib.crc32(text.encode())]))
    differing = [index for index, number in enumerate(numbers) if number != numbers[0]]
    if differing:
        raise InconsistentRanks(
            f"tensor parallel: the processes {differing} of the axis tp={axis.count} would cut"
            " other modules than process 0; what the model computes must not depend on the rank"
        )


def _of_the_first(tensor: Tensor, axis: Axis) -> Tensor:
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    dist.broadcast(copy, dist.get_global_rank(axis.group, 0), group=axis.group)
    return copy


@dataclass
class Group:
    """Modules that one decision is about; tied weights can join several regions."""

    names: set[str]
    regions: set[str]


def grouped(modules: dict[str, nn.Module], findings: Findings) -> list[Group]:
    """Return the groups in the order in which the model uses them."""
    linked = _joined(g & findings.styles.keys() for g in findings.groups)
    owners: dict[int, set[str]] = {}
    for name in findings.styles:
        for param in modules[name].parameters():
            owners.setdefault(id(param), set()).add(name)
    decisions = _joined([*linked, *owners.values()])
    called = findings.called
    return [
        Group(names, {_around(one, called) for one in linked if one <= names})
        for names in decisions
    ]


def _joined(sets: Iterable[Iterable[str]]) -> list[set[str]]:
    """Join sets that have something in common."""
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
    """Return the smallest module that was called and has all of these in it."""
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
