"""What tracing accepts and refuses: values, modes, the meta device, shapes, names."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import paceline as pl
from paceline.errors import UsageError
from paceline.model_parallel.pipeline.partitioning import choose_split_points
from paceline.model_parallel.pipeline.splitting import find_tied, release_other_stages, split
from paceline.model_parallel.pipeline.tracing import trace
from support.stage_checks import chained, check_cuts
from support.stage_models import WIDTH, Block, RopeModel, Shared, Statistics, TiedGPT, UNet


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


class Deciding(nn.Module):
    """Decides by values; as a part of a model it is a layer, whatever is inside."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            if x.sum() > 0:
                x = block(x)
        return x


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.deciding = Deciding()
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.last(self.deciding(self.first(x)))


def test_a_decision_by_values_is_refused_with_its_line():
    with pytest.raises(UsageError) as caught:
        trace(Deciding(), (torch.randn(2, WIDTH),))
    text = str(caught.value)
    assert "Deciding cannot be split into stages" in text and "__bool__" in text
    assert "test_tracing.py" in text and "if x.sum() > 0:" in text
    assert "submodule" in text


def test_a_module_that_decides_by_values_becomes_a_layer():
    graph = check_cuts(Around(), (torch.randn(2, WIDTH),))
    assert graph.layers == ["first", "deciding", "last"]
    assert list(graph.closed) == ["deciding"]
    with pytest.raises(UsageError, match=r"start at 'deciding.blocks.1': deciding cannot be split"):
        split(graph, ["deciding.blocks.1"])


class Reading(nn.Module):
    def __init__(self, read) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.read = read
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x):
        x = self.layers[0](x)
        return self.layers[1](self.read(self, x))


@pytest.mark.parametrize(
    "read",
    [
        lambda m, x: x * x.sum().item(),
        lambda m, x: x * float(x.max()),
        lambda m, x: x * m.scale.item(),
        lambda m, x: x + x[x > 0].sum(),
        lambda m, x: x + x.nonzero().sum(),
        lambda m, x: x if torch.rand(()) > 0.5 else -x,
        lambda m, x: x[: int((x[0] > 0).sum() * 0 + 2)],
        lambda m, x: torch.vmap(torch.sin)(x),
        lambda m, x: x if random.random() > 0.5 else -x,
        lambda m, x: x * np.random.rand(),
        lambda m, x: x + torch.from_numpy(x.detach().numpy()),
        lambda m, x: x + torch.from_numpy(np.ones(4, np.float32)),
    ],
)
def test_values_between_layers_are_refused(read):
    with pytest.raises(UsageError, match="Reading cannot be split"):
        trace(Reading(read), (torch.randn(2, 4),))


@pytest.mark.parametrize(
    "read",
    [
        lambda m, x: x * torch.linspace(0, 1, 3)[1].item(),
        lambda m, x: x * sum(torch.arange(3).tolist()),
        lambda m, x: sum(row for row in x) + x,
        lambda m, x: x + torch.ones(len(x), 1) if x.dtype == torch.float32 else x,
        lambda m, x: x.masked_fill(x > 0, 0.0) * m.scale,
        lambda m, x: torch.where(x > 0, x, 0.0) + F.pad(x, (0, 1))[..., : x.shape[-1]],
        lambda m, x: F.dropout(x.float().contiguous(), 0.5, m.training) + torch.randn(4),
        lambda m, x: torch.stack(list(x.unbind(0))) * x.new_ones(4),
    ],
)
def test_what_can_be_written_down(read):
    check_cuts(Reading(read), (torch.randn(2, 4),))


def test_modes_follow_train_and_eval():
    model = TiedGPT()
    stages = split(trace(model.eval(), (torch.randint(10, (2, 5)),)), ["blocks.1"])
    example = torch.randint(10, (2, 5))
    for training in (False, True, False):
        model.train(training)
        for stage in stages:
            stage.train(training)
        torch.manual_seed(3)
        expected = model(example)
        torch.manual_seed(3)
        assert torch.equal(chained(stages, (example,))[1][-1][0], expected)


class Detour(nn.Module):
    """Has a head that only training uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.helper = nn.Linear(WIDTH, 2)

    def forward(self, x):
        x = self.layers[0](x)
        helped = self.helper(x) if self.training else None
        for layer in self.layers[1:]:
            x = layer(x)
        return (x, helped) if self.training else x


def test_what_only_one_mode_runs():
    check_cuts(Detour(), (torch.randn(2, WIDTH),), largest=3)


@pytest.mark.parametrize(
    ("kind", "example"),
    [
        (TiedGPT, lambda: torch.randint(10, (2, 5))),
        (RopeModel, lambda: torch.randint(10, (2, 5))),
        (UNet, lambda: torch.randn(2, 1, 8, 8)),
        (lambda: nn.Sequential(nn.LSTM(4, 4), nn.Identity()), lambda: torch.randn(2, 3, 4)),
    ],
)
@pytest.mark.parametrize("example_device", ["cpu", "meta"])
def test_a_model_without_data_is_traced(kind, example, example_device):
    inputs = example()
    real = kind()
    with torch.device("meta"):
        empty = kind()
    graph, expected = trace(empty, (inputs.to(example_device),)), trace(real, (inputs,))
    assert graph.layers == expected.layers and graph.fits((inputs,))
    assert all(param.device.type == "meta" for param in empty.parameters())
    start = [name for name in graph.layers if name not in graph.repeated][-1]
    stages, others = split(graph, [start]), split(expected, [start])
    assert [one.output_names for one in stages] == [one.output_names for one in others]
    for stage, other in zip(stages, others, strict=True):
        assert [n for n, _ in stage.named_parameters()] == [n for n, _ in other.named_parameters()]
    # Filled with data, the stages compute what the model does.
    empty.to_empty(device="cpu")
    empty.load_state_dict(real.state_dict())
    if isinstance(empty, RopeModel):
        return  # it has a buffer that is not in the state
    stages = split(graph, [start])
    real.eval()
    for stage in stages:
        stage.eval()
    got = stages[-1].unflatten(chained(stages, (inputs,))[1][-1])
    torch.testing.assert_close(got, real(inputs))


def test_what_needs_values_is_refused_without_them():
    with torch.device("meta"):
        model, other = Around(), Shared()
    with pytest.raises(UsageError, match=r"layer deciding \(Deciding\) needs the values"):
        trace(model, (torch.randn(2, WIDTH),))
    with pytest.raises(UsageError, match=r"shape \(8,\) on the meta device.*register_buffer"):
        trace(other, (torch.randn(2, 3, WIDTH),))


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.use_reentrant = use_reentrant

    def forward(self, x):
        x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = checkpoint(layer, x, None, use_reentrant=self.use_reentrant)
        return x


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_layers_stay_checkpointed(use_reentrant):
    model = Checkpointed(use_reentrant)
    graph = check_cuts(model, (torch.randn(2, WIDTH),))
    nodes = [one for one in graph.training.nodes if one.kind == "layer"]
    assert [one.is_checkpointed for one in nodes] == [False, True, True]
    stages = split(trace(model, (torch.randn(2, WIDTH),)), ["layers.1"])
    calls = []
    model.layers[2].register_forward_pre_hook(lambda *_: calls.append(1))
    chained(stages, (torch.randn(2, WIDTH),))[1][-1][0].sum().backward()
    assert len(calls) == 2  # forward, and again for backward


class Mixed(nn.Module):
    """Another precision for some of the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        x = self.layers[0](x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.layers[1](x) @ self.layers[1].weight
        return self.layers[2](x.float())


def test_autocast_between_layers():
    # The weight is rounded once for both of its uses in the whole model, and in stages twice.
    check_cuts(Mixed(), (torch.randn(2, 4),), tolerance=2e-2)


def test_which_values_have_gradients():
    stages = split(trace(RopeModel(), (torch.randint(10, (2, 5)),)), ["model.layers.1"])
    needs = dict(zip(stages[1].input_names, stages[1].inputs_need_grad, strict=True))
    # A layer that was given something with gradients is taken to return such (cos and sin).
    assert [name.split()[0] for name, need in needs.items() if not need] == ["full"]
    assert stages[0].outputs_need_grad == stages[1].inputs_need_grad
    assert stages[0].inputs_need_grad == [False] and stages[1].outputs_need_grad == [True]
    model = UNet()
    for param in model.down[0].parameters():
        param.requires_grad_(False)
    stages = split(trace(model, (torch.randn(2, 1, 8, 8),)), ["down.1", "down.2"])
    assert [one.inputs_need_grad for one in stages] == [
        [False],
        [False, False],
        [False, True, True],
    ]


def test_shapes_are_checked_only_where_the_forward_reads_them():
    stages = split(trace(TiedGPT(), (torch.randint(10, (2, 5)),)), ["blocks.1"])
    with pytest.raises(UsageError, match=r"stage 0: input 0 has the shape \(2, 4\).*\(2, 5\)"):
        stages[0](torch.randint(10, (2, 4)))
    with pytest.raises(UsageError, match="stage 0 takes 1 tensors"):
        stages[0](torch.randint(10, (2, 4)), torch.zeros(1))
    free = split(trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), (torch.zeros(1, 2),)), ["1"])
    assert free[0](torch.zeros(7, 2))[0].shape == (7, 2)


def test_parameters_in_several_stages():
    stages = split(trace(TiedGPT(), (torch.randint(10, (2, 5)),)), ["blocks.1", "blocks.2"])
    assert find_tied(stages) == {"embed.weight": [0, 2]}
    stages = split(trace(RopeModel(), (torch.randint(10, (2, 5)),)), ["model.layers.1", "lm_head"])
    assert find_tied(stages) == {"model.embed_tokens.weight": [0, 2]}
    assert list(stages[2].state_dict()) == ["lm_head.weight"]


def test_what_crosses_the_boundaries():
    stages = split(trace(RopeModel(), (torch.randint(10, (2, 5)),)), ["model.layers.1"])
    # The hidden states, cos and sin; the mask was written in place, so it is sent as well.
    assert stages[1].input_names[:2] == ["model.rotary_emb[0]", "model.rotary_emb[1]"]
    assert len(stages[1].input_names) == 4
    stages = split(trace(TiedGPT(), (torch.randint(10, (2, 5)),)), ["blocks.1"])
    assert len(stages[1].input_names) == 1  # masks and numbers are made again
    stages = split(trace(UNet(), (torch.randn(2, 1, 8, 8),)), ["down.2", "up.0"])
    assert [len(one.input_names) for one in stages] == [1, 3, 2]


def names_error(graph, starts):
    with pytest.raises(UsageError) as caught:
        split(graph, starts)
    return str(caught.value)


def test_bad_split_points():
    graph = trace(TiedGPT(), (torch.randint(10, (2, 5)),))
    text = names_error(graph, ["block.1"])
    assert "no such module" in text and "blocks.1" in text and "Layers are: embed, blocks.0" in text
    assert "blocks.1 runs before blocks.2" in names_error(graph, ["blocks.2", "blocks.1"])
    assert "two stages start at blocks.1" in names_error(graph, ["blocks.1", "blocks.1"])
    assert "the model's first layer" in names_error(graph, ["embed"])
    assert "does not call it" in names_error(graph, ["unused"])
    shared_graph = trace(Shared(), (torch.randn(2, 3, WIDTH),))
    assert "called 3 times" in names_error(shared_graph, ["same"])
    assert "called 3 times" in names_error(shared_graph, ["same.inner"])


def test_a_boundary_keeps_the_memory_layout():
    """Received tensors are contiguous; code after the cut may view them as the sender's were."""
    model = Shared()
    example = torch.randn(2, 3, WIDTH)
    stages = split(trace(model, (example,)), ["last"])
    sent = [one.detach().contiguous() for one in stages[0](example)]
    torch.testing.assert_close(stages[1](*sent)[0], model(example), rtol=0, atol=0)


def test_writes_that_another_stage_would_not_see():
    example = (torch.randn(3, WIDTH),)
    graph = trace(Statistics(again=True), example)
    assert "written to in place" in names_error(graph, ["layers.2"])
    split(graph, ["layers.3"])
    free = [one for one in graph.layers if one not in ("layers.1", "layers.2")]
    assert (
        choose_split_points(graph, pl.measure_layers(Statistics(again=True), *example), 2)
        == free[-1:]
    )


def test_bad_inputs():
    model, x = Statistics(), torch.randn(3, WIDTH)
    stages = split(trace(model, (x, None, 2)), ["layers.1"])
    with pytest.raises(UsageError, match="input 2 is 3; the model was traced with 2"):
        stages[0](x, None, 3)
    stages[0](x)  # without what is constant
    with pytest.raises(UsageError, match="example of 4 inputs: too many positional arguments"):
        trace(model, (x, None, 2, 3))


def test_another_shape_when_only_one_stage_is_left():
    model, starts = TiedGPT().eval(), ["blocks.1"]
    short, long = torch.randint(10, (2, 5)), torch.randint(10, (4, 6))
    stages = split(trace(model, (short,)), starts)
    expected = model(long)
    values = split(trace(model, (long,)), starts)[0](long)
    release_other_stages(model, [stages[1]])
    assert model.place.device.type == "meta"
    again = split(trace(model, (long,)), starts)[1]
    assert all(a is b for a, b in zip(again.parameters(), stages[1].parameters(), strict=True))
    assert torch.equal(again(*values)[0], expected)


class Level(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_which_modules_are_layers():
    x = torch.randn(2, 3, WIDTH)
    nested = nn.Sequential(
        nn.Sequential(Block(), Block()), nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    )
    assert trace(nested, (x,)).layers == ["0.0", "0.1", "1"]
    # An element of a container is a layer, unless a split point inside of it is asked for.
    levels = nn.Sequential(Level(), Level())
    graph = trace(levels, (x,))
    assert graph.layers == ["0", "1"]
    check_cuts(levels, (x,), cuts=[("0.blocks.1", "1"), ("1.blocks.1.inner",)])
    coder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True), 3, enable_nested_tensor=False
    )
    assert trace(coder, (x,)).layers == ["layers.0", "layers.1", "layers.2"]
    check_cuts(coder, (x,))
    check_cuts(nn.Transformer(WIDTH, 2, 2, 2, 8, batch_first=True), (x, x.clone()), largest=1)
