"""What the tests of cutting share: chained stages must compute what the whole model computes."""

from __future__ import annotations

import copy
import itertools

import torch
from torch import nn
from torch.utils import _pytree as pytree

from paceline.model_parallel.pipeline.splitting import find_tied, split
from paceline.model_parallel.pipeline.tracing import trace


def chained(stages, inputs):
    """Run the stages one after the other, with copies of what crosses, as between processes."""
    received, sent = [], []
    values = pytree.tree_map_only(torch.Tensor, torch.clone, inputs)
    for stage in stages:
        if sent:
            needs = stage.inputs_need_grad
            values = tuple(
                one.detach().clone(memory_format=torch.contiguous_format).requires_grad_(need)
                for one, need in zip(values, needs, strict=True)
            )
        received.append(values)
        values = stage(*values)
        sent.append(values)
    return received, sent


def apart(stage):
    """Copy a stage with its parameters and buffers, as if it were in a process of its own."""
    return copy.deepcopy(stage, {id(stage._programs): stage._programs})


def backward(received, sent):
    """Backpropagate from the last stage to the first, handing on gradients of what crossed."""
    loss = loss_of(sent[-1])
    loss.backward()
    for index in reversed(range(len(sent) - 1)):
        pairs = [
            (out, into.grad)
            for out, into in zip(sent[index], received[index + 1], strict=True)
            if out.requires_grad and into.grad is not None
        ]
        if pairs:
            torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])
    return loss.detach()


def loss_of(outputs):
    floats = [
        one for one in pytree.tree_leaves(outputs) if torch.is_tensor(one) and one.requires_grad
    ]
    return sum(
        (one * torch.linspace(0.5, 1.5, one.numel()).view(one.shape)).sum() for one in floats
    )


def all_cuts(names, largest=3):
    """All sets of up to `largest` cuts."""
    for count in range(1, largest + 1):
        yield from itertools.combinations(names[1:], count)


def state_of(model):
    return {name: one.detach().clone() for name, one in model.state_dict().items()}


def check_cuts(model: nn.Module, example, cuts=None, largest=2, tolerance=None):
    """Compare outputs, gradients, buffers and names with the whole model's, for all cuts."""
    before = state_of(model)
    seed = torch.get_rng_state()
    graph = trace(model, example)
    assert torch.equal(seed, torch.get_rng_state())
    for name, one in model.state_dict().items():
        assert torch.equal(one, before[name]), f"tracing changed {name}"
    startable = [name for name in graph.layers if name not in graph.repeated]
    if startable and startable[0] != graph.layers[0]:
        startable = [graph.layers[0], *startable]
    for training in (True, False):
        reference = copy.deepcopy(model).train(training)
        torch.manual_seed(7)
        expected = reference(*pytree.tree_map_only(torch.Tensor, torch.clone, example))
        loss_of(expected).backward()
        mine = copy.deepcopy(model).train(training)
        graph = trace(mine, example)
        for starts in cuts or all_cuts(startable, largest):
            mine.load_state_dict(before)
            mine.zero_grad()
            stages = split(graph, list(starts))
            _check_one(mine, stages, reference, expected, example, starts, tolerance)
    return graph


def _check_one(mine, stages, reference, expected, example, starts, tolerance):
    assert len(stages) == len(starts) + 1
    assert all(stage.training == mine.training for stage in stages)
    _check_names(mine, stages)
    stages = [apart(stage) for stage in stages]
    torch.manual_seed(7)
    received, sent = chained(stages, example)
    outputs = stages[-1].unflatten(sent[-1])
    leaves, spec = pytree.tree_flatten(outputs)
    expected_leaves, expected_spec = pytree.tree_flatten(expected)
    assert spec == expected_spec
    for got, one in zip(leaves, expected_leaves, strict=True):
        if torch.is_tensor(one):
            torch.testing.assert_close(got, one, rtol=0, atol=0, msg=f"{starts}")
        else:
            assert got == one
    for index, stage in enumerate(stages[1:]):
        assert stage.input_names == stages[index].output_names
    backward(received, sent)
    close = {} if tolerance is None else {"rtol": tolerance, "atol": tolerance}
    for name, other in reference.named_parameters():
        grads = [dict(stage.named_parameters()).get(name) for stage in stages]
        grads = [one.grad for one in grads if one is not None and one.grad is not None]
        assert bool(grads) == (other.grad is not None), f"{starts} {name}"
        if grads:
            torch.testing.assert_close(sum(grads), other.grad, msg=f"{starts} {name}", **close)
    for name, other in reference.named_buffers():
        # One that is written to is written to in the first stage that has it.
        held = [dict(stage.named_buffers()).get(name) for stage in stages]
        assert torch.equal(next(one for one in held if one is not None), other), f"{starts} {name}"


def _check_names(mine, stages):
    whole, parameters = mine.state_dict(keep_vars=True), dict(mine.named_parameters())
    together = {}
    for stage in stages:
        for name, one in stage.state_dict(keep_vars=True).items():
            assert whole[name] is one, name
            together[name] = one
        for name, one in stage.named_parameters():
            assert parameters[name] is one, name
    assert together.keys() == whole.keys()
    assert {name for stage in stages for name, _ in stage.named_parameters()} == parameters.keys()
    assert {n for s in stages for n, _ in s.named_buffers()} == {n for n, _ in mine.named_buffers()}
    for name, where in find_tied(stages).items():
        assert len(where) > 1 and name in parameters
