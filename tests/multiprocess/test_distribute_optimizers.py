"""Optimizers in a distributed script, and everything that scripts hang on them."""

from __future__ import annotations

import copy
import io
import warnings

import pytest
import torch
from against_one_process import UPDATES, Pair, adam, loss, mlp, require_close, rows, sgd
from torch import nn

import paceline as pl
from paceline.comm.group import Group
from support import run_ranks

ELEMENTWISE = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "Adam": {"lr": 0.01, "amsgrad": True},
    "AdamW": {"lr": 0.01, "fused": True},
    "Adagrad": {"lr": 0.01},
    "RMSprop": {"lr": 0.01, "momentum": 0.5, "centered": True},
    "Adadelta": {"lr": 0.5},
    "Adamax": {"lr": 0.01},
    "NAdam": {"lr": 0.01},
    "RAdam": {"lr": 0.01},
    "ASGD": {"lr": 0.01},
    "Rprop": {"lr": 0.01},
}


class Lamb(torch.optim.Optimizer):
    """Scales each parameter's update by norms of the whole parameter."""

    def __init__(self, params: object, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["steps"] = 0
                    state["mean"] = torch.zeros_like(param)
                    state["history"] = []  # neither a tensor nor a number
                state["steps"] += 1
                state["mean"].mul_(0.9).add_(param.grad, alpha=0.1)
                trust = param.norm() / (state["mean"].norm() + 1e-6)
                param.sub_(state["mean"], alpha=group["lr"] * float(trust.clamp(max=10)))


# -- in the ranks ---------------------------------------------------------------------------------


def every_optimizer(group: Group, update: str) -> None:
    for name, settings in ELEMENTWISE.items():
        print(name)
        Pair(group, mlp(), lambda p: getattr(torch.optim, name)(p, **settings), update).train()  # noqa: B023
    for make in (Lamb, lambda p: torch.optim.Adafactor(p, lr=0.01)):
        Pair(group, mlp(), make, update).train()
    torch.manual_seed(1)
    if hasattr(torch.optim, "Muon"):
        layers = nn.Sequential(nn.Linear(6, 9, bias=False), nn.Linear(9, 5, bias=False)).double()
        muon = Pair(group, layers, lambda p: torch.optim.Muon(p, lr=0.01), update)
        x = rows(group)  # it computes in bfloat16: no close comparison
        for model, optimizer, is_ours in muon.both():
            loss(model, muon.mine(x) if is_ours else x).backward()
            optimizer.step()
        torch.testing.assert_close(muon.ours[0].weight, muon.plain[0].weight, rtol=0.1, atol=1e-3)
        pl.check_consistency(muon.ours, muon.optimizer)
    # One parameter: with several workers some have nothing to update.
    for make in (sgd, adam, lambda p: torch.optim.AdamW(p, lr=0.1, fused=True)):
        Pair(group, nn.Linear(6, 1, bias=False).double(), make, update).train()


def several_groups(group: Group, update: str) -> None:
    def make(params: object) -> torch.optim.Optimizer:
        first, *rest = params
        decayed = {"params": [rest[1]], "weight_decay": 0.1}
        return torch.optim.AdamW(
            [{"params": [first], "lr": 0.02}, decayed, {"params": [rest[0], rest[2]]}], lr=0.001
        )

    pair = Pair(group, mlp(), make, update)
    pair.train()
    for _, optimizer, _ in pair.both():
        optimizer.param_groups[1]["lr"] = 0.5
    pair.train(seed=1)
    assert [len(g["params"]) for g in pair.optimizer.param_groups] == [1, 1, 2]


def schedulers(group: Group, update: str) -> None:
    for before in (True, False):
        plain, ours = mlp(), mlp()
        optimizers = [sgd(plain.parameters()), sgd(ours.parameters())]
        kinds = (
            lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5),
            lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.2, total_steps=9),
        )
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # also "scheduler.step() before optimizer.step()"
            if not before:
                pl.distribute(ours, optimizers[1], update=update)
            chosen = [[kind(optimizer) for kind in kinds] for optimizer in optimizers]
            if before:
                pl.distribute(ours, optimizers[1], update=update)
            for step in range(4):
                x = rows(group, seed=step)
                for number, model in enumerate((plain, ours)):
                    optimizers[number].zero_grad()
                    part = x.chunk(group.size)[group.rank] if number else x
                    loss(model, part).backward()
                    optimizers[number].step()
                    for scheduler in chosen[number]:
                        scheduler.step()
        assert optimizers[0].param_groups[0]["lr"] == optimizers[1].param_groups[0]["lr"]
        for name, value in ours.state_dict().items():
            require_close(value, plain.state_dict()[name], f"scheduled, {before}, {name}")


def scaler(group: Group, update: str) -> None:
    for fused in (False, True):
        make = lambda p: torch.optim.AdamW(p, lr=0.01, fused=fused)  # noqa: E731, B023
        pair = Pair(group, mlp(torch.float32), make, update)
        scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
        for step in range(4):
            x = rows(group, seed=step).float()
            before = copy.deepcopy(pair.ours.state_dict())
            for (model, optimizer, is_ours), scale in zip(pair.both(), scalers, strict=True):
                optimizer.zero_grad()
                value = loss(model, pair.mine(x) if is_ours else x)
                if step == 2 and (not is_ours or group.rank == group.size - 1):
                    value = value * float("inf")  # on one rank only
                scale.scale(value).backward()
                if step % 2:
                    scale.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                scale.step(optimizer)
                scale.update()
            assert scalers[0].get_scale() == scalers[1].get_scale(), step
            for name, value in pair.ours.state_dict().items():
                torch.testing.assert_close(
                    value, pair.plain.state_dict()[name], rtol=2e-4, atol=1e-5
                )
                assert torch.equal(value, before[name]) is (step == 2), (step, name)
            pl.check_consistency(pair.ours, pair.optimizer)
        assert scalers[1].get_scale() == 512.0


def autocast(group: Group, update: str) -> None:
    """Products in bfloat16 have 8 bits, so the plain model plays the workers one by one."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 300), nn.Linear(300, 2))
    pair = Pair(group, model, adam, update)

    def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            value = loss(model, x)
        value.backward()
        return [param.grad.clone() for param in model.parameters()]

    for step in range(3):
        x = rows(group, seed=step).float()
        by_rank = [gradients(pair.plain, part) for part in x.chunk(group.size)]
        expected = [sum(parts) / group.size for parts in zip(*by_rank, strict=True)]
        for found, mean in zip(gradients(pair.ours, pair.mine(x)), expected, strict=True):
            assert found.dtype == torch.float32
            torch.testing.assert_close(found, mean, rtol=1e-5, atol=1e-7)
        pair.optimizer.step()
        pair.plain.load_state_dict(pair.ours.state_dict())
        pl.check_consistency(pair.ours, pair.optimizer)


def states(group: Group, update: str) -> None:
    """What a script saves and loads is what a plain script would."""
    for make in (sgd, adam, Lamb, lambda p: torch.optim.Adagrad(p, lr=0.01)):
        pair = Pair(group, mlp(), make, update)
        require_same_state(pair.optimizer.state_dict(), pair.plain_optimizer.state_dict())
        pair.train()
        # On one rank, while the others are busy elsewhere.
        if group.rank == 0:
            require_same_state(pair.optimizer.state_dict(), pair.plain_optimizer.state_dict())
            torch.save([pair.ours.state_dict(), pair.optimizer.state_dict()], io.BytesIO())
        group.barrier()
        saved = copy.deepcopy([pair.ours.state_dict(), pair.optimizer.state_dict()])
        # Into a plain script.
        twin = mlp()
        optimizer = make(twin.parameters())
        twin.load_state_dict(saved[0])
        optimizer.load_state_dict(copy.deepcopy(saved[1]))  # it keeps the tensors
        pair.train(seed=1)
        pair.plain, pair.plain_optimizer = twin, optimizer
        # Back into this one: the same as loading into the plain one.
        pair.ours.load_state_dict(saved[0])
        pair.optimizer.load_state_dict(saved[1])
        require_same_state(pair.optimizer.state_dict(), optimizer.state_dict())
        group.barrier()
        pair.train(seed=2)
        require_same_state(pair.optimizer.state_dict(), optimizer.state_dict())
        # Into one that is distributed afterwards.
        saved = copy.deepcopy([twin.state_dict(), optimizer.state_dict()])
        again = Pair.__new__(Pair)
        again.group, again.plain, again.plain_optimizer = group, twin, optimizer
        again.ours = mlp()
        again.optimizer = make(again.ours.parameters())
        again.ours.load_state_dict(saved[0])
        again.optimizer.load_state_dict(saved[1])
        pl.distribute(again.ours, again.optimizer, update=update)
        require_same_state(again.optimizer.state_dict(), optimizer.state_dict())
        again.train(seed=3)
        group.barrier()


def require_same_state(found: dict, expected: dict) -> None:
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for index, entries in expected["state"].items():
        assert found["state"][index].keys() == entries.keys()
        for key, value in entries.items():
            if isinstance(value, torch.Tensor):
                assert found["state"][index][key].shape == value.shape, key
                require_close(found["state"][index][key], value, f"state {key} of {index}")
            else:
                assert found["state"][index][key] == value, key


def closures(group: Group, update: str) -> None:
    pair = Pair(group, mlp(), sgd, update)
    with pytest.raises(pl.errors.UsageError, match="closure"):
        pair.optimizer.step(lambda: 0.0)
    pair.train()
    model = mlp()
    with pytest.raises(pl.errors.UsageError, match="LBFGS"):
        pl.distribute(model, torch.optim.LBFGS(model.parameters()), update=update)


def a_second_optimizer(group: Group, update: str) -> None:
    """One that distribute never sees, over other parameters of the same model."""
    for update_now in (update, "auto"):
        plain, ours = mlp(), mlp()
        firsts = [adam(m[0].parameters()) for m in (plain, ours)]
        seconds = [sgd(m[2].parameters()) for m in (plain, ours)]
        pl.distribute(ours, firsts[1], update=update_now)
        for step in range(4):
            x = rows(group, seed=step)
            for number, model in enumerate((plain, ours)):
                model.zero_grad()
                loss(model, x.chunk(group.size)[group.rank] if number else x).backward()
                firsts[number].step()
                seconds[number].step()
            for name, value in ours.state_dict().items():
                require_close(value, plain.state_dict()[name], f"two optimizers, {name}")
        pl.check_consistency(ours, firsts[1])
        pl.check_consistency(ours, seconds[1])


def hooks_and_copies(group: Group, update: str) -> None:
    pair = Pair(group, mlp(), adam, update)
    seen = []
    pair.optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    pair.optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    pair.train(2)
    assert seen == ["before", "after"] * 2
    before = {id(p) for p in pair.ours.parameters()}
    assert {id(p) for g in pair.optimizer.param_groups for p in g["params"]} == before


BATTERY = (
    every_optimizer,
    several_groups,
    schedulers,
    scaler,
    autocast,
    states,
    closures,
    a_second_optimizer,
    hooks_and_copies,
)


def run_battery(group: Group, update: str) -> None:
    for check in BATTERY:
        print(check.__name__, flush=True)  # shown when it fails
        check(group, update)


def resumed(group: Group, saved: dict | None, update: str) -> dict:
    """Train for three steps from what was saved; save."""
    model = mlp()
    optimizer = adam(model.parameters())
    if saved is not None and group.rank % 2 == 0:  # before; the others afterwards
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    pl.distribute(model, optimizer, update=update)
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        group.barrier()
    continue_training(model, optimizer, group.rank, group.size, 0 if saved is None else 3)
    pl.check_consistency(model, optimizer)
    return copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


def continue_training(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, size: int, start: int
) -> None:
    for step in range(start, start + 3):
        random = torch.Generator().manual_seed(step)
        x = torch.randn(12, 6, dtype=torch.float64, generator=random).chunk(size)[rank]
        optimizer.zero_grad()
        loss(model, x).backward()
        optimizer.step()


# -- in the test session --------------------------------------------------------------------------


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize(("world_size", "hosts"), [(1, 1), (2, 1), (3, 2)])
def test_optimizers_work_as_in_one_process(world_size: int, hosts: int, update: str) -> None:
    # Some virtual machines announce instructions for bfloat16 that they do not have.
    env = {"PACELINE_TIMEOUT_S": "50", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    run_ranks(world_size, run_battery, update, hosts=hosts, env=env)


def test_training_goes_on_with_another_number_of_workers() -> None:
    saved = run_ranks(2, resumed, None, "sharded")[0]
    model = mlp()
    optimizer = adam(model.parameters())
    model.load_state_dict(copy.deepcopy(saved["model"]))
    optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
    continue_training(model, optimizer, 0, 1, 3)
    for world_size, hosts, update in ((3, 1, "replicated"), (4, 1, "sharded"), (3, 2, "sharded")):
        found = run_ranks(world_size, resumed, saved, update, hosts=hosts)
        for rank in range(world_size):
            for name, value in model.state_dict().items():
                require_close(found[rank]["model"][name], value, f"{world_size} {update} {name}")
            require_same_state(found[rank]["optimizer"], optimizer.state_dict())
