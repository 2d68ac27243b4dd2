"""A model on the meta device gets the same values however it is cut, one module at a time."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.errors import UsageError
from paceline.model_parallel.fsdp.materialize import MetaModel, materialize
from paceline.model_parallel.sharding.layout import LocalShard, Slice, SliceSpec


def on_meta(maker):
    with torch.device("meta"):
        return maker()


def whole_of(model):
    return {n: LocalShard(p, SliceSpec(tuple(p.shape))) for n, p in model.named_parameters()}


def filled(maker, seed=1, init=None):
    model = on_meta(maker)
    holding = whole_of(model)
    materialize(holding, MetaModel.of(model), seed, init)
    return model


def small():
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Embedding(7, 3, padding_idx=0))


def test_values_are_those_of_the_modules_own_resets():
    model = on_meta(small)
    params = dict(model.named_parameters())
    recipes = MetaModel.of(model)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    materialize(whole_of(model), recipes, 1)
    assert torch.equal(torch.get_rng_state(), before)  # the caller's random numbers are not used
    assert all(params[name] is param for name, param in model.named_parameters())
    assert not any(t.is_meta for t in [*model.parameters(), *model.buffers()])
    assert 0 < model[0].weight.abs().max() <= 5**-0.5 and model[0].weight.unique().numel() == 30
    assert model[1].weight.tolist() == [1] * 6 and model[1].running_var.tolist() == [1] * 6
    assert model[1].num_batches_tracked.item() == 0
    assert not model[2].weight[0].any() and model[2].weight[1:].all()
    assert all(shape.is_meta for shape in recipes.shapes.parameters())  # nothing whole is kept
    assert model[1](model[0](torch.ones(2, 5))).isfinite().all()


def test_every_cut_starts_with_the_same_values():
    whole = filled(small)
    other = filled(small, seed=2)
    assert not torch.equal(whole[0].weight, other[0].weight)
    for index in range(3):
        model = on_meta(small)
        recipes, held = MetaModel.of(model), {}
        for name, param in model.named_parameters():
            part = SliceSpec(tuple(param.shape)).then(Slice(0, index, 3))
            held[name] = LocalShard(nn.Parameter(part.of(param.detach())), part)
        if index == 2:  # a stage that has not everything
            del held["0.weight"], held["0.bias"]
        materialize(held, recipes, 1)
        for name, one in held.items():
            expected = one.spec.of(whole.get_parameter(name).detach())
            assert torch.equal(one.tensor.detach(), expected), name


def test_a_reset_that_writes_below_itself_is_done_with_what_it_writes_to():
    attention = filled(lambda: nn.Sequential(nn.MultiheadAttention(8, 2), nn.Linear(8, 8)))[0]
    assert not attention.out_proj.bias.any() and attention.out_proj.weight.all()
    assert not attention.in_proj_bias.any() and attention.in_proj_weight.all()

    class Halved(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

        def reset_parameters(self):
            self.inner[1].weight.data.fill_(0.5)

    model = filled(Halved)
    assert model.inner[1].weight.unique().tolist() == [0.5]
    assert model.inner[0].weight.unique().numel() == 16 and model.inner[1].bias.all()


class Own(nn.Module):
    """With a parameter and a buffer that nothing resets."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("table", torch.arange(3.0))
        self.inner = nn.Linear(3, 3)


def test_the_callers_init_comes_behind_the_reset():
    called = []

    def init(module):
        called.append(type(module).__name__)
        if isinstance(module, Own):
            module.gain.fill_(2)
            module.table = torch.arange(3.0)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    model = filled(Own, init=init)
    assert model.gain.tolist() == [2, 2, 2] and not model.gain.requires_grad
    assert model.table.tolist() == [0, 1, 2]
    assert model.inner.weight.all() and not model.inner.bias.any()
    assert called == ["Own", "Linear"]


def test_what_gets_no_value_is_named():
    with pytest.raises(UsageError, match=r"Own: nothing gives .* parameter 'gain'.* init="):
        filled(Own)
    with pytest.raises(UsageError, match=r"module '1' \(Own\): .* buffer 'table'"):
        filled(
            lambda: nn.Sequential(nn.Linear(3, 3), Own()),
            init=lambda m: m.gain.zero_() if isinstance(m, Own) else None,
        )


def test_init_sees_every_module_as_apply_shows_them():
    def init(module):
        if isinstance(module, nn.Sequential):
            module[1].weight.mul_(0)

    model = filled(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), init=init)
    assert model[0].weight.all() and not model[1].weight.any() and model[1].bias.all()


def test_tied_parameters_stay_tied_and_real_ones_stay_as_they_are():
    def maker():
        model = nn.ModuleDict({"words": nn.Embedding(5, 4), "head": nn.Linear(4, 5)})
        model["head"].weight = model["words"].weight
        return model

    model = filled(maker)
    assert model["head"].weight is model["words"].weight and not model["head"].bias.is_meta
    alone = filled(lambda: nn.ModuleDict({"words": nn.Embedding(5, 4)}))
    assert torch.equal(model["words"].weight, alone["words"].weight)

    mixed = nn.Sequential(nn.Linear(2, 2), on_meta(lambda: nn.Linear(2, 2)))
    before = mixed[0].weight.clone()
    materialize(whole_of(mixed), MetaModel.of(mixed), 0)
    assert torch.equal(mixed[0].weight, before) and not mixed[1].weight.is_meta
    late = nn.Sequential(on_meta(lambda: nn.Linear(2, 2)))
    with pytest.raises(UsageError, match=r"parameter 0\.weight .* not in the model"):
        materialize(whole_of(late), MetaModel.of(nn.Sequential()), 0)
