"""Split a traced model into stages, modules of their own, at layers that are given by name.

The names refer to calls in the recorded pass, and the pass is split before these.

Each stage holds the layers, parameters and buffers that it uses. What no stage uses stays with the
layer before it in the model, so that all stages together hold the full model; what several stages
use is in each of them, under one name.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from paceline.errors import UsageError
from paceline.model_parallel.pipeline.graph import ForwardPass, LayerGraph, Shape, Value
from paceline.model_parallel.pipeline.stage_program import StageProgram, make_programs
from paceline.model_parallel.tensor.sharded_tensor import ShardedTensor


def split(graph: LayerGraph, starts: Sequence[str]) -> list[StageModule]:
    """Split the model before the named layers, in order; return one stage more than names.

    A name may also be that of a module inside of a layer (which is then split), or around layers
    (the first of them is meant). The graph itself is not changed.
    """
    graph, names = _resolve(graph, starts)
    return make_stages(graph, [_call_index(graph, name) for name in names])


def make_stages(graph: LayerGraph, calls: Sequence[int]) -> list[StageModule]:
    """Split the model before calls of layers, numbered as in the training pass."""
    training = list(graph.training.layer_calls())
    programs: list[dict[bool, StageProgram | UsageError]] = [
        {True: one} for one in make_programs(graph.training, [training[n][0] for n in calls])
    ]
    if isinstance(graph.evaluation, UsageError):
        for one in programs:
            one[False] = graph.evaluation
    else:
        cuts = _same_splits(graph.evaluation, [name for _, name in training], calls)
        for one, program in zip(programs, make_programs(graph.evaluation, cuts), strict=True):
            one[False] = program
    stages = [
        StageModule(index, one, [] if index else graph.example[0])
        for index, one in enumerate(programs)
    ]
    assign_state(graph.model, stages)
    return stages


def _resolve(graph: LayerGraph, starts: Sequence[str]) -> tuple[LayerGraph, list[str]]:
    """Return the layers that the names refer to; open the modules around them if necessary."""
    modules = {name: module for name, module in graph.model.named_modules() if name}
    for name in starts:
        if name not in modules:
            raise UsageError(_no_such_module(name, graph.layers, modules))
    covered = [name for name in starts if not _layers_in(graph, name)]
    if covered:
        graph = graph.retrace(covered)
    names = []
    for name in starts:
        layers = _layers_in(graph, name)
        if not layers:
            raise UsageError(_not_a_layer(graph, name))
        names.append(layers[0])
    _check_order(graph, names)
    return graph, names


def _layers_in(graph: LayerGraph, name: str) -> list[str]:
    return [one for one in graph.layers if one == name or one.startswith(f"{name}.")]


def _check_order(graph: LayerGraph, names: list[str]) -> None:
    order = {name: position for position, name in enumerate(graph.layers)}
    for name in names:
        if name in graph.repeated:
            raise UsageError(
                f"no stage can start at {name!r}: it is called {graph.repeated[name]} times in one "
                "forward pass; start it at a layer that is called once"
            )
        if names.count(name) > 1:
            raise UsageError(f"two stages start at {name}; every stage needs a layer of its own")
    if names and order[names[0]] == 0:
        raise UsageError(
            f"stage 1 starts at {names[0]}, the model's first layer: nothing is left for stage 0; "
            "name the layers at which stages 1, 2, ... start"
        )
    for before, after in zip(names, names[1:], strict=False):
        if order[before] > order[after]:
            ordered = sorted(names, key=lambda name: order[name])
            raise UsageError(
                f"{after} runs before {before}, so its stage cannot be a later one; "
                f"in the order of execution: {', '.join(ordered)}"
            )


def _no_such_module(name: str, layers: list[str], modules: dict[str, nn.Module]) -> str:
    close = difflib.get_close_matches(name, modules, n=3)
    some = ", ".join(layers[:8]) + (", ..." if len(layers) > 8 else "")
    meant = f" Did you mean {' or '.join(close)}?" if close else ""
    return (
        f"no stage can start at {name!r}: the model has no such module.{meant} Layers are: {some}"
    )


def _not_a_layer(graph: LayerGraph, name: str) -> str:
    for closed, why in graph.closed.items():
        if name.startswith(f"{closed}."):
            return f"no stage can start at {name!r}: {closed} cannot be split, because {why}"
    for layer in graph.layers:
        if name.startswith(f"{layer}."):
            return f"no stage can start at {name!r}: it is inside of {layer}, which stays one layer"
    return f"no stage can start at {name!r}: the forward pass does not call it"


def _call_index(graph: LayerGraph, name: str) -> int:
    return [one for _, one in graph.training.layer_calls()].index(name)


def _same_splits(recorded: ForwardPass, training: list[str], calls: Sequence[int]) -> list[int]:
    """Return where to split another pass at the same layers; it may lack some, or call others."""
    cuts: list[int] = []
    for call in calls:
        before = training[:call]
        cut = len(recorded.nodes)
        for index, name in recorded.layer_calls():
            if name in before:
                before.remove(name)
            elif name in training:
                cut = index
                break
        cuts.append(max([cut, *cuts]))
    return cuts


def assign_state(model: nn.Module, stages: Sequence[StageModule]) -> None:
    """Assign layers, parameters and buffers to the stages that use them; unused ones to one."""
    layers, tensors = [], []
    for stage in stages:
        programs = [one for one in stage._programs.values() if isinstance(one, StageProgram)]
        layers.append(set[str]().union(*(one.layers for one in programs)))
        tensors.append(set[str]().union(*(one.state for one in programs)))
    holder: dict[int, int] = {}  # tensors by id
    unused: list[tuple[str, torch.Tensor, int]] = []
    last = 0
    for name, tensor in _all_tensors(model):
        parents = {name[:at] for at, letter in enumerate(name) if letter == "."}
        where = [n for n in range(len(stages)) if name in tensors[n] or parents & layers[n]]
        if where:
            last = where[0]
            holder.setdefault(id(tensor), last)
        else:
            unused.append((name, tensor, last))
    for name, tensor, default in unused:
        tensors[holder.get(id(tensor), default)].add(name)
    first_names = {id(param): name for name, param in model.named_parameters()}
    for stage, own_layers, own_tensors in zip(stages, layers, tensors, strict=True):
        _copy_tree(stage, model, "", own_layers, own_tensors)
        stage.training = model.training
        for name, param in stage.named_parameters(remove_duplicate=False):
            if first_names[id(param)] != name:
                stage._first_names[name] = first_names[id(param)]


def _all_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and buffers with all of their names, module by module."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                yield f"{prefix}.{key}" if prefix else key, tensor


def _copy_tree(
    into: nn.Module, module: nn.Module, prefix: str, layers: set[str], tensors: set[str]
) -> None:
    """Copy the part of the module's tree that leads to the layers and tensors, in its order."""
    for key, param in module._parameters.items():
        if prefix + key in tensors:
            into._parameters[key] = param
    for key, buffer in module._buffers.items():
        if prefix + key in tensors:
            into._buffers[key] = buffer
            if key in module._non_persistent_buffers_set:
                into._non_persistent_buffers_set.add(key)
    for key, child in _children(module):
        name = prefix + key
        if name in layers:
            into._modules[key] = child
            continue
        inside = nn.Module()
        _copy_tree(inside, child, f"{name}.", layers, tensors)
        if inside._parameters or inside._buffers or inside._modules:
            into._modules[key] = inside


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the children with all of their names."""
    for key, child in module._modules.items():
        if child is not None:
            yield key, child


def find_tied(stages: Sequence[StageModule]) -> dict[str, list[int]]:
    """Return the parameters that are in several stages, with the stages' indices."""
    holders: dict[str, list[int]] = {}
    for index, stage in enumerate(stages):
        for name, _ in stage.named_parameters():
            holders.setdefault(name, []).append(index)
    return {name: where for name, where in holders.items() if len(where) > 1}


def release_other_stages(model: nn.Module, stages: Sequence[StageModule]) -> None:
    """Free all parameters and buffers of the model that are not in these stages.

    They are on the meta device then, so the model can still be traced, and split, for other shapes.
    """
    own = {id(one) for stage in stages for one in [*stage.parameters(), *stage.buffers()]}
    empty: dict[int, torch.Tensor] = {}  # so that tied ones stay tied
    for module in model.modules():
        holders: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for tensors_of in holders:
            for key, one in tensors_of.items():
                if one is None or id(one) in own:
                    continue
                if id(one) not in empty:
                    like = torch.empty_like(one, device="meta")
                    is_parameter = isinstance(one, nn.Parameter)
                    empty[id(one)] = nn.Parameter(like, one.requires_grad) if is_parameter else like
                tensors_of[key] = empty[id(one)]


class StageModule(nn.Module):
    """One stage: takes the values that cross the boundary before it, returns those after it.

    Modules, parameters and buffers are the model's own objects. `train()` and `eval()` choose
    between the two recorded passes; the values that cross the boundaries may differ between them.
    """

    def __init__(
        self, index: int, programs: dict[bool, StageProgram | UsageError], example: list[Any]
    ) -> None:
        super().__init__()
        self._example = example  # the model's inputs, for the first stage
        self._index = index
        self._programs = programs
        self._for_other_sizes: list[dict[bool, StageProgram | UsageError]] = []
        self._first_names: dict[str, str] = {}  # of parameters that have several

    @property
    def program(self) -> StageProgram:
        """What is computed in the current mode."""
        found = self._programs[self.training]
        if isinstance(found, UsageError):
            raise found
        return found

    def add_program_of(self, other: StageModule) -> None:
        """Use the program of another stage, split at the same layers, for inputs of its sizes."""
        self._for_other_sizes.append(other._programs)

    @property
    def input_names(self) -> list[str]:
        """Names of the stage's inputs: of model inputs, or of the layers that computed them."""
        return [_describe(self.program.recorded, value) for value in self.program.inputs]

    @property
    def output_names(self) -> list[str]:
        """Names of the stage's outputs."""
        return [_describe(self.program.recorded, value) for value in self.program.outputs]

    @property
    def inputs_need_grad(self) -> list[bool]:
        """For every input, whether gradients may come back through it."""
        return [self.program.recorded.needs_grad(value) for value in self.program.inputs]

    @property
    def outputs_need_grad(self) -> list[bool]:
        """For every output, whether gradients may come back for it."""
        return [self.program.recorded.needs_grad(value) for value in self.program.outputs]

    def forward(self, *inputs: Any) -> tuple[torch.Tensor, ...]:
        """Compute the stage; the first one takes the model's positional inputs."""
        program = self.program
        leaves = pytree.tree_leaves(inputs)
        given = [one for one in leaves if isinstance(one, torch.Tensor)]
        if program.recorded.reads_sizes and self._for_other_sizes:
            others = [programs[self.training] for programs in self._for_other_sizes]
            fitting = [one for one in others if isinstance(one, StageProgram) and _fits(one, given)]
            program = program if _fits(program, given) or not fitting else fitting[0]
        self._check(program, given)
        self._check_constants(leaves)
        outputs = program.run(self, given)
        if program.outputs == _values_of(program.recorded):
            return outputs
        # Sharded tensors of tp are not sent: the next stage takes full tensors.
        return tuple(o.full_tensor() if isinstance(o, ShardedTensor) else o for o in outputs)

    def unflatten(self, outputs: Sequence[torch.Tensor]) -> Any:
        """Return the last stage's outputs in the structure that the model returns."""
        recorded = self.program.recorded
        by_value = dict(zip(_values_of(recorded), outputs, strict=True))
        leaves = [by_value[one] if isinstance(one, Value) else one for one in recorded.outputs]
        assert recorded.output_spec is not None
        return pytree.tree_unflatten(leaves, recorded.output_spec)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As of any module; a parameter with several names has the full model's first."""
        dot = f"{prefix}." if prefix else ""
        for name, param in super().named_parameters("", recurse, remove_duplicate):
            yield dot + (self._first_names.get(name, name) if remove_duplicate else name), param

    def _check(self, program: StageProgram, given: list[torch.Tensor]) -> None:
        if len(given) != len(program.inputs):
            raise UsageError(
                f"stage {self._index} takes {len(program.inputs)} tensors "
                f"({', '.join(self.input_names)}), not {len(given)}"
            )
        if not program.recorded.reads_sizes:
            return
        for name, value, tensor in zip(self.input_names, program.inputs, given, strict=True):
            expected = program.recorded.shape(value).size
            if tensor.shape != expected:
                raise UsageError(
                    f"stage {self._index}: {name} has the shape {tuple(tensor.shape)}; the model "
                    f"was traced with {expected}, and its forward reads sizes; trace it again with "
                    "an example of this shape"
                )

    def _check_constants(self, leaves: list[Any]) -> None:
        if len(leaves) != len(self._example):
            return
        for number, (leaf, known) in enumerate(zip(leaves, self._example, strict=True)):
            if not isinstance(known, Shape) and leaf != known:
                raise UsageError(
                    f"stage 0: input {number} is {leaf!r}; the model was traced with {known!r}, "
                    "which is a constant since; trace it again with an example like this"
                )


def _values_of(recorded: ForwardPass) -> list[Value]:
    """Return the last stage's outputs: the tensors among the model's outputs."""
    return list(dict.fromkeys(one for one in recorded.outputs if isinstance(one, Value)))


def _fits(program: StageProgram, given: Sequence[torch.Tensor]) -> bool:
    expected = [tuple(program.recorded.shape(value).size) for value in program.inputs]
    return [tuple(tensor.shape) for tensor in given] == expected


def _describe(recorded: ForwardPass, value: Value) -> str:
    """Return a readable name of a value: where it was computed."""
    node = recorded.nodes[value.node]
    if node.kind == "input":
        return f"input {recorded.inputs.index(value)}"
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "?")
    several = f"[{value.item}]" if len(node.shapes) > 1 else ""
    return f"{name}{several}" if node.kind != "call" else f"{name}{several} (call {value.node})"
