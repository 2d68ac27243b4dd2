"""Arguments that pl.Trainer refuses, with errors that say what to do; one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import paceline as pl
from paceline.errors import DataError, UsageError
from support import run_ranks


def parts():
    model = nn.Linear(4, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def pairs(count=2):
    return [(torch.ones(3, 4), torch.ones(3, 2))] * count


def refuse(text, *arguments, kind=UsageError, **options):
    with pytest.raises(kind, match=text):
        pl.Trainer(*arguments, **options)


def settings(group):
    model, optimizer = parts()
    other = nn.Linear(4, 2)
    mse = F.mse_loss
    refuse("expected either loss_fn", model, optimizer)
    refuse("expected either loss_fn", model, optimizer, mse, step_fn=mse)
    refuse("loss_fn='mse'.*expected a function", model, optimizer, "mse")
    refuse("is called loss_fn", model, optimizer, loss=mse)
    refuse("no argument 'calbacks' .did you mean callbacks", model, optimizer, mse, calbacks=[])
    refuse("has no option 'colour'", model, optimizer, mse, colour="red")
    refuse("pace 'sometimes'", model, optimizer, mse, pace="sometimes")
    refuse("accumulate=0: expected a whole number, 1 or more", model, optimizer, mse, accumulate=0)
    refuse("accumulate=2.0", model, optimizer, mse, accumulate=2.0)
    refuse("max_norm=-1.: expected a number above 0", model, optimizer, mse, max_norm=-1)
    refuse("scheduler_every='batch'", model, optimizer, mse, scheduler_every="batch")
    refuse("it has no step", model, optimizer, mse, scheduler=object())
    foreign = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(other.parameters(), 0.1), 1)
    refuse("belongs to another optimizer", model, optimizer, mse, scheduler=foreign)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    every = {"scheduler_every": "step"}
    refuse("follows the loss of epochs", model, optimizer, mse, scheduler=plateau, **every)
    refuse("expected functions by name", model, optimizer, mse, metrics=[mse])
    refuse("'loss': ...}.: expected another name", model, optimizer, mse, metrics={"loss": mse})
    refuse("'f1 score'", model, optimizer, mse, metrics={"f1 score": mse})
    refuse("expected a function of outputs", model, optimizer, mse, metrics={"f1": 1.0})
    refuse("expected a directory", model, optimizer, mse, checkpoint=3)
    refuse('"directory" is missing', model, optimizer, mse, checkpoint={"every": 3})
    others = torch.optim.SGD(other.parameters(), lr=0.1)
    refuse("is not a parameter of this model", model, others, mse)
    refuse("expected a torch.nn.Module", [], optimizer, mse)
    refuse("with pp no process has the full", model, optimizer, step_fn=mse, mesh="pp=2")


def checkpoints(group, directory):
    model, optimizer = parts()
    made = pl.Checkpoint(directory)
    text = "a Checkpoint is created after pl.distribute"
    refuse(text, model, optimizer, F.mse_loss, checkpoint=made)


def models(group):
    model, optimizer = parts()
    pl.Trainer(model, optimizer, F.mse_loss)
    again = torch.optim.SGD(model.parameters(), lr=0.1)
    refuse("distributed already, which the Trainer does", model, again, F.mse_loss)


class Numbers(IterableDataset):
    def __iter__(self):
        return iter([(torch.ones(4), torch.ones(2))] * 10)


def loaders(group):
    def trainer(loss_fn=F.mse_loss, **options):
        return pl.Trainer(*parts(), loss_fn, **options)

    with pytest.raises(UsageError, match="epochs=-1: expected a whole number, 0 or more"):
        trainer().fit(pairs(), epochs=-1)
    with pytest.raises(UsageError, match="epochs=2.5"):
        trainer().fit(pairs(), epochs=2.5)
    with pytest.raises(DataError, match="no batch at all"):
        trainer().fit([])
    empty = DataLoader(TensorDataset(torch.ones(0, 4), torch.ones(0, 2)), batch_size=2)
    with pytest.raises(DataError, match="pl.shard"):
        trainer().fit(empty)
    with pytest.raises(UsageError, match="expected a DataLoader or an iterable"):
        trainer().fit(3)
    with pytest.raises(UsageError, match="a batch is a dict.*step_fn"):
        trainer().fit([{"x": torch.ones(1)}])
    with pytest.raises(UsageError, match="a batch is a tuple of 3"):
        trainer().fit([(torch.ones(1), 2, 3)])
    with pytest.raises(UsageError, match=r"shape \[3, 2\].*take its mean"):
        trainer(lambda o, t: (o - t) ** 2).fit(pairs())
    with pytest.raises(UsageError, match="returned a float, expected the mean"):
        trainer(lambda o, t: float((o - t).mean().detach())).fit(pairs())
    with pytest.raises(UsageError, match="depends on no parameter"):
        trainer(lambda o, t: (t - 1).mean()).fit(pairs())
    with pytest.raises(UsageError, match=r"metric odd returned a tensor of shape \[3, 2\]"):
        trainer(metrics={"odd": lambda o, t: o}).evaluate(pairs())
    by_step = {"step_fn": lambda m, b: F.mse_loss(m(b[0]), b[1])}
    with pytest.raises(UsageError, match="return .loss, outputs, targets."):
        trainer(None, **by_step, metrics={"odd": F.l1_loss}).evaluate(pairs())
    # Nothing is wrong with a loader without a length, also if steps have several batches.
    done = trainer(accumulate=4)
    assert done.fit(DataLoader(Numbers(), batch_size=1), epochs=2).steps == 6
    assert done.fit(pairs(), epochs=0).history == []


def test_settings():
    run_ranks(1, settings)


def test_a_checkpoint_that_was_made_too_early(tmp_path):
    run_ranks(1, checkpoints, str(tmp_path))


def test_a_model_that_is_distributed_already():
    run_ranks(1, models)


def test_loaders_batches_and_losses():
    run_ranks(1, loaders)
