"""Backward in two halves: first the gradients that the stage before waits for, then the weights'.

Nodes of the autograd graph that lead to a stage's inputs form the way back to the stage before. A
FORK is such a node from which also weights are reached by an edge that leaves this way (a linear
layer: one edge to its input, one to its weight). The first half runs only the way back, and notes
which gradients arrive at each fork; the second half runs from each fork to its weights alone.
Each half computes only what it is asked for, so that together they cost one backward.

A weight that is used at several forks is reached from one through another. These are run together,
and each fork is given the gradient that was noted, so that nothing counts twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Gradients = Sequence[Tensor | None]


@dataclass
class _Job:
    """Forks that are run together, what arrives there, and the weights."""

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
    """Return the gradients of the inputs, and a function that adds up those of the weights."""
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
        # Between the forks of one job may be those of another.
        keeps_graph = any(len(job.forks) > 1 for job in jobs)
        for job in jobs:
            job.run(keeps_graph)
        if rest[0]:
            torch.autograd.backward(rest[0], rest[1])

    return found[: len(inputs)], backward_weights


class _Graph:
    """What hangs on some outputs: which nodes lead to the inputs, and which weights lie aside."""

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
        # Twice on the stack: to put what comes behind it there, and when all that is known.
        stack = [(root, False)]
        while stack:
            node, is_known = stack.pop()
            if node in self.leads:
                continue
            behind = [(n, number) for n, number in node.next_functions if n is not None]
            if is_known:
                self._conclude(node, [n for n, _ in behind])
                continue
            stack.append((node, True))
            for following, number in behind:
                self.used.setdefault(following, set()).add(number)
                if following not in self.leads:
                    stack.append((following, False))

    def _conclude(self, node: Node, behind: list[Node]) -> None:
        self.leads[node] = node in self._sources or any(self.leads[n] for n in behind)
        if not self.leads[node]:
            own = frozenset() if behind or not hasattr(node, "variable") else frozenset([node])
            self._weights[node] = own.union(*(self._weights[n] for n in behind))

    def jobs(self) -> list[_Job]:
        """Return the forks, together if they have a weight in common."""
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
