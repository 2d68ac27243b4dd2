"""Models of every kind, cut at every place: stages in a row give what the whole model gives."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
from torch import nn

from support import stage_models
from support.stage_checks import check_cuts

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def example(name):
    spec = spec_from_file_location(f"cut_example_{name}", EXAMPLES / name / "after.py")
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def words(*size):
    return torch.randint(10, size)


def test_a_sequential():
    model = nn.Sequential(
        nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)
    )
    graph = check_cuts(model, (torch.randn(3, 4),), largest=4)
    assert graph.layers == ["0", "1", "2", "3", "4"]
    assert graph.fits((torch.randn(5, 4),))


def test_the_example_gpt():
    gpt = example("gpt").GPT(11)
    graph = check_cuts(gpt, (torch.randint(11, (2, 8)),), largest=3)
    assert graph.layers == ["letters", "blocks.0", "blocks.1", "blocks.2", "head"]
    assert graph.fits((torch.randint(11, (2, 8)),))
    assert not graph.fits((torch.randint(11, (2, 7)),))


def test_the_example_gpt_inside_of_a_block():
    gpt = example("gpt").GPT(11)
    cuts = [("blocks.0.out", "blocks.1.think.1"), ("blocks.1",), ("blocks.0.norm2", "head")]
    check_cuts(gpt, (torch.randint(11, (2, 8)),), cuts=cuts)


def test_the_example_resnet():
    check_cuts(example("resnet").resnet(4), (torch.randn(4, 1, 16, 16),), largest=1)


CASES = {
    "EncoderDecoder": lambda: (words(2, 4), words(2, 3)),
    "UNet": lambda: (torch.randn(2, 1, 8, 8),),
    "TwoInputs": lambda: (torch.randn(2, 3), torch.randn(2, 5)),
    "RopeModel": lambda: (words(2, 4),),
    "TiedGPT": lambda: (words(2, 5),),
    "InPlace": lambda: (torch.randn(3, 8),),
    "Statistics": lambda: (torch.randn(3, 8), None, 2),
    "Shared": lambda: (torch.randn(2, 3, 8),),
}


@pytest.mark.parametrize("name", CASES)
def test_cut_everywhere(name):
    check_cuts(getattr(stage_models, name)(), CASES[name](), largest=3)
