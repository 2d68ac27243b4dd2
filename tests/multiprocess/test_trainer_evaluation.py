"""Evaluation of a Trainer: the model that all workers agree on, and each sample once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.comm.group import Group
from support import run_ranks


def data(count: int, seed: int = 3) -> TensorDataset:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=random)
    return TensorDataset(x, (x[:, :3]).argmax(1))


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(1) == targets).float().mean()


def share_of_zeros(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    return float((targets == 0).float().mean())  # a float will do


METRICS = {"accuracy": accuracy, "zeros": share_of_zeros}


def make(norm: type[nn.Module] = nn.BatchNorm1d, **options: Any) -> pl.Trainer:
    torch.manual_seed(5)
    layers = (nn.Linear(6, 16), norm(16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 3))
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return pl.Trainer(model, optimizer, F.cross_entropy, metrics=METRICS, **options)


def by_hand(model: nn.Module, samples: TensorDataset) -> dict[str, float]:
    """All samples in one batch, in this process."""
    x, y = samples.tensors
    with torch.no_grad():
        outputs = model(x)
    found = {"loss": F.cross_entropy(outputs, y), "accuracy": accuracy(outputs, y)}
    return {**{n: float(v) for n, v in found.items()}, "zeros": share_of_zeros(outputs, y)}


def counts(group: Group) -> None:
    """Loaders of which workers get different numbers of batches, also none."""
    trainer = make()
    trainer.fit(DataLoader(data(36), 4, shuffle=True), epochs=1)
    model = trainer.model
    model[2].eval()  # a mode of its own, which must stay
    modes = [module.training for module in model.modules()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for count, size in [(1, 4), (2, 1), (17, 4), (23, 5), (40, 40)]:
        samples = data(count, seed=count)
        found = trainer.evaluate(DataLoader(samples, size))
        copy = torch.nn.Sequential(*model)
        copy.eval()
        expected = by_hand(copy, samples)
        for module, mode in zip(model.modules(), modes, strict=True):
            module.training = mode
        assert found == pytest.approx(expected, rel=1e-5), (count, size)
    trainer.evaluate(DataLoader(samples, 3))
    assert [module.training for module in model.modules()] == modes
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("workers", [1, 3])
def test_each_sample_counts_once(workers: int) -> None:
    run_ranks(workers, counts)


def stands_for_all(group: Group, pace: str) -> dict[str, Any]:
    trainer = make(nn.LayerNorm, pace=pace)  # without buffers, which may be each worker's own
    result = trainer.fit(DataLoader(data(44), 4, shuffle=True), 2, DataLoader(data(23), 4))
    samples = data(31, seed=9)
    found = trainer.evaluate(DataLoader(samples, 5))
    own = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    group.barrier()
    trainer.model.pull()  # type: ignore[operator]
    with trainer.model.agreed():  # type: ignore[operator]
        copy = torch.nn.Sequential(*trainer.model).eval()
        expected = by_hand(copy, samples)
    return {"found": found, "expected": expected, "history": result.history, "own": own}


@pytest.mark.parametrize(
    ("pace", "servers"),
    [("allreduce", 0), ("local:7", 0), ("diloco:4", 0), ("ps", 1), ("async", 1), ("ssp:2", 1)],
)
def test_the_model_that_stands_for_all_is_evaluated(pace: str, servers: int) -> None:
    first, second = run_ranks(2, stands_for_all, pace, servers=servers, timeout_s=100)
    assert first["found"] == second["found"], "all workers get the same"
    assert first["history"] == second["history"]
    assert set(first["history"][0]) == {
        *("epoch", "loss", "val_loss", "val_accuracy", "val_zeros"),
    }
    assert first["found"] == pytest.approx(first["expected"], rel=1e-5)
    if pace == "local:7":
        assert any(not torch.equal(v, second["own"][n]) for n, v in first["own"].items()), (
            "after an evaluation each worker continues with its own"
        )


def epoch_averages(group: Group) -> list[float]:
    """The loss of an epoch, where the last batches are of different sizes, and one is a repeat."""
    torch.manual_seed(1)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # so that it stays what it is
    trainer = pl.Trainer(model, optimizer, F.cross_entropy)
    return [
        trainer.fit(DataLoader(data(count), 4, shuffle=True)).history[0]["loss"]
        for count in (13, 16, 17, 25)
    ]


def test_averages_of_epochs_are_those_over_samples() -> None:
    (alone,) = run_ranks(1, epoch_averages)
    for found in run_ranks(3, epoch_averages):
        assert found == pytest.approx(alone, rel=1e-5)


def in_parts(group: Group, mesh: str) -> dict[str, Any]:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    trainer = pl.Trainer(
        *(model, optimizer, F.cross_entropy),
        mesh=mesh,
        metrics=METRICS,
        accumulate=2,
        max_norm=1.0,
        example=torch.randn(8, 6),
    )
    size = 4 if mesh.startswith("fsdp") else 8
    result = trainer.fit(DataLoader(data(47), size, shuffle=True), 2, DataLoader(data(21), 4))
    state = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    return {"history": result.history, "state": state}


@pytest.mark.parametrize("mesh", ["pp=2", "tp=2", "fsdp=2"])
def test_a_model_in_parts_trains_and_is_evaluated_as_a_whole_one(mesh: str) -> None:
    (alone,) = run_ranks(1, in_parts, "dp=1")
    for found in run_ranks(2, in_parts, mesh, timeout_s=100):
        for row, expected in zip(found["history"], alone["history"], strict=True):
            assert row == pytest.approx(expected, rel=1e-4)
        for name, value in alone["state"].items():
            torch.testing.assert_close(found["state"][name], value, rtol=1e-4, atol=1e-5)
