"""Train the small GPT of examples/gpt with any parallelism: the mesh selects it.

python examples/mesh/train.py                            one process, the full model
paceline run --mesh tp=2 examples/mesh/train.py          each worker has half of the large matrices
paceline run --mesh pp=2 examples/mesh/train.py          each worker has some of the layers
paceline run --mesh fsdp=2 examples/mesh/train.py        each worker has half of everything
paceline run --mesh dp=2,tp=2 --pace local:4 examples/mesh/train.py    two copies in halves
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import paceline as pl
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpt"))
from before import GPT, load


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Return the cross-entropy of the next letters, in nats."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--chars", type=int, default=100_000, help="how much of the book to read")
    parser.add_argument("--schedule", default="1f1b", help="of pp")
    parser.add_argument("--save", metavar="FILE", help="write the whole model at the end")
    options = parser.parse_args()
    pl.init()
    torch.manual_seed(0)

    train_set, test, alphabet = load(options.chars)
    train = DataLoader(train_set, options.batch_size, shuffle=True)
    model = GPT(len(alphabet))
    num_elements = sum(param.numel() for param in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = pl.distribute(
        model,
        optimizer,
        loss=loss_of,
        max_norm=1.0,
        example=test[: options.batch_size, :-1],
        schedule=options.schedule,
    )
    mine = sum(param.numel() for group in optimizer.param_groups for param in group["params"])
    print(f"{mine} of {num_elements} parameters are here")

    for epoch in range(options.epochs):
        for (windows,) in pl.shard(train, epoch=epoch):
            loss = model.train_step(windows[:, :-1], windows[:, 1:])
        with torch.no_grad(), model.agreed():
            test_loss = loss_of(model(test[:, :-1]), test[:, 1:])
        print(f"epoch {epoch + 1}: loss {float(loss):.4f}, test loss {float(test_loss):.4f}")
    whole = model.state_dict()  # collective: every process of a unit calls it
    if options.save and pl.rank() == 0:
        torch.save(whole, options.save)
        print(f"{options.save}: {len(whole)} tensors of the whole model")


if __name__ == "__main__":
    main()
