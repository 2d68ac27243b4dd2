"""A forward pass as a list of calls, in the order of execution: layers, and the glue between them.

A `Node` is one call: of a layer, or of a function of torch. `Value`s name the tensors that it
takes, all other arguments are constants. A `ForwardPass` is one recorded forward pass; a
`LayerGraph` has one for training and one for evaluation, since glue may read `self.training`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Flag
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from paceline.errors import UsageError


class Value(NamedTuple):
    """A tensor of a pass: the item-th leaf of what a node returns."""

    node: int
    item: int


class Depends(Flag):
    """What a value was computed from; NOTHING: every stage can compute it again."""

    NOTHING = 0
    INPUT = 1
    PARAMETER = 2
    BUFFER = 4
    RANDOM = 8


class Shape(NamedTuple):
    """Size, stride and dtype of a recorded tensor."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class Arguments:
    """The arguments of a call, flattened: tensors are Values, the rest is constant."""

    leaves: list[Any]
    spec: pytree.TreeSpec
    values: list[tuple[int, Value]] = field(init=False)  # positions of the tensors

    def __post_init__(self) -> None:
        self.values = [(i, leaf) for i, leaf in enumerate(self.leaves) if isinstance(leaf, Value)]
        args, kwargs = pytree.tree_unflatten(list(range(len(self.leaves))), self.spec)
        # Mostly nothing is nested; then filling in the arguments is fast.
        self._is_flat = all(isinstance(one, int) for one in [*args, *kwargs.values()])
        self._num_args, self._keys = len(args), list(kwargs)

    def fill(self, env: dict[Value, torch.Tensor]) -> tuple[Sequence[Any], dict[str, Any]]:
        """Return positional and keyword arguments with the tensors filled in."""
        leaves = list(self.leaves)
        for position, value in self.values:
            leaves[position] = env[value]
        if self._is_flat:
            count = self._num_args
            return leaves[:count], dict(zip(self._keys, leaves[count:], strict=True))
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs


@dataclass
class Node:
    """One call, or a value without a call (an input, a parameter, a constant)."""

    kind: Literal["input", "state", "constant", "call", "layer"]
    target: Any  # a function; the name of a layer, parameter or buffer; a tensor
    arguments: Arguments
    depends: Depends
    shapes: dict[int, Shape] = field(default_factory=dict)  # of the tensors that it returns
    memory: dict[int, int] = field(default_factory=dict)  # which memory each of them lies in
    mutates: frozenset[int] = frozenset()  # the memory that it writes to
    grad: bool = True  # whether gradients were enabled
    needs_grad: set[int] = field(default_factory=set)  # which of the tensors have gradients
    autocast: tuple[str, torch.dtype, bool] | None = None  # as set by the forward itself
    is_checkpointed: bool = False  # called through torch.utils.checkpoint

    @property
    def is_run(self) -> bool:
        """Whether it is a call."""
        return self.kind in ("call", "layer")


@dataclass
class ForwardPass:
    """One recorded forward pass."""

    nodes: list[Node] = field(default_factory=list)
    inputs: list[Value] = field(default_factory=list)  # the tensors among the inputs, flattened
    outputs: list[Any] = field(default_factory=list)  # Values and constants, flattened
    output_spec: pytree.TreeSpec | None = None
    reads_sizes: bool = False  # if not, it is valid for inputs of any size
    differentiable: frozenset[int] = (
        frozenset()
    )  # memory that values with gradients were written to

    def shape(self, value: Value) -> Shape:
        """Return the shape of a value."""
        return self.nodes[value.node].shapes[value.item]

    def memory(self, value: Value) -> int:
        """Return which memory a value lies in."""
        return self.nodes[value.node].memory[value.item]

    def needs_grad(self, value: Value) -> bool:
        """Return whether gradients may flow through a value (there may be none after all)."""
        node = self.nodes[value.node]
        if value.item in node.needs_grad:
            return True
        is_number = node.shapes[value.item].dtype.is_floating_point
        return is_number and node.memory[value.item] in self.differentiable

    def layer_calls(self) -> Iterator[tuple[int, str]]:
        """Yield the calls of layers: the node's index and the layer's name."""
        for index, node in enumerate(self.nodes):
            if node.kind == "layer":
                yield index, node.target


@dataclass
class LayerGraph:
    """The forward pass of a model as a graph of layers and glue, for inputs like the example."""

    model: nn.Module
    training: ForwardPass
    evaluation: ForwardPass | UsageError  # an error: why there is none
    example: tuple[list[Any], pytree.TreeSpec]  # leaves: Shape for tensors, else the constant
    closed: dict[str, str]  # modules that cannot be traced and became layers, and why
    retrace: Callable[
        [Sequence[str]], LayerGraph
    ]  # again, with the modules around these names opened

    @property
    def layers(self) -> list[str]:
        """The names of the layers in the order of their first call."""
        return list(dict.fromkeys(name for _, name in self.training.layer_calls()))

    @property
    def repeated(self) -> dict[str, int]:
        """The layers that are called more than once, and how often."""
        names = [name for _, name in self.training.layer_calls()]
        return {name: names.count(name) for name in self.layers if names.count(name) > 1}

    def fits(self, inputs: Sequence[Any]) -> bool:
        """Return whether the graph is valid for these inputs: it has constant sizes."""
        leaves, spec = pytree.tree_flatten(tuple(inputs))
        known, known_spec = self.example
        if spec != known_spec:
            return False
        passes = [one for one in (self.training, self.evaluation) if isinstance(one, ForwardPass)]
        same_size = any(one.reads_sizes for one in passes)
        return all(
            _fits(leaf, one, same_size=same_size) for leaf, one in zip(leaves, known, strict=True)
        )


def _fits(leaf: Any, known: Any, *, same_size: bool) -> bool:
    if not isinstance(known, Shape):
        return not isinstance(leaf, torch.Tensor) and bool(leaf == known)
    if not isinstance(leaf, torch.Tensor) or leaf.dtype != known.dtype:
        return False
    return leaf.shape == known.size if same_size else leaf.dim() == len(known.size)
