"""Models of every kind, distributed: what they are made of, and what scripts do to them."""

from __future__ import annotations

import copy
import io
import warnings

import pytest
import torch
import torch.nn.functional as F
from against_one_process import (
    UPDATES,
    Pair,
    adam,
    loss,
    mlp,
    require_close,
    rows,
    sgd,
)
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import nn

import paceline as pl
from paceline.comm.group import Group
from support import run_ranks

# -- in the ranks ---------------------------------------------------------------------------------


class Tied(nn.Module):
    """The head is the embedding."""

    def __init__(self, vocabulary: int = 11, width: int = 6) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.tokens((x.abs() * 10).long() % self.tokens.num_embeddings).tanh())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 8, num_layers=2, batch_first=True)
        self.out = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.lstm(x.view(len(x), 2, 3))[0])


class Odd(nn.Module):
    """Parameters without elements, with one, without dimensions, and not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.one = nn.Parameter(torch.ones(1))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.turned = nn.Parameter(torch.randn(3, 6).t())
        self.middle = nn.Parameter(torch.randn(6, 2, 3).transpose(1, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.turned * self.one + self.scalar + self.empty.sum()
        return y + torch.einsum("bi,ijk->bj", x, self.middle)


class DictOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> dict[str, object]:
        return {"out": [self.body(x), None], "loss": (self.body(x) ** 2).mean()}


def kinds_of_models(group: Group, update: str) -> None:
    torch.manual_seed(4)
    wide = nn.Sequential(nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 300), nn.Linear(300, 2))
    shared = nn.Linear(300, 300)  # its gradient has several parts in one pass
    twice = nn.Sequential(nn.Linear(6, 300), shared, nn.Tanh(), shared)
    for model in (Tied(), Tied(700, 100), Recurrent(), Odd(), wide, twice):
        before = {name: param.stride() for name, param in model.named_parameters()}
        for make in (sgd, adam):
            pair = Pair(group, copy.deepcopy(model).double(), make, update)
            if isinstance(model, Tied):
                assert pair.ours.head.weight is pair.ours.tokens.weight
            width = model.tokens.embedding_dim if isinstance(model, Tied) else 6
            pair.train(size=width)
            assert {name: p.stride() for name, p in pair.ours.named_parameters()} == before
    pair = Pair(group, DictOutput().double(), sgd, update)
    for step in range(2):
        x = rows(group, seed=step)
        for model, optimizer, is_ours in pair.both():
            optimizer.zero_grad()
            out = model(pair.mine(x) if is_ours else x)
            (out["out"][0].mean() + out["loss"]).backward()
            optimizer.step()
        pair.require_same_parameters("outputs in containers")


def channels_last(group: Group, update: str) -> None:
    torch.manual_seed(5)
    layers = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 3))
    pair = Pair(group, layers.double().to(memory_format=torch.channels_last), adam, update)
    for step in range(3):
        random = torch.Generator().manual_seed(step)
        x = torch.randn(2 * group.size, 3, 6, 6, dtype=torch.float64, generator=random)
        x = x.to(memory_format=torch.channels_last)
        for model, optimizer, is_ours in pair.both():
            optimizer.zero_grad()
            loss(model, pair.mine(x) if is_ours else x).backward()
        pair.require_same_gradients("channels_last")
        for _, optimizer, _ in pair.both():
            optimizer.step()
        pair.require_same_parameters("channels_last")
    weight = pair.ours[0].weight
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert weight.grad.is_contiguous(memory_format=torch.channels_last)


def dtypes(group: Group, update: str) -> None:
    """Half precision cannot be compared closely with another order of adding: one batch for all."""
    for parts in (("bfloat16",), ("float16",), ("float32",), ("bfloat16", "float64", "float32")):
        torch.manual_seed(6)
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        for layer, name in zip(model, parts * 3, strict=False):
            layer.to(getattr(torch, name))
        twin = copy.deepcopy(model)
        optimizers = [
            torch.optim.SGD(m.parameters(), lr=0.125, momentum=0.5) for m in (model, twin)
        ]
        pl.distribute(model, optimizers[0], update=update)
        for step in range(3):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            for chosen, optimizer in zip((model, twin), optimizers, strict=True):
                optimizer.zero_grad()
                y = x
                for layer in chosen:
                    y = layer(y.to(layer.weight.dtype))
                (y**2).mean().backward()
                optimizer.step()
            pl.check_consistency(model, optimizers[0])
        for found, expected in zip(model.parameters(), twin.parameters(), strict=True):
            assert found.dtype == expected.dtype
            limit = {torch.bfloat16: 1e-2, torch.float16: 2e-3}.get(found.dtype, 1e-6)
            torch.testing.assert_close(found, expected, rtol=limit, atol=limit)


def frozen_and_thawed(group: Group, update: str) -> None:
    model = nn.Sequential(mlp(), nn.Linear(3, 3).double(), nn.Linear(3, 300).double())
    model[0][0].requires_grad_(False)
    model[1].bias.requires_grad_(False)
    pair = Pair(group, model, sgd, update)
    kept = pair.ours[0][0].weight.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a frozen parameter is not an unused one
        pair.train(2)
        assert torch.equal(pair.ours[0][0].weight, kept)
        for module, _, _ in pair.both():
            module[0].requires_grad_(True)
        if group.rank == 0:
            with torch.no_grad():  # one rank evaluates alone: it must not wait for the others
                pair.ours(rows(group))
        group.barrier()
        pair.train(2, seed=1)
        assert not torch.equal(pair.ours[0][0].weight, kept)
        for module, optimizer, _ in pair.both():
            module[2].requires_grad_(False)
            optimizer.zero_grad()
        pair.train(2, seed=2)
        for module, _, _ in pair.both():
            module.requires_grad_(True)
        pair.train(2, seed=3)


def thawed_behind_the_back(group: Group, update: str) -> None:
    """The script calls a part of the model, so nobody sees the forward pass."""
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = sgd(model.parameters())
    pl.distribute(model, optimizer, update=update)
    model[0].requires_grad_(True)
    x = rows(group).chunk(group.size)[group.rank]
    (model[2](model[1](model[0](x))) ** 2).mean().backward()
    with pytest.raises(pl.errors.UsageError, match=r"0\.(weight|bias).*thawed"):
        optimizer.step()


def groups_added_later(group: Group, update: str) -> None:
    for is_frozen in (False, True):
        plain = mlp()
        plain[2].requires_grad_(not is_frozen)
        ours = copy.deepcopy(plain)
        optimizers = [adam(m[0].parameters()) for m in (plain, ours)]
        pl.distribute(ours, optimizers[1], update=update)
        for step in range(4):
            if step == 2:
                for model, optimizer in zip((plain, ours), optimizers, strict=True):
                    model[2].requires_grad_(True)
                    optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.05})
            x = rows(group, seed=step)
            for model, optimizer in zip((plain, ours), optimizers, strict=True):
                optimizer.zero_grad()
                model[2].zero_grad()
                loss(model, x.chunk(group.size)[group.rank] if model is ours else x).backward()
                optimizer.step()
            for name, value in ours.state_dict().items():
                require_close(value, plain.state_dict()[name], f"step {step} {name}")
            pl.check_consistency(ours, optimizers[1])


class Sparse(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        if mode == "bag":
            self.table: nn.Module = nn.EmbeddingBag(20, 4, sparse=True, mode="sum")
        else:
            self.table = nn.Embedding(20, 4, sparse=True)
        self.out = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.table((x.abs() * 10).long() % 20))


class Together(torch.optim.Optimizer):
    """SparseAdam for tables and SGD for the rest, as one optimizer."""

    def __init__(self, params: object) -> None:
        params = list(params)
        self.inner = [
            torch.optim.SparseAdam([params[0]], lr=0.01),
            torch.optim.SGD(params[1:], lr=0.1),
        ]
        super().__init__(params, {})

    def step(self, closure: object = None) -> None:
        for optimizer in self.inner:
            optimizer.step()


def sparse_gradients(group: Group, update: str) -> None:
    for mode in ("embedding", "bag"):
        torch.manual_seed(8)
        pair = Pair(group, Sparse(mode).double(), lambda p: torch.optim.SGD(p, lr=0.1), update)
        pair.train()
        assert pair.ours.table.weight.grad.is_sparse
    # Alone in its model, without any bucket.
    table = nn.Embedding(20, 4, sparse=True).double()
    pair = Pair(group, table, lambda p: torch.optim.SparseAdam(list(p), lr=0.01), update)
    for step in range(3):
        x = (rows(group, seed=step).abs() * 10).long() % 20
        for model, optimizer, is_ours in pair.both():
            optimizer.zero_grad()
            (model(pair.mine(x) if is_ours else x) ** 2).mean().backward()
        pair.require_same_gradients("sparse")
        for _, optimizer, _ in pair.both():
            optimizer.step()
        pair.require_same_parameters("sparse")
    # With accumulation, and on one rank only.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pair.optimizer.zero_grad()
        pair.plain_optimizer.zero_grad()
        with pair.ours.no_sync():
            (pair.ours(pair.mine(x)) ** 2).mean().backward()
        (pair.ours(pair.mine(x)) ** 2).mean().backward()
        (2 * (pair.plain(x) ** 2).mean()).backward()
        pair.require_same_gradients("sparse, accumulated")


def two_models(group: Group, update: str) -> None:
    torch.manual_seed(9)
    generator, critic = (
        nn.Sequential(nn.Linear(6, 30), nn.ReLU(), nn.Linear(30, 6)),
        nn.Linear(6, 1),
    )
    pairs = [Pair(group, model.double(), adam, update) for model in (generator, critic)]
    g, d = pairs
    for step in range(3):
        x, noise = rows(group, seed=step), rows(group, seed=step + 40)
        for is_ours in (False, True):
            gen, critic = (g.ours, d.ours) if is_ours else (g.plain, d.plain)
            gen_opt = g.optimizer if is_ours else g.plain_optimizer
            critic_opt = d.optimizer if is_ours else d.plain_optimizer
            real, z = (g.mine(x), g.mine(noise)) if is_ours else (x, noise)
            critic_opt.zero_grad()
            fake = gen(z)
            (F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()).backward()
            critic_opt.step()
            gen_opt.zero_grad()
            F.softplus(-critic(fake)).mean().backward()  # through both
            gen_opt.step()
            critic_opt.zero_grad()
            gen_opt.zero_grad()
            ((gen(z) ** 2).mean() + (critic(real) ** 2).mean()).backward()  # of both
            gen_opt.step()
            critic_opt.step()
        for pair in pairs:
            pair.require_same_gradients("two models")
            pair.require_same_parameters("two models")


def copies(group: Group, update: str) -> None:
    model = nn.Sequential(mlp(), nn.Linear(3, 30000).double(), nn.BatchNorm1d(30000).double())
    pair = Pair(group, model, sgd, update)
    pair.ours(rows(group)).mean().backward()
    pair.optimizer.step()
    ema = torch.optim.swa_utils.AveragedModel(pair.ours)
    ema.update_parameters(pair.ours)
    file = io.BytesIO()
    torch.save(pair.ours, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for twin in (copy.deepcopy(pair.ours), ema.module, loaded):
        for name, value in pair.ours.state_dict().items():
            assert torch.equal(twin.state_dict()[name], value), name
        if group.rank == 0:  # alone: a copy waits for nobody
            before = copy.deepcopy(pair.ours.state_dict())
            optimizer = sgd(twin.parameters())
            assert not hasattr(twin, "no_sync")  # a plain model has none
            twin(rows(group)).mean().backward()
            twin(rows(group)).mean().backward()
            optimizer.step()
            for name, value in pair.ours.state_dict().items():
                assert torch.equal(before[name], value), f"the copy changed {name}"
    saved = load_safetensors(save_safetensors(pair.ours.state_dict()))
    for name, value in pair.ours.state_dict().items():
        assert torch.equal(saved[name], value), name
    # A copy can be distributed itself.
    twin = copy.deepcopy(pair.ours)
    Pair(group, twin[0], sgd, update).train()


BATTERY = (
    kinds_of_models,
    channels_last,
    dtypes,
    frozen_and_thawed,
    thawed_behind_the_back,
    groups_added_later,
    sparse_gradients,
    two_models,
    copies,
)


def run_battery(group: Group, update: str) -> None:
    for check in BATTERY:
        print(check.__name__, flush=True)  # shown when it fails
        check(group, update)


# -- in the test session --------------------------------------------------------------------------


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize(("world_size", "hosts"), [(1, 1), (2, 1), (3, 2)])
def test_models_train_as_in_one_process(world_size: int, hosts: int, update: str) -> None:
    run_ranks(world_size, run_battery, update, hosts=hosts, env={"PACELINE_TIMEOUT_S": "50"})
