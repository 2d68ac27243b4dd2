"""pl.Trainer computes the bits of the same loop written by hand, at every pace in lockstep: with
clipping, accumulation, schedulers, dropout and half precision; and so does one that was resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.comm.group import Group
from support import run_ranks

EPOCHS, SAMPLES, BATCH = 3, 62, 4  # the last batch is smaller, and so is the last group of batches

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"max_norm": 0.5},
    "accumulated": {"accumulate": 3},
    "by step": {"every": "step"},
    "all": {"max_norm": 0.5, "accumulate": 3, "every": "step"},
    "bf16": {"precision": "bf16", "max_norm": 0.5},
    "fp16": {"precision": "fp16", "max_norm": 0.5, "accumulate": 2},
    "local": {"pace": "local:2", "accumulate": 2},
}


def make() -> tuple[nn.Module, torch.optim.Optimizer, Any, DataLoader[Any]]:
    torch.manual_seed(7)
    layers = (nn.Linear(6, 24), nn.BatchNorm1d(24), nn.Dropout(0.3), nn.ReLU(), nn.Linear(24, 3))
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    random = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 6, generator=random)
    y = torch.randint(3, (SAMPLES,), generator=random)
    loader = DataLoader(TensorDataset(x, y), BATCH, shuffle=True)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7), loader


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    found: dict[str, Any] = {n: v.clone() for n, v in model.state_dict().items()}
    found["rate"] = optimizer.param_groups[0]["lr"]
    for number, state in optimizer.state_dict()["state"].items():
        found.update({f"{number} {name}": value.clone() for name, value in state.items()})
    return found


def by_hand(
    pace: str = "allreduce",
    max_norm: float | None = None,
    accumulate: int = 1,
    every: str = "epoch",
    precision: str = "fp32",
) -> tuple[dict[str, Any], list[float]]:
    """Train as a careful person would write it."""
    model, optimizer, scheduler, loader = make()
    model, optimizer = pl.distribute(model, optimizer, pace=pace, precision=precision)
    scaler = pl.GradScaler(enabled=precision == "fp16")
    torch.manual_seed(50 + pl.rank())
    losses = []
    for epoch in pl.epochs(EPOCHS):
        batches = pl.shard(loader, epoch=epoch)
        for number, (x, y) in enumerate(batches):
            if number % accumulate == 0:
                optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            losses.append(float(loss.detach()))
            part = loss / accumulate if accumulate > 1 else loss
            if (number + 1) % accumulate and number + 1 < len(batches):
                with model.no_sync():  # type: ignore[operator]
                    scaler.scale(part).backward()
                continue
            scaler.scale(part).backward()
            if max_norm is not None:
                scaler.unscale_(optimizer)
                pl.clip_grad_norm_(model, max_norm)
            scaler.step(optimizer)
            scaler.update()
            if every == "step":
                scheduler.step()
        if every == "epoch":
            scheduler.step()
    return state_of(model, optimizer), losses


class Losses(pl.Callback):
    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, batch: Any, loss: float) -> None:
        self.found.append(loss)


def with_trainer(
    case: dict[str, Any], checkpoint: Any = None, epochs: int = EPOCHS
) -> tuple[dict[str, Any], list[float], pl.Trainer]:
    options = dict(case)
    model, optimizer, scheduler, loader = make()
    losses = Losses()
    trainer = pl.Trainer(
        model,
        optimizer,
        F.cross_entropy,
        scheduler=scheduler,
        scheduler_every=options.pop("every", "epoch"),
        callbacks=[losses],
        checkpoint=checkpoint,
        **options,
    )
    torch.manual_seed(50 + pl.rank())
    trainer.fit(loader, epochs)
    return state_of(model, optimizer), losses.found, trainer


def require_equal(found: dict[str, Any], expected: dict[str, Any], what: str) -> None:
    assert found.keys() == expected.keys(), what
    for name, value in expected.items():
        is_equal = torch.equal(found[name], value) if name != "rate" else found[name] == value
        assert is_equal, f"{what}: {name}"


def compare(group: Group, names: list[str], pace: str | None) -> None:
    for name in names:
        case = {**CASES[name], **({} if pace is None else {"pace": pace})}
        expected, losses = by_hand(**case)
        found, mine, trainer = with_trainer(case)
        require_equal(found, expected, f"rank {group.rank}, {name}")
        # A batch that counts a third is told as if it had been computed alone.
        assert mine == pytest.approx(losses, rel=1e-6), name
        per_epoch = -(-len(losses) // EPOCHS)
        groups = -(-per_epoch // case.get("accumulate", 1))
        left_out = name == "fp16"  # the first step, whose loss is scaled too much
        assert trainer.step == EPOCHS * groups - left_out, name


@pytest.mark.parametrize("workers", [1, 2])
def test_the_bits_are_those_of_the_loop(workers: int) -> None:
    run_ranks(workers, compare, list(CASES), None, timeout_s=110)


@pytest.mark.parametrize("workers", [1, 2])
def test_the_same_through_a_server(workers: int) -> None:
    names = ["plain", "all", "bf16"]
    run_ranks(workers, compare, names, "ps", servers=1, timeout_s=110)


def train(group: Group, case: dict[str, Any], checkpoint: Any, epochs: int) -> dict[str, Any]:
    found, losses, trainer = with_trainer(case, checkpoint, epochs)
    return {
        "state": found,
        "batches": len(losses),
        "steps": trainer.step,
        "losses": [row["loss"] for row in trainer.history],
    }


# Steps of an epoch: 16 alone and 8 for each of two; 6 and 3 with three batches each.
@pytest.mark.parametrize(
    ("workers", "case", "every"), [(1, "all", 7), (2, "all", 5), (2, "plain", 13)]
)
def test_a_resumed_trainer_comes_to_the_same_bits(
    workers: int, case: str, every: int, tmp_path: Path
) -> None:
    whole = run_ranks(workers, train, CASES[case], None, EPOCHS)
    checkpoint = {"directory": str(tmp_path / "saved"), "every": every}
    before = run_ranks(workers, train, CASES[case], checkpoint, 2)
    names = [path.name for path in (tmp_path / "saved").glob("step-*")]
    saved_at = int(max(names).removeprefix("step-"))
    assert saved_at == before[0]["steps"] // every * every
    after = run_ranks(workers, train, CASES[case], checkpoint, EPOCHS)
    for rank in range(workers):
        require_equal(after[rank]["state"], whole[rank]["state"], f"rank {rank} from {saved_at}")
        assert after[rank]["steps"] == whole[rank]["steps"]
        share = 1 - saved_at / whole[rank]["steps"]
        assert after[rank]["batches"] == pytest.approx(share * whole[rank]["batches"], abs=2)
        # Of the epoch in which it was saved rank 0's batches stand for all until then.
        assert len(after[rank]["losses"]) == EPOCHS
        assert after[rank]["losses"][0] == whole[rank]["losses"][0]
        assert after[rank]["losses"][-1] == whole[rank]["losses"][-1]
        if workers == 1:
            assert after[rank]["losses"] == whole[rank]["losses"]
