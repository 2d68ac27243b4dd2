"""Lightning, Accelerate and Transformers on workers; run by test_torch_libraries.py."""

from __future__ import annotations

import os
import sys
import tempfile

import torch
from environment import main

import paceline as pl

SIZE, BATCH = 32, 4


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SIZE, 6, generator=generator)
    return x, x[:, :1] * 2 - 0.5


def network() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def trained_alone() -> torch.nn.Module:
    """One process: batches are those of a DistributedSampler without shuffling, together."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x, y = samples()
    for first in range(0, SIZE, 2 * BATCH):
        rows = slice(first, first + 2 * BATCH)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
        optimizer.step()
    return model


def assert_same(model: torch.nn.Module, other: torch.nn.Module) -> None:
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.detach(), two.detach(), rtol=1e-5, atol=1e-6)


def _lightning(strategy, **more) -> torch.nn.Module:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network()

        def training_step(self, batch, _):
            loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.log("loss", loss, sync_dist=True, on_epoch=True)
            self.log("whole", torch.tensor(3 + 2 * self.global_rank), sync_dist=True, on_epoch=True)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.05)

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **more,
    )
    module = Module()
    dataset = torch.utils.data.TensorDataset(*samples())
    sampler = torch.utils.data.DistributedSampler(dataset, 2, pl.rank(), shuffle=False)
    loader = torch.utils.data.DataLoader(dataset, batch_size=BATCH, sampler=sampler)
    trainer.fit(module, loader)
    assert float(trainer.callback_metrics["whole"]) == 4.0
    return module.net


def lightning_strategy() -> None:
    import paceline.lightning  # noqa: F401  # registers it

    assert_same(_lightning("paceline"), trained_alone())
    assert torch.distributed.get_backend() == "paceline"


def lightning_accumulates() -> None:
    from paceline.lightning import PacelineStrategy

    net = _lightning(PacelineStrategy(), accumulate_grad_batches=2, gradient_clip_val=10.0)
    sums = pl.world().all_gather(torch.cat([p.detach().flatten() for p in net.parameters()]))
    assert torch.equal(sums[0], sums[1])


def lightning_pace() -> None:
    from paceline.lightning import PacelineStrategy

    net = _lightning(PacelineStrategy(pace="local:4"))
    sums = pl.world().all_gather(torch.cat([p.detach().flatten() for p in net.parameters()]))
    assert torch.equal(sums[0], sums[1])


def _accelerate() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert torch.distributed.get_backend() == "paceline"
    assert accelerator.num_processes == 2
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(*samples()), batch_size=BATCH, shuffle=False
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for x, y in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    assert losses[-1] < losses[0] * 1.5 and len(losses) == SIZE // BATCH // 2
    assert_same(accelerator.unwrap_model(model), trained_alone())


def accelerate_one_line() -> None:
    torch.distributed.init_process_group("paceline")
    _accelerate()


def accelerate_no_line() -> None:
    assert os.environ["PACELINE_AS_GLOO"] == "1"
    _accelerate()


def transformers_trainer() -> None:
    from transformers import Trainer, TrainingArguments

    class Regression(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = network()

        def forward(self, x, labels):
            out = self.net(x)
            return {"loss": torch.nn.functional.mse_loss(out, labels), "logits": out}

    x, y = samples()
    rows = [{"x": a, "labels": b} for a, b in zip(x, y, strict=True)]
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            output_dir=directory,
            use_cpu=True,
            per_device_train_batch_size=BATCH,
            num_train_epochs=2,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            optim="sgd",
            learning_rate=0.05,
            max_grad_norm=0.0,
        )
        trainer = Trainer(Regression(), arguments, train_dataset=rows)
        ended = trainer.train()
    assert torch.distributed.get_backend() == "paceline"
    assert ended.global_step == 2 * SIZE // BATCH // 2
    flat = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    everyone = [torch.empty_like(flat) for _ in range(2)]
    torch.distributed.all_gather(everyone, flat)
    assert torch.equal(*everyone)


CHECKS = {
    check.__name__: check
    for check in (
        lightning_strategy,
        lightning_accumulates,
        lightning_pace,
        accelerate_one_line,
        accelerate_no_line,
        transformers_trainer,
    )
}

if __name__ == "__main__":
    if sys.argv[1].startswith("lightning"):
        pl.init()
    main(CHECKS)
