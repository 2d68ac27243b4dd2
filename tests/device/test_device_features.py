"""What scripts do with models on a device: each must give what it gives on the CPU.

One job does many things, because a rank takes seconds to start.
"""

from __future__ import annotations

import gc
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.errors import DeviceMemoryError, NonFiniteGradient, UsageError
from support.devices import load_device, run_on_device
from support.ranks import run_ranks

STEPS = 3


class Net(nn.Module):
    """Small and large parameters; `extra` is used only when asked for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(20, 16)
        self.body = nn.Sequential(nn.Linear(16, 600), nn.Tanh(), nn.Linear(600, 4))
        self.extra = nn.Linear(4, 4)

    def forward(self, tokens: torch.Tensor, use_extra: bool = False) -> torch.Tensor:
        looked_up = self.embed(tokens.to(self.embed.weight.device))
        out = self.body(looked_up.to(self.body[0].weight.device))
        return self.extra(out) if use_extra else out


class NormNet(Net):
    """With a batch norm; its running statistics are the mean over all steps."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16, momentum=None)
        self.body.insert(0, self.norm)

    def forward(self, tokens: torch.Tensor, use_extra: bool = False) -> torch.Tensor:
        return super().forward(tokens[:, 0], use_extra)


class SparseNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16, sparse=True)


def batch(rank: int, step: int) -> torch.Tensor:
    torch.manual_seed(10 * step + rank)
    return torch.randint(0, 20, (5, 3))


class Script:
    """A training script; scenarios change parts of it."""

    network: type[Net] = Net
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD
    settings: dict[str, Any] = {"lr": 0.1}
    options: dict[str, Any] = {}
    accumulates = 1
    clips = scales = is_mixed = compiles = casts = False
    num_waits = 0  # of the script's thread for the device, in a step
    uses_extra = (False, False)  # by rank

    def __init__(self, rank: int, device: str) -> None:
        self.rank, self.device = rank, device
        self.model = self.network().to(device)
        if self.is_mixed:
            self.model.embed.to("cpu")
        self.opt = type(self).optimizer(self.model.parameters(), **self.settings)
        options = {} if device != "cpu" else {"update": "replicated"}
        chosen = {k: v for k, v in self.options.items() if device != "cpu" or k != "via"}
        pl.distribute(self.model, self.opt, unused="ignore", bucket_mb=0.02, **options, **chosen)
        self.scaler = self.make_scaler() if self.scales else None
        if self.compiles:
            self.model.compile(backend="aot_eager")

    def make_scaler(self) -> Any:
        return pl.GradScaler(init_scale=1024.0)

    def loss(self, step: int, part: int = 0) -> torch.Tensor:
        tokens = batch(self.rank, step + 50 * part).to(self.device)
        kind = torch.device(self.device).type
        with torch.autocast(kind, torch.bfloat16, enabled=self.casts):
            return self.model(tokens, self.uses_extra[self.rank]).float().square().mean()

    def step(self, step: int) -> None:
        self.opt.zero_grad()
        with self.model.no_sync():
            for part in range(self.accumulates - 1):
                self.loss(step, part).backward()
        loss = self.loss(step, self.accumulates - 1)
        if self.scaler is None:
            loss.backward()
        else:
            self.scaler.scale(loss * (float("inf") if step == 1 else 1.0)).backward()
            self.scaler.unscale_(self.opt)
        if self.clips:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        if self.scaler is None:
            self.opt.step()
        else:
            self.scaler.step(self.opt)
            self.scaler.update()

    def run(self) -> list[torch.Tensor]:
        for step in range(STEPS):
            waits = self.waits_during(step)
        if not self.is_mixed:  # the script copies between the CPU and the device in forward
            assert len(waits) == self.num_waits, (type(self), [w.stack for w in waits])
        pl.check_consistency(self.model, self.opt)
        tensors = (*self.model.parameters(), *self.model.buffers())
        values = [tensor.detach().cpu() for tensor in tensors]
        return [*values, torch.tensor(self.scaler.get_scale())] if self.scaler else values

    def waits_during(self, step: int) -> list[Any]:
        """Take a step. Return the waits for the device, without those of errand threads and of the
        copy of a batch to the device."""
        if self.device == "cpu":
            self.step(step)
            return [None] * self.num_waits
        laggard = load_device()
        torch.accelerator.synchronize()
        laggard.take_synchronizations()
        self.step(step)
        waits = laggard.take_synchronizations()
        return [w for w in waits if "wait_on_host" not in w.stack and "in loss" not in w.stack]


class Fused(Script):
    optimizer, settings = torch.optim.AdamW, {"lr": 0.01, "fused": True}


class Foreach(Script):
    optimizer, settings = torch.optim.AdamW, {"lr": 0.01, "foreach": True}


class Accumulating(Script):
    accumulates = 3


class UsedByOne(Script):
    uses_extra = (True, False)


class Mixed(Script):
    is_mixed, options = True, {"placement": "mixed"}


class MixedThroughHost(Mixed):
    options = {"placement": "mixed", "via": "host"}


class Clipping(Script):
    clips = True


class Narrow(Script):
    options = {"precision": "bf16"}


class Scaling(Script):
    scales, clips = True, True
    num_waits = 1  # torch's own scaler waits once, too


class ScalingFused(Scaling):
    optimizer, settings = torch.optim.AdamW, {"lr": 0.01, "fused": True}
    num_waits = 0


class TorchScaler(Scaling):
    def make_scaler(self) -> Any:
        return torch.amp.GradScaler(torch.device(self.device).type, init_scale=1024.0)


class Compiled(Script):
    compiles = True


class Autocast(Script):
    casts = True


class SameCheck(Script):
    options = {"nonfinite": "skip"}
    num_waits = 1


class GlobalNorm(Script):
    network, options = NormNet, {"batchnorm": "global"}


class SparseEmbedding(Script):
    network = SparseNet
    num_waits = 4  # indices and values are averaged in host memory, and come back


EXACT = (Script, Fused, Foreach, Accumulating, UsedByOne, Mixed, MixedThroughHost, SameCheck)
EXACT += (SparseEmbedding, Compiled)
CLOSE = (Clipping, Narrow, Autocast, Scaling, ScalingFused, TorchScaler, GlobalNorm)


def run_all(world, device: str | None) -> list[Any]:
    here = device or str(pl.device())
    return [kind(world.rank, here).run() for kind in (*EXACT, *CLOSE)]


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    return run_ranks(2, run_all, "cpu", timeout_s=200)[0]


def test_scripts_get_on_a_device_what_they_get_on_the_cpu(schedule, expected):
    found = run_on_device(2, run_all, None, schedule=schedule, timeout_s=300)
    for of_rank in found:
        for kind, one, right in zip((*EXACT, *CLOSE), of_rank, expected, strict=True):
            tolerance = 0.0 if kind in EXACT else 0.02 if kind in (Narrow, Autocast) else 1e-5
            torch.testing.assert_close(
                one, right, rtol=0, atol=tolerance, msg=lambda m, kind=kind: f"{kind.__name__}: {m}"
            )


# -- checks, refusals -----------------------------------------------------------------------------


def checks(world) -> None:
    here = str(pl.device())
    not_finite_is_named(world.rank, here, "device")
    not_finite_is_named(world.rank, here, "host")
    refusals(world.rank, here)
    out_of_memory(world.rank, here)
    saved_models_are_plain(here)


def not_finite_is_named(rank: int, here: str, via: str) -> None:
    model = Net().to(here)
    opt = torch.optim.SGD(model.parameters(), 0.1)
    pl.distribute(model, opt, nonfinite="raise", unused="ignore", via=via)
    with pytest.raises(NonFiniteGradient, match=r"step 2: .* \(rank 1: .*body.0.weight") as caught:
        for step in range(6):
            opt.zero_grad()
            loss = model(batch(rank, step).to(here)).square().mean()
            (loss * (float("nan") if (step, rank) == (1, 1) else 1.0)).backward()
            opt.step()
            torch.accelerator.synchronize()  # the answer is there in the next step
    assert "embed.weight" in str(caught.value)
    skipped = Net().to(here)
    opt = torch.optim.SGD(skipped.parameters(), 0.1)
    pl.distribute(skipped, opt, nonfinite="skip", unused="ignore", via=via)
    before = [p.detach().cpu() for p in skipped.parameters()]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loss = skipped(batch(rank, 0).to(here)).sum() * (float("inf") if rank else 1.0)
        loss.backward()
    assert all(p.grad is None for p in skipped.parameters())
    assert bool(said) is (rank == 0)
    opt.step()
    for p, was in zip(skipped.parameters(), before, strict=True):
        assert torch.equal(p.detach().cpu(), was)


def refusals(rank: int, here: str) -> None:
    def refused(model: nn.Module, match: str, **options: Any) -> None:
        with pytest.raises(UsageError, match=match):
            pl.distribute(model, torch.optim.SGD(model.parameters(), 0.1), **options)

    half = Net().to(here)
    half.embed.to("cpu")
    refused(half, r"the model is on laggard:., but embed.weight on the CPU.*placement='mixed'")
    other = f"laggard:{1 - rank}"
    refused(Net().to(other), "but the device of this process is")
    apart = Net().to(here)
    apart.extra.to(other)
    refused(apart, "several devices, .*laggard:1: .*; a worker trains on one")
    refused(Net().to(here), "update=sharded divides the step .*--mesh fsdp=N", update="sharded")
    of_layers = {"batchnorm": "global", "via": "host"}
    refused(NormNet().to(here), "batchnorm=global adds up .*via=host does without", **of_layers)
    refused(Net().to(here), "pace hogwild: all workers write to one memory", pace="hogwild")


def out_of_memory(rank: int, here: str) -> None:
    """One worker's device is full: both say so, and nothing is left behind."""
    model = nn.Sequential(nn.Linear(600, 600), nn.Linear(600, 600)).to(here)
    opt = torch.optim.SGD(model.parameters(), 0.1)
    zeros = torch.zeros

    def zeros_while_there_is_memory(*shape: Any, **kind: Any) -> torch.Tensor:
        """Fail as a device does, without filling one: for the second bucket."""
        if rank == 1 and kind.get("device") == torch.device(here) and len(made) == 5:
            raise torch.OutOfMemoryError(f"{here} is out of memory: tried to allocate {shape}")
        made.append(shape)
        return zeros(*shape, **kind)

    gc.collect()  # earlier models
    used, made = torch.accelerator.memory_allocated(), list[Any]()
    torch.zeros = zeros_while_there_is_memory
    try:
        with pytest.raises(DeviceMemoryError, match="rank 1: laggard:1 has too little memory"):
            pl.distribute(model, opt, bucket_mb=1, nonfinite="raise")
    finally:
        torch.zeros = zeros
    assert len(made) >= 5  # one bucket was there
    made.clear()
    found = torch.accelerator.memory_allocated()
    assert found == used, (found, used)
    assert "step" not in vars(opt)  # the optimizer is plain, and the model has no hooks
    assert not model[0].weight._post_accumulate_grad_hooks
    smaller = Net().to(here)
    pl.distribute(smaller, torch.optim.SGD(smaller.parameters(), 0.1), unused="ignore")
    smaller(batch(rank, 0).to(here)).sum().backward()
    assert torch.isfinite(smaller.embed.weight.grad).all()


def saved_models_are_plain(here: str) -> None:
    model = Net().to(here)
    opt = torch.optim.SGD(model.parameters(), 0.1)
    pl.distribute(model, opt, unused="ignore")
    file = io.BytesIO()
    torch.save(model.embed.state_dict(), file)
    assert file.tell() < 4 * model.embed.weight.numel() + 3000  # not the whole bucket
    file.seek(0)
    loaded = torch.load(file, map_location="cpu")
    assert torch.equal(loaded["weight"], model.embed.weight.detach().cpu())


def test_checks_and_refusals(schedule):
    run_on_device(2, checks, schedule=schedule, timeout_s=200)
