"""StageProgram: what one stage computes of a recorded pass, with its inputs and outputs.

Positions split a pass into sections; every call belongs to one section. A value that a later
section needs is sent from stage to stage, except

- what was computed from nothing or from buffers only (positions, masks): it is computed again,
- views of parameters: the parameter itself is then in both stages,
- views of memory that is written to somewhere: the memory is sent, and the view is created again,
  so that all views of the memory see a write.

A stage that writes to its input works on a copy: the tensor belongs to the sender.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from paceline.errors import UsageError
from paceline.model_parallel.pipeline.graph import Depends, ForwardPass, Node, Shape, Value


class CannotSplit(UsageError):
    """The model cannot be split before this layer."""

    def __init__(self, message: str, layer: str) -> None:
        super().__init__(message)
        self.layer = layer


@dataclass
class StageProgram:
    """One stage's section of a pass."""

    recorded: ForwardPass
    inputs: list[Value]
    outputs: list[Value]
    steps: list[int] = field(default_factory=list)  # nodes, in order
    copied: set[Value] = field(default_factory=set)  # inputs that are written to

    def __post_init__(self) -> None:
        last_use = {value: -1 for value in self.inputs}
        for position, index in enumerate(self.steps):
            for _, value in self.recorded.nodes[index].arguments.values:
                last_use[value] = position
        kept = set(self.outputs)
        self._free: list[list[Value]] = [[] for _ in self.steps]
        for value, position in last_use.items():
            if position >= 0 and value not in kept:
                self._free[position].append(value)

    @property
    def state(self) -> set[str]:
        """The names of the parameters and buffers that glue uses."""
        nodes = self.recorded.nodes
        values = [v for i in self.steps for _, v in nodes[i].arguments.values] + self.outputs
        return {nodes[v.node].target for v in values if nodes[v.node].kind == "state"}

    @property
    def layers(self) -> set[str]:
        """The names of the layers that are called."""
        nodes = self.recorded.nodes
        return {nodes[index].target for index in self.steps if nodes[index].kind == "layer"}

    def run(self, stage: nn.Module, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Compute the stage's outputs; layers and parameters are looked up in the stage."""
        env: dict[Value, torch.Tensor] = {}
        for value, tensor in zip(self.inputs, inputs, strict=True):
            tensor = _with_layout(tensor, self.recorded.shape(value))
            env[value] = tensor.clone() if value in self.copied else tensor
        for position, index in enumerate(self.steps):
            self._step(stage, env, index)
            for value in self._free[position]:
                env.pop(value, None)
        for value in self.outputs:
            self._provide(stage, env, value)
        return tuple(env[value] for value in self.outputs)

    def _step(self, stage: nn.Module, env: dict[Value, torch.Tensor], index: int) -> None:
        node = self.recorded.nodes[index]
        for _, value in node.arguments.values:
            self._provide(stage, env, value)
        args, kwargs = node.arguments.fill(env)
        run = stage.get_submodule(node.target) if node.kind == "layer" else node.target
        if node.grad and node.autocast is None and not node.is_checkpointed:
            result = run(*args, **kwargs)
        else:
            result = _run_within(node, run, args, kwargs)
        if isinstance(result, torch.Tensor):
            env[Value(index, 0)] = result
            return
        leaves = pytree.tree_leaves(result)
        for item in node.shapes:
            env[Value(index, item)] = leaves[item]

    def _provide(self, stage: nn.Module, env: dict[Value, torch.Tensor], value: Value) -> None:
        if value in env:
            return
        node = self.recorded.nodes[value.node]
        if node.kind == "constant":
            env[value] = node.target
        else:
            path, _, key = node.target.rpartition(".")
            env[value] = getattr(stage.get_submodule(path), key)


def make_programs(recorded: ForwardPass, cuts: list[int]) -> list[StageProgram]:
    """Split a pass before the nodes at these positions (ascending)."""
    bounds = [0, *cuts, len(recorded.nodes)]
    written = frozenset[int]().union(*(node.mutates for node in recorded.nodes))
    outputs = list(dict.fromkeys(one for one in recorded.outputs if isinstance(one, Value)))
    programs: list[StageProgram] = []
    for stage in reversed(range(len(cuts) + 1)):
        builder = _StageProgramBuilder(recorded, bounds[stage], bounds[stage + 1], written)
        program = builder.make(outputs, is_first=stage == 0)
        programs.append(program)
        outputs = program.inputs
    return programs[::-1]


class _StageProgramBuilder:
    """Finds out what a stage needs, backwards from its outputs."""

    def __init__(
        self, recorded: ForwardPass, begin: int, end: int, written: frozenset[int]
    ) -> None:
        self._recorded = recorded
        self._begin, self._end = begin, end
        self._written = written
        self._recomputed: set[int] = set()  # earlier nodes that are computed again here
        self._inputs: dict[Value, None] = {}

    def make(self, outputs: list[Value], *, is_first: bool) -> StageProgram:
        nodes = self._recorded.nodes
        own: list[int] = []
        wanted = set(outputs)
        for index in reversed(range(self._begin, self._end)):
            node = nodes[index]
            if not node.is_run:
                continue
            if self._is_recomputed(index) and not any(v.node == index for v in wanted):
                continue  # a later stage that needs it computes it
            own.append(index)
            wanted.update(value for _, value in node.arguments.values)
        for value in sorted(wanted):
            self._find(value)
        inputs = self._recorded.inputs if is_first else sorted(self._inputs)
        steps = [*sorted(self._recomputed), *reversed(own)]
        written = frozenset[int]().union(*(nodes[index].mutates for index in steps))
        copied = {value for value in inputs if self._recorded.memory(value) in written}
        self._check(copied)
        return StageProgram(self._recorded, list(inputs), outputs, steps, copied)

    def _find(self, value: Value) -> None:
        """Decide where a value of an earlier section comes from."""
        node = self._recorded.nodes[value.node]
        if node.is_run and value.node >= self._begin:
            return
        # Parameters, buffers and constants are in every stage that uses them, unless the pass
        # writes to them: then they are in the first of these stages, which sends them.
        if node.kind in ("state", "constant") and (
            not self._is_written(node) or self._is_first_user(value.node)
        ):
            return
        if not self._is_recomputed(value.node):
            self._inputs[value] = None
            return
        self._recomputed.add(value.node)
        for _, argument in node.arguments.values:
            self._find(argument)

    def _is_recomputed(self, index: int) -> bool:
        node = self._recorded.nodes[index]
        if node.kind != "call" or node.mutates:
            return False
        if self._is_written(node) or any(
            self._recorded.nodes[value.node].kind == "state"
            and self._recorded.nodes[value.node].depends is Depends.PARAMETER
            for _, value in node.arguments.values
        ):
            return self._is_view(node)
        if node.depends & ~Depends.BUFFER:
            return False
        return all(
            not self._recorded.nodes[value.node].is_run or self._is_recomputed(value.node)
            for _, value in node.arguments.values
        )

    def _is_written(self, node: Node) -> bool:
        return not self._written.isdisjoint(node.memory.values())

    def _is_view(self, node: Node) -> bool:
        sources = {self._recorded.memory(value) for _, value in node.arguments.values}
        return bool(node.memory) and sources.issuperset(node.memory.values())

    def _is_first_user(self, index: int) -> bool:
        """Return whether a buffer that the pass writes to is first used in this section."""
        users = (
            number
            for number, node in enumerate(self._recorded.nodes)
            if any(value.node == index for _, value in node.arguments.values)
        )
        return self._begin <= next(users, self._begin) < self._end

    def _check(self, copied: set[Value]) -> None:
        memories = [self._recorded.memory(value) for value in copied]
        kinds = {self._recorded.nodes[value.node].kind for value in copied}
        if len(set(memories)) == len(memories) and kinds.isdisjoint(("state", "constant")):
            return
        layer = str(self._recorded.nodes[self._begin].target)
        raise CannotSplit(
            f"no stage can start at {layer}: memory that is used before it is written to in place "
            "after it, in a way that the other stage would not see; start it elsewhere, or write "
            "the operation without the underscore",
            layer,
        )


def _run_within(node: Node, run: Any, args: Any, kwargs: Any) -> Any:
    """Run a call in the contexts in which the forward called it."""
    with ExitStack() as contexts:
        if not node.grad:
            contexts.enter_context(torch.no_grad())
        if node.autocast is not None:
            device, dtype, enabled = node.autocast
            contexts.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
        if node.is_checkpointed:
            return checkpoint(run, *args, use_reentrant=False, **kwargs)
        return run(*args, **kwargs)


def _with_layout(tensor: torch.Tensor, like: Shape) -> torch.Tensor:
    """Return a received tensor in the sender's memory layout: views may depend on it."""
    if tensor.stride() == like.stride or tensor.shape != like.size or 0 in like.size:
        return tensor
    order = sorted(range(tensor.dim()), key=lambda dim: -like.stride[dim])
    permuted = tensor.permute(order)
    dense = [like.stride[dim] for dim in order]
    expected, width = [], 1
    for dim in reversed(order):
        expected.append(width)
        width *= like.size[dim]
    if dense != expected[::-1]:
        return tensor  # overlapping or with gaps: no view can depend on it
    back = sorted(range(len(order)), key=lambda place: order[place])
    return permuted.contiguous().permute(back)
