"""One stage of a model as a module, with the layers and parameters of the model in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from paceline.errors import UsageError
from paceline.model_parallel.pipeline.graph import Pass, Shape, Value
from paceline.model_parallel.pipeline.program import Program


class StageModule(nn.Module):
    """One stage: takes the values that cross the boundary before it, returns those after it.

    Modules, parameters and buffers are the model's own objects. `train()` and `eval()` choose
    between the two recorded passes; what crosses the boundaries may differ between them.
    """

    def __init__(
        self, index: int, programs: dict[bool, Program | UsageError], example: list[Any]
    ) -> None:
        super().__init__()
        self._example = example  # the model's inputs, for the first stage
        self._index = index
        self._programs = programs
        self._for_other_sizes: list[dict[bool, Program | UsageError]] = []
        self._first_names: dict[str, str] = {}  # of parameters that have several

    @property
    def program(self) -> Program:
        """What is computed in the present mode."""
        found = self._programs[self.training]
        if isinstance(found, UsageError):
            raise found
        return found

    def learn(self, other: StageModule) -> None:
        """Compute inputs of other sizes as another stage does that was cut at the same places."""
        self._for_other_sizes.append(other._programs)

    @property
    def input_names(self) -> list[str]:
        """Names of what the stage takes: of inputs, or of the layers and functions they are from"""
        return [_describe(self.program.recorded, value) for value in self.program.inputs]

    @property
    def output_names(self) -> list[str]:
        """Names of what the stage hands on."""
        return [_describe(self.program.recorded, value) for value in self.program.outputs]

    @property
    def input_shapes(self) -> list[Shape]:
        """Size, stride and dtype of what the stage takes, as they were in the example."""
        return [self.program.recorded.shape(value) for value in self.program.inputs]

    @property
    def output_shapes(self) -> list[Shape]:
        """The same of what it hands on."""
        return [self.program.recorded.shape(value) for value in self.program.outputs]

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
            fitting = [one for one in others if isinstance(one, Program) and _fits(one, given)]
            program = program if _fits(program, given) or not fitting else fitting[0]
        self._check(program, given)
        self._check_constants(leaves)
        outputs = program.run(self, given)
        if program.outputs == _values_of(program.recorded):
            return outputs
        # Pieces that tp has made are not handed on as such: the next stage is given whole tensors.
        return tuple(getattr(one, "whole", lambda one=one: one)() for one in outputs)

    def unflatten(self, outputs: Sequence[torch.Tensor]) -> Any:
        """Put the last stage's outputs into the structure that the model returns."""
        recorded = self.program.recorded
        by_value = dict(zip(_values_of(recorded), outputs, strict=True))
        leaves = [by_value[one] if isinstance(one, Value) else one for one in recorded.outputs]
        assert recorded.output_spec is not None
        return pytree.tree_unflatten(leaves, recorded.output_spec)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As of any module; a parameter with several names has the one of the whole model."""
        dot = f"{prefix}." if prefix else ""
        for name, param in super().named_parameters("", recurse, remove_duplicate):
            yield dot + (self._first_names.get(name, name) if remove_duplicate else name), param

    def _check(self, program: Program, given: list[torch.Tensor]) -> None:
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
                    f"was traced with {expected}, and its forward reads sizes. Trace it again with "
                    "an example of this shape"
                )

    def _check_constants(self, leaves: list[Any]) -> None:
        if len(leaves) != len(self._example):
            return
        for number, (leaf, known) in enumerate(zip(leaves, self._example, strict=True)):
            if not isinstance(known, Shape) and leaf != known:
                raise UsageError(
                    f"stage 0: input {number} is {leaf!r}; the model was traced with {known!r}, "
                    "which is a constant since. Trace it again with an example like this"
                )


def _values_of(recorded: Pass) -> list[Value]:
    """Return what the last stage hands on: the tensors among the model's outputs."""
    return list(dict.fromkeys(one for one in recorded.outputs if isinstance(one, Value)))


def _fits(program: Program, given: Sequence[torch.Tensor]) -> bool:
    expected = [tuple(program.recorded.shape(value).size) for value in program.inputs]
    return [tuple(tensor.shape) for tensor in given] == expected


def _describe(recorded: Pass, value: Value) -> str:
    """Name a value for people: where it is from."""
    node = recorded.nodes[value.node]
    if node.kind == "input":
        return f"input {recorded.inputs.index(value)}"
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "?")
    several = f"[{value.item}]" if len(node.shapes) > 1 else ""
    return f"{name}{several}" if node.kind != "call" else f"{name}{several} (call {value.node})"
