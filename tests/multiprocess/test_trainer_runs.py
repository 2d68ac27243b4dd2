"""A script with a Trainer as a user starts it: stopped by callbacks, by SIGTERM, and resumed."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from run_support import Workbench
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.comm.group import Group
from support import run_ranks


@pytest.fixture
def bench(tmp_path: Path) -> Workbench:
    return Workbench(tmp_path)


# -- callbacks that stop ----------------------------------------------------------------------


def make(**options: Any) -> tuple[pl.Trainer, DataLoader[Any]]:
    torch.manual_seed(2)
    data = TensorDataset(torch.randn(320, 4), torch.randn(320, 1))
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return pl.Trainer(model, optimizer, F.mse_loss, **options), DataLoader(data, 2, shuffle=True)


class StopsAt(pl.Callback):
    """Requests a stop after a step, on one worker only."""

    def __init__(self, step: int, rank: int) -> None:
        self.step, self.rank, self.seen = step, rank, []

    def on_train_batch_end(self, trainer: pl.Trainer, batch: Any, loss: float) -> None:
        if trainer.step >= self.step and pl.rank() == self.rank:
            trainer.should_stop = True

    def on_train_epoch_end(self, trainer: pl.Trainer) -> None:
        self.seen.append(trainer.epoch)


def stop(group: Group, pace: str, step: int, rank: int) -> Any:
    callback = StopsAt(step, rank)
    trainer, loader = make(pace=pace, callbacks=[callback])
    result = trainer.fit(loader, epochs=4)
    assert result.has_stopped and trainer.should_stop
    stopped_at = trainer.step
    again = trainer.fit(loader, epochs=0)
    assert not again.has_stopped and not trainer.should_stop
    return stopped_at, callback.seen, [row["epoch"] for row in result.history]


# 80 steps of two workers in an epoch, 160 alone.
@pytest.mark.parametrize(
    ("workers", "pace", "servers", "step", "expected"),
    [
        (1, "allreduce", 0, 5, (5, [0], [0])),  # at once
        (2, "allreduce", 0, 5, (16, [0], [0])),  # when they next ask each other
        (2, "allreduce", 0, 85, (96, [0, 1], [0, 1])),
        (2, "ps", 1, 20, (32, [0], [0])),
        (2, "local:8", 0, 20, (80, [0], [0])),  # at the end of the epoch
        (2, "async", 1, 85, (160, [0, 1], [0, 1])),
    ],
)
def test_all_workers_stop_after_the_same_step(
    workers: int, pace: str, servers: int, step: int, expected: Any
) -> None:
    found = run_ranks(workers, stop, pace, step, workers - 1, servers=servers)
    assert found == [expected] * workers


def stop_on_validation(group: Group, directory: str) -> Any:
    class Enough(pl.Callback):
        best, bad = float("inf"), 0

        def state_dict(self) -> dict[str, float]:
            return {"best": self.best, "bad": self.bad}

        def load_state_dict(self, state: dict[str, float]) -> None:
            self.__dict__.update(state)

        def on_evaluate(self, trainer: pl.Trainer) -> None:
            self.best = min(self.best, trainer.metrics["val_loss"])
            self.bad += 1
            trainer.should_stop = self.bad == 2

    enough = Enough()
    trainer, loader = make(callbacks=[enough], checkpoint=directory)
    result = trainer.fit(loader, epochs=5, val_loader=loader)
    return [row["epoch"] for row in result.history], result.has_stopped, enough.bad, trainer.step


def test_a_run_that_had_stopped_is_not_taken_up_again(tmp_path: Path) -> None:
    for _ in range(2):  # the second finds the checkpoint of the first
        found = run_ranks(2, stop_on_validation, str(tmp_path / "saved"))
        assert found == [([0, 1], True, 2, 160)] * 2


def fit_twice(group: Group, directory: str, fails_in: int) -> Any:
    class Fails(pl.Callback):
        def on_train_epoch_start(self, trainer: pl.Trainer) -> None:
            if trainer.epoch == fails_in:
                raise KeyError("on purpose")

        def on_exception(self, trainer: pl.Trainer, error: BaseException) -> None:
            errors.append(str(error))

    errors: list[str] = []
    trainer, loader = make(callbacks=[Fails()], checkpoint=directory)
    try:
        trainer.evaluate(loader)  # the initial model, also in a resumed run
        first = trainer.fit(loader, epochs=2)
        between = trainer.evaluate(loader)
        second = trainer.fit(loader, epochs=2)
    except KeyError:
        return errors
    epochs = [[row["epoch"] for row in result.history] for result in (first, second)]
    state = trainer.model.state_dict()
    return epochs, trainer.step, between["loss"], state["weight"].clone(), second.history


@pytest.mark.parametrize("fails_in", [1, 2, 3])
def test_a_second_fit_goes_on_also_in_a_run_that_is_resumed(tmp_path: Path, fails_in: int) -> None:
    whole = run_ranks(2, fit_twice, str(tmp_path / "whole"), -1)
    errors = run_ranks(2, fit_twice, str(tmp_path / "saved"), fails_in)
    assert errors == [["'on purpose'"]] * 2
    resumed = run_ranks(2, fit_twice, str(tmp_path / "saved"), -1)
    for expected, found in zip(whole, resumed, strict=True):
        assert found[0][1] == expected[0][1] == [2, 3]
        assert found[1] == expected[1] == 320
        assert torch.equal(found[3], expected[3])
        assert found[4] == expected[4]
        if fails_in > 2:  # between the fits nothing is done again
            assert found[2] != found[2]
        else:
            assert found[2] == expected[2]


# -- as a user starts it ----------------------------------------------------------------------

_SCRIPT = """
    import json, os, sys, time
    import torch
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, TensorDataset
    import paceline as pl

    class Slowly(pl.Callback):
        def on_train_batch_end(self, trainer, batch, loss):
            if trainer.step == 3:
                open(f"pid-{os.environ['PACELINE_RANK']}", "w").write(f"{os.getpid()}\\n")
            time.sleep(float(sys.argv[1]))

    torch.manual_seed(3)
    data = TensorDataset(torch.randn(400, 4), torch.randn(400, 1))
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
    trainer = pl.Trainer(
        model, optimizer, F.mse_loss, scheduler=scheduler, scheduler_every="step",
        callbacks=[Slowly()], checkpoint=sys.argv[2] if sys.argv[2:] else None,
        accumulate=2, metrics={"error": F.l1_loss},
    )
    loader = DataLoader(data, 2, shuffle=True)
    result = trainer.fit(loader, epochs=2, val_loader=DataLoader(data, 7))
    end = {
        "steps": result.steps,
        "rate": optimizer.param_groups[0]["lr"],
        "weight": model.weight.tolist(),
        "history": list(result.history),
    }
    print("the end is", json.dumps(end))
"""


def _ends(output: str) -> list[dict[str, Any]]:
    return [json.loads(found) for found in re.findall(r"the end is (\{.*\})", output)]


def test_sigterm_saves_and_the_next_run_goes_on(bench: Workbench) -> None:
    script = bench.script(_SCRIPT)
    with bench.started("run", "-n", "2", "--log-dir", "none", script, "0.06", "saved") as launcher:
        bench.wait_for_files("pid-0", "pid-1")
        launcher.send_signal(signal.SIGTERM)
        _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 75, errors
    assert "saved and stopped" in errors and "Traceback" not in errors
    (path,) = (bench.path / "saved").glob("step-*")
    assert 3 <= int(path.name.removeprefix("step-")) < 50, "in the middle of the first epoch"
    done = bench.run("run", "-n", "2", "--log-dir", "none", script, "0", "saved")
    assert done.returncode == 0, done.stderr
    assert f"resumes from saved/{path.name}" in done.stderr
    first, second = _ends(done.stdout)
    assert first == second and first["steps"] == 100
    assert first["rate"] == pytest.approx(1e-2 * 0.99**100)
    assert [row["epoch"] for row in first["history"]] == [0, 1]
