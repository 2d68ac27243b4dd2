"""pl.Trainer with a model on a device: the numbers of the CPU, and no wait for a batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from support.devices import load_device, run_on_device
from support.ranks import run_ranks

EPOCHS, SAMPLES, BATCH = 3, 44, 4


def loader(seed: int = 1, *, pinned: bool) -> DataLoader[Any]:
    random = torch.Generator().manual_seed(seed)
    x, y = torch.randn(SAMPLES, 6, generator=random), torch.randint(3, (SAMPLES,), generator=random)
    return DataLoader(TensorDataset(x, y), BATCH, shuffle=True, pin_memory=pinned)


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(1) == targets).double().mean()


class Waits(pl.Callback):
    """Counts waits of the script's thread in an epoch, before its averages are asked for."""

    def __init__(self, laggard: Any) -> None:
        self.laggard, self.stacks = laggard, list[str]()

    def on_train_batch_start(self, trainer: pl.Trainer, batch: Any) -> None:
        waits = self.laggard.take_synchronizations()
        begins = trainer.metrics == {} and trainer.step % 6 == 0  # the epoch before has ended here
        stacks = [wait.stack for wait in waits if not begins]
        # Waits of the script's thread; a save asks for the losses until then.
        self.stacks += [s for s in stacks if "trainer.py" in s and "saving.py" not in s]


class Losses:
    def __init__(self) -> None:
        self.all: list[float] = []

    def on_step_end(self, trainer: pl.Trainer, batch: Any, loss: float) -> None:
        assert isinstance(loss, float)
        self.all.append(loss)


class UntilEpoch(pl.Callback):
    def on_train_epoch_end(self, trainer: pl.Trainer) -> None:
        trainer.should_stop = trainer.epoch == 1 and pl.rank() == 1


def fit(device: torch.device, directory: str, **options: Any) -> dict[str, Any]:
    """Train, evaluate, stop early, and resume in another Trainer; return all numbers."""
    found: dict[str, Any] = {}
    laggard = load_device() if device.type != "cpu" else None
    for run, last in enumerate((UntilEpoch(), Losses())):
        torch.manual_seed(7)
        model = nn.Sequential(nn.Linear(6, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 3))
        model.to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        counter = [Waits(laggard)] if laggard is not None and run == 0 else []
        trainer = pl.Trainer(
            model,
            optimizer,
            F.cross_entropy,
            scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7),
            checkpoint={"directory": directory, "every": 4},
            metrics={"accuracy": accuracy},
            callbacks=[last, *counter],
            max_norm=0.5,
            update="replicated",
            **options,
        )
        pinned = laggard is not None
        result = trainer.fit(loader(pinned=pinned), EPOCHS, loader(2, pinned=pinned))
        if counter:
            assert not counter[0].stacks, counter[0].stacks[0]
        found[f"history {run}"] = list(result.history)
        found[f"evaluation {run}"] = trainer.evaluate(loader(3, pinned=pinned))
        found[f"model {run}"] = [value.cpu() for value in model.state_dict().values()]
        found[f"losses {run}"] = getattr(last, "all", [])
    return found


def test_the_trainer_has_the_numbers_of_the_cpu(schedule, tmp_path):
    def body(world, where: str, directory: str, **options: Any) -> dict[str, Any]:
        return fit(pl.device() if where else torch.device("cpu"), directory, **options)

    expected = run_ranks(2, body, "", str(tmp_path / "cpu"))
    found = run_on_device(2, body, "device", str(tmp_path / "device"), schedule=schedule)
    assert len(found[0]["losses 1"]) > 3
    for ours, theirs in zip(found, expected, strict=True):
        for name, values in theirs.items():
            if not name.startswith("model"):
                assert ours[name] == values, name
            else:
                assert all(a.equal(b) for a, b in zip(ours[name], values, strict=True)), name
