"""Which pieces of a model are blocks."""

from __future__ import annotations

from torch import nn

from paceline.model_parallel.fsdp.blocks import blocks_of


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))


class Body(nn.Module):
    def __init__(self, num_layers):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))


def test_elements_of_lists_and_sequences_with_parameters():
    mlp = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3), nn.Linear(3, 3))
    assert list(blocks_of(mlp)) == ["0", "2", "3"]
    assert list(blocks_of(Body(3))) == ["layers.0", "layers.1", "layers.2"]  # not what is inside
    assert blocks_of(nn.Linear(3, 3)) == {}


def test_groups_of_blocks_are_none():
    stages = nn.Sequential(nn.Sequential(Layer(), Layer()), nn.ModuleList([Layer(), Layer()]))
    assert list(blocks_of(stages)) == ["0.0", "0.1", "1.0", "1.1"]
    named = nn.ModuleDict({"h": nn.ModuleList([Layer(), Layer(), Layer()]), "e": nn.Linear(3, 3)})
    assert list(blocks_of(named)) == ["h.0", "h.1", "h.2"]


def test_the_body_of_a_model_has_blocks_of_its_own():
    model = nn.Sequential(nn.Embedding(5, 3), Body(3), nn.Linear(3, 5))
    inner = [f"1.layers.{n}" for n in range(3)]
    assert list(blocks_of(model)) == ["0", *inner, "1", "2"]


def test_a_module_under_two_names_is_one_block():
    layer = Layer()
    model = nn.ModuleList([layer, Layer(), layer, Layer()])
    assert list(blocks_of(model)) == ["0", "1", "3"]
