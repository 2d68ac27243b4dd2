"""PipelineStage: one stage of a model, computed for one microbatch at a time.

A stage is an nn.Module (what splitting.py makes) whose forward takes tensors and returns a tuple of
tensors: for the next stage, or on the last one the model's outputs, which `unflatten` returns in
the user's structure; every stage has it. Tensors of any dtype cross from stage to stage, with and
without gradients.

Each stage has autograd graphs of its own, which begin at its inputs. What a microbatch's backward
needs of its forward is kept here until then.

Backward can run in two halves: first the gradients that the stage before waits for, then those of
the weights. Nodes of the autograd graph that lead to a stage's inputs form the way back to the
stage before. A FORK is such a node from which weights are reached too, by an edge that leaves this
way (a linear layer: one edge to its input, one to its weight). The first half runs only the way
back, and notes which gradients arrive at each fork; the second half runs from each fork to its
weights alone. Each half computes only what it is asked for, so that together they cost one
backward. A weight that is used at several forks is reached from one through another: these are run
together, and each fork is given the gradient that was noted, so that nothing counts twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from paceline.errors import UsageError


@dataclass(frozen=True)
class StageTensor:
    """A tensor that one stage passes to the next."""

    tensor: Tensor  # without a graph
    needs_grad: bool


@dataclass
class _SavedGraph:
    """What the backward of a microbatch needs."""

    inputs: list[Tensor]  # that need a gradient: where the graph begins
    outputs: list[Tensor]  # that have one: where it ends


class _GraphStart(torch.autograd.Function):
    """Begins a graph: the gradient of the data is that of the anchor.

    If the stage's input itself were a leaf, nn.ReLU(inplace=True) could not change it in place.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, data: Tensor) -> Tensor:  # noqa: ARG004
        ctx.mark_dirty(data)
        return data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return grad, None


class PipelineStage:
    """Computes one stage; keeps what backward needs, by microbatch."""

    def __init__(self, module: nn.Module, index: int) -> None:
        self.module, self.index = module, index
        self._kept: dict[int, _SavedGraph] = {}
        self._weights_left: dict[int, Callable[[], None]] = {}

    def clear(self) -> None:
        """Drop the state of all microbatches."""
        self._kept.clear()
        self._weights_left.clear()

    def forward(self, microbatch: int, inputs: Sequence[StageTensor]) -> tuple[Tensor, ...]:
        """Compute the stage's outputs, with their graph if gradients are on."""
        is_training = torch.is_grad_enabled()
        anchors, entered = [], []
        for crossing in inputs:
            tensor = crossing.tensor
            if is_training and crossing.needs_grad:
                anchor = tensor.new_empty(()).expand(tensor.shape).requires_grad_()
                anchors.append(anchor)
                tensor = _GraphStart.apply(anchor, tensor)  # type: ignore[no-untyped-call]
            entered.append(tensor)
        outputs = self.module(*entered)
        if not isinstance(outputs, tuple) or not all(isinstance(o, Tensor) for o in outputs):
            kinds = [type(o).__name__ for o in outputs] if isinstance(outputs, tuple) else outputs
            raise UsageError(f"stage {self.index} returned {kinds}, not a tuple of tensors")
        if is_training:
            self._kept[microbatch] = _SavedGraph(anchors, [o for o in outputs if o.requires_grad])
        return outputs

    def end_in(self, microbatch: int, loss: Tensor) -> None:
        """Let the graph of a microbatch end in its loss instead of the outputs."""
        self._kept[microbatch].outputs = [loss]

    def outputs_of(self, microbatch: int) -> list[Tensor]:
        """Return the outputs of a microbatch that need a gradient."""
        return self._kept[microbatch].outputs

    def backward(self, microbatch: int, grads: Gradients) -> list[Tensor | None]:
        """Accumulate the weights' gradients; return those of the inputs that need one."""
        kept, rooted = self._rooted(microbatch, grads)
        if rooted:
            torch.autograd.backward([o for o, _ in rooted], [g for _, g in rooted])
        return [anchor.grad for anchor in kept.inputs]

    def backward_input(self, microbatch: int, grads: Gradients) -> list[Tensor | None]:
        """Return the gradients of the inputs; backward_weight computes those of the weights."""
        kept, rooted = self._rooted(microbatch, grads)
        outputs, arriving = [o for o, _ in rooted], [g for _, g in rooted]
        if not kept.inputs:  # no stage waits for gradients
            self._weights_left[microbatch] = lambda: (
                torch.autograd.backward(outputs, arriving) if outputs else None
            )
            return []
        found, self._weights_left[microbatch] = backward_inputs(outputs, arriving, kept.inputs)
        return list(found)

    def has_weights_left(self, microbatch: int) -> bool:
        """Return whether backward_input was done, and backward_weight not yet."""
        return microbatch in self._weights_left

    def backward_weight(self, microbatch: int) -> None:
        """Accumulate the weights' gradients that backward_input left."""
        self._weights_left.pop(microbatch)()

    def _rooted(
        self, microbatch: int, grads: Gradients
    ) -> tuple[_SavedGraph, list[tuple[Tensor, Tensor]]]:
        kept = self._kept.pop(microbatch)
        pairs = zip(kept.outputs, grads, strict=True)
        return kept, [(output, grad) for output, grad in pairs if grad is not None]


Gradients = Sequence[Tensor | None]


@dataclass
class _Job:
    """Forks that are run together, the gradients that arrive there, and the weights."""

    forks: list[Node]
    weights: set[Node]
    edges: list[GradientEdge] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)

    def run(self, keeps_graph: bool) -> None:
        if not self.edges:
            return
        hooks = [f.register_prehook(partial(_noted, self, f)) for f in self.forks[1:]]
        if hooks:
            hooks.append(self.forks[0].register_prehook(partial(_noted, self, self.forks[0])))
        try:
            variables = [node.variable for node in self.weights]  # type: ignore[attr-defined]
            torch.autograd.backward(self.edges, self.grads, keeps_graph, inputs=variables)
        finally:
            for hook in hooks:
                hook.remove()


def _noted(job: _Job, fork: Node, arriving: Gradients) -> tuple[Tensor | None, ...]:
    found = {e.output_nr: g for e, g in zip(job.edges, job.grads, strict=True) if e.node is fork}
    return tuple(found.get(number) for number in range(len(arriving)))


def backward_inputs(
    outputs: Sequence[Tensor], grads: Gradients, inputs: Sequence[Tensor]
) -> tuple[Gradients, Callable[[], None]]:
    """Return the gradients of the inputs, and a function that accumulates those of the weights."""
    graph = _Graph([get_gradient_edge(output) for output in outputs], inputs)
    jobs = graph.jobs()
    on_the_way = [i for i, root in enumerate(graph.roots) if graph.leads[root.node]]
    wanted = [GradientEdge(f, n) for job in jobs for f in job.forks for n in sorted(graph.used[f])]
    found: Gradients = [None] * (len(inputs) + len(wanted))
    if on_the_way:
        targets: Any = [*inputs, *wanted]
        found = torch.autograd.grad(
            [outputs[i] for i in on_the_way],
            targets,
            [grads[i] for i in on_the_way],
            retain_graph=True,
            allow_unused=True,
        )
    by_fork = {fork: job for job in jobs for fork in job.forks}
    for edge, grad in zip(wanted, found[len(inputs) :], strict=True):
        if grad is not None:
            by_fork[edge.node].edges.append(edge)
            by_fork[edge.node].grads.append(grad)
    # Outputs that do not depend on the inputs at all.
    aside = [i for i in range(len(outputs)) if i not in on_the_way and grads[i] is not None]
    rest = [outputs[i] for i in aside], [grads[i] for i in aside]

    def backward_weights() -> None:
        # Forks of one job may lie between those of another.
        keeps_graph = any(len(job.forks) > 1 for job in jobs)
        for job in jobs:
            job.run(keeps_graph)
        if rest[0]:
            torch.autograd.backward(rest[0], rest[1])

    return found[: len(inputs)], backward_weights


class _Graph:
    """The graph of some outputs: which nodes lead to the inputs, and which weights lie aside."""

    def __init__(self, roots: list[GradientEdge], inputs: Sequence[Tensor]) -> None:
        self.roots = roots
        self.leads: dict[Node, bool] = {}  # whether a node leads to an input
        self.used: dict[Node, set[int]] = {}  # which of its gradients may arrive
        self._weights: dict[Node, frozenset[Node]] = {}  # of nodes that lead to no input
        self._sources = {get_gradient_edge(input).node for input in inputs}
        for root in roots:
            self.used.setdefault(root.node, set()).add(root.output_nr)
            self._walk(root.node)

    def _walk(self, root: Node) -> None:
        # Each node is pushed twice: to push its successors, and to conclude once they are known.
        stack = [(root, False)]
        while stack:
            node, is_known = stack.pop()
            if node in self.leads:
                continue
            successors = [(n, number) for n, number in node.next_functions if n is not None]
            if is_known:
                self._conclude(node, [n for n, _ in successors])
                continue
            stack.append((node, True))
            for following, number in successors:
                self.used.setdefault(following, set()).add(number)
                if following not in self.leads:
                    stack.append((following, False))

    def _conclude(self, node: Node, successors: list[Node]) -> None:
        self.leads[node] = node in self._sources or any(self.leads[n] for n in successors)
        if not self.leads[node]:
            is_weight = not successors and hasattr(node, "variable")
            own = frozenset([node]) if is_weight else frozenset()
            self._weights[node] = own.union(*(self._weights[n] for n in successors))

    def jobs(self) -> list[_Job]:
        """Return the forks; those that have a weight in common in one job."""
        jobs: list[_Job] = []
        for node, leads in self.leads.items():
            if not leads:
                continue
            aside = [self._weights[n] for n, _ in node.next_functions if n in self._weights]
            weights = set().union(*aside)
            if not weights:
                continue
            joined = _Job([node], weights)
            for job in [job for job in jobs if not job.weights.isdisjoint(weights)]:
                jobs.remove(job)
                joined.forks += job.forks
                joined.weights |= job.weights
            jobs.append(joined)
        return jobs
