"""precision="bf16" and "fp16": what the model computes in, what stays float32, what travels."""

from __future__ import annotations

import copy
import os
import pickle
import signal
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline as pl
from paceline.comm.group import Group
from paceline.data_parallel.amp import mixed_precision as half_products
from paceline.data_parallel.amp.mixed_precision import probe_matmul
from paceline.errors import UsageError
from paceline.runtime.job import current
from support import run_ranks

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Net(nn.Module):
    """Says in which dtype its layers computed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(8, 300), nn.LayerNorm(300), nn.Linear(300, 3)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        hidden = self.first(x)
        self.computed = hidden.dtype
        hidden = F.relu(self.norm(hidden))
        return {"logits": self.last(hidden), "labels": x.argmax(1), "name": "net"}


def task(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    chance = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(32, 8, generator=chance)
    return x, x[:, :3].argmax(1)


def train(group: Group, precision: str, pace: str, steps: int = 60, **options: Any) -> float:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    pl.distribute(model, optimizer, pace=pace, precision=precision, **options)
    scaler = pl.GradScaler(enabled=precision == "fp16")
    losses = []
    for step in range(steps):
        x, y = task(group.rank, step)
        optimizer.zero_grad()
        logits = model(x)["logits"]
        assert logits.dtype is torch.float32
        loss = F.cross_entropy(logits, y)
        scaler.scale(loss).backward()
        assert all(param.grad.dtype is torch.float32 for param in model.parameters())
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert model.computed is DTYPES[precision]
    assert all(value.dtype is torch.float32 for value in model.state_dict().values())
    states = optimizer.state_dict()["state"].values()
    assert all(value.dtype is torch.float32 for state in states for value in state.values())
    return sum(losses[-5:]) / sum(losses[:5])


# -- training -------------------------------------------------------------------------------------


def converge(group: Group, paces: tuple[str, ...]) -> None:
    for pace in paces:
        for precision in ("bf16", "fp16"):
            ratio = train(group, precision, pace)
            print(pace, precision, ratio, flush=True)
            assert ratio < 0.5, (pace, precision, ratio)


def test_training_converges_without_servers() -> None:
    paces = ("allreduce[update=replicated]", "allreduce[update=sharded]", "local:4", "partial:0.5")
    run_ranks(2, converge, paces)


def test_training_converges_through_servers() -> None:
    run_ranks(2, converge, ("ps", "async", "ssp:2"), servers=1)


# -- how it is asked for --------------------------------------------------------------------------


WIDTH = 512  # one layer of 1 MB


def sent_in_a_step(_: Group, how: Any, **given: Any) -> tuple[float, torch.dtype]:
    """Return the bytes that a step sends over the network, as a part of the parameters' own, and
    the dtype in which the layer computed."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))
    seen = []
    model[0].register_forward_hook(lambda _module, _inputs, output: seen.append(output.dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    pl.distribute(model, optimizer, **given)
    before = current().fabric.engine.bytes_sent()[1]
    for _ in range(4):
        loss = model(torch.randn(2, WIDTH)).square().mean()
        how.scale(loss).backward()
        how.step(optimizer)
        how.update()
        optimizer.zero_grad()
    sent = current().fabric.engine.bytes_sent()[1] - before
    return round(sent / 4 / (WIDTH * WIDTH * 4), 1), seen[0]


def ask(group: Group) -> None:
    """Two workers, and a server on another host."""
    off, ours = torch.amp.GradScaler("cpu", enabled=False), pl.GradScaler()
    full, bf16, fp16 = torch.float32, torch.bfloat16, torch.float16
    for pace in ("ps", "async", "ssp:2", "backup:1"):
        assert sent_in_a_step(group, off, pace=pace) == (1.0, full), pace
        assert sent_in_a_step(group, off, pace=pace, precision="bf16") == (0.5, bf16), pace
        assert sent_in_a_step(group, ours, pace=pace, precision="fp16") == (0.5, fp16), pace
    # What is given counts.
    assert sent_in_a_step(group, off, pace="ps[precision=bf16,wire=fp32]") == (1.0, bf16)
    assert sent_in_a_step(group, off, pace="ps", wire="bf16") == (0.5, full)
    assert sent_in_a_step(group, ours, pace="ps[server_dtype=bf16,precision=fp16]") == (0.5, fp16)
    # In brackets it wins over a keyword, in the environment over both.
    given = {"pace": "ps[precision=fp16]", "precision": "bf16"}
    assert sent_in_a_step(group, ours, **given) == (0.5, fp16)
    os.environ["PACELINE_PRECISION"] = "fp32"
    assert sent_in_a_step(group, off, **given) == (1.0, full)


def test_the_wire_follows() -> None:
    run_ranks(2, ask, servers=1, hosts=[0, 0, 1])


# -- what is refused ------------------------------------------------------------------------------


def refuse(group: Group) -> None:
    def distribute(model: nn.Module, **given: Any) -> None:
        pl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), **given)

    with pytest.raises(UsageError, match=r"'bf61' is unknown \(did you mean bf16\?\).*fp32, bf16"):
        distribute(Net(), precision="bf61")
    with pytest.raises(UsageError, match=r"did you mean fp16"):
        distribute(Net(), pace="allreduce[precision=fp61]")
    for model in (Net().bfloat16(), Net().half(), Net().double()):
        with pytest.raises(UsageError, match=r"first.weight is .*model.float\(\)"):
            distribute(model, precision="bf16")
    # One rank alone asks for it.
    with pytest.raises(pl.PacelineError, match="bf16"):
        distribute(Net(), **({"precision": "bf16"} if group.rank else {}))


def test_what_is_refused() -> None:
    run_ranks(2, refuse)


# -- scripts --------------------------------------------------------------------------------------


def scripts(group: Group) -> None:
    x, y = task(group.rank, 0)
    model = Net()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pl.distribute(model, optimizer, precision="bf16")

    output = model(x)
    assert output["name"] == "net" and output["labels"].dtype is torch.int64
    with torch.autocast("cpu", torch.bfloat16):
        expected = plain(x)["logits"]
    assert torch.equal(output["logits"], expected.float())

    # The script's own autocast is closer; inside of the model one can be switched off.
    with torch.autocast("cpu", torch.float16):
        assert model(x)["logits"].dtype is torch.float16 and model.computed is torch.float16
    assert not torch.is_autocast_enabled("cpu")
    with torch.no_grad():
        assert model(x)["logits"].dtype is torch.float32 and model.computed is torch.bfloat16
    with pytest.raises(RuntimeError):
        model(x[:, :3])
    assert not torch.is_autocast_enabled("cpu")

    # Copies are plain models, and so is what is saved.
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        again(x)
        assert again.computed is torch.float32
    assert list(model.state_dict()) == list(plain.state_dict())

    # A forward of the instance's own stays.
    odd = Net()
    odd.forward = lambda x: odd.first(x)
    pl.distribute(odd, torch.optim.SGD(odd.parameters(), lr=0.1), precision="bf16", unused="ignore")
    assert odd(x).dtype is torch.float32 and odd(x).shape == (32, 300)
    # A model that is one large layer.
    large = nn.Linear(300, 300)
    pl.distribute(large, torch.optim.SGD(large.parameters(), lr=0.1), precision="bf16")
    large(torch.randn(4, 300)).sum().backward()
    assert large.weight.grad.dtype is torch.float32


def schedules(group: Group) -> None:
    """Each phase computes in the precision that it names."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pace = "allreduce[precision=bf16]@0, local:2@2, allreduce[precision=fp16]@4"
    pl.distribute(model, optimizer, pace=pace)
    seen = []
    for step in range(6):
        x, y = task(group.rank, step)
        F.cross_entropy(model(x)["logits"], y).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(model.computed)
    assert seen == [dtype for dtype in (torch.bfloat16, torch.float32, torch.float16) for _ in "12"]
    pl.check_consistency(model)


def compiled(group: Group) -> None:
    x, y = task(group.rank, 0)
    for first in (True, False):
        torch.compiler.reset()
        inner = nn.Sequential(nn.Linear(8, 300), nn.Tanh(), nn.Linear(300, 3))
        optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
        compile = lambda m: torch.compile(m, backend="aot_eager", fullgraph=True)  # noqa: E731
        model = compile(inner) if first else inner
        pl.distribute(model, optimizer, precision="bf16", update="replicated")
        called = model if first else compile(inner)
        expected = copy.deepcopy(inner)
        with torch.autocast("cpu", torch.bfloat16):
            logits = expected(x)
        found = called(x)
        assert found.dtype is torch.float32
        torch.testing.assert_close(found, logits.float(), rtol=0.02, atol=0.02)
        F.cross_entropy(found, y).backward()
        optimizer.step()
        pl.check_consistency(inner)


@pytest.mark.parametrize("body", [scripts, schedules, compiled], ids=lambda body: body.__name__)
def test_scripts(body: Any) -> None:
    run_ranks(2, body)


# -- products that end a process ------------------------------------------------------------------


def try_products(_: Group, used_before: bool) -> tuple[str, str]:
    """Multiply as a model would; a process that may not ends here with SIGILL."""
    if used_before:
        nn.Conv2d(3, 8, 3)(torch.ones(1, 3, 9, 9))
        nn.Linear(64, 64)(torch.ones(64, 64))
    support = probe_matmul(torch.bfloat16)
    assert probe_matmul(torch.bfloat16) is support
    with pytest.raises(ChildProcessError):  # nobody is left behind
        os.waitpid(-1, os.WNOHANG)
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    pl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), precision="bf16")
    model(torch.randn(64, 256)).sum().backward()
    assert model[0].weight.grad.abs().sum() > 0
    return support.wrong, getattr(support.remedy, "__name__", "none")


def test_products_are_tried_where_a_crash_does_no_harm() -> None:
    for used_before, remedy in ((False, "limit_onednn"), (True, "switch_onednn_off")):
        ((wrong, found),) = run_ranks(1, try_products, used_before)
        assert found == (remedy if wrong else "_change_nothing")
    limited = run_ranks(1, try_products, True, env={"ONEDNN_MAX_CPU_ISA": "AVX2"})
    assert limited == [("", "_change_nothing")]


def die(_: torch.dtype) -> None:
    os.kill(os.getpid(), signal.SIGILL)


def hang(_: torch.dtype) -> None:
    signal.pause()


def fail(_: torch.dtype) -> None:
    raise TypeError("autocast of this torch computes in something else")


def nothing_helps(_: Group) -> None:
    for product, what in ((die, "SIGILL"), (hang, "did not end"), (fail, "something else")):
        half_products._PATIENCE_S = 0.5 if product is hang else 20.0
        half_products._multiply = product  # as a processor would that we do not have
        half_products.probe_matmul.cache_clear()
        model = Net()
        with pytest.raises(UsageError, match=f"{what}.* use precision=bf16 or fp32"):
            pl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), precision="fp16")


def test_a_machine_that_cannot_do_it() -> None:
    run_ranks(1, nothing_helps)
