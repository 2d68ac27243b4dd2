"""Train a model that no process holds completely: each process has a shard.

    paceline run -n 2 examples/too_large/train.py                half of the model each
    paceline run -n 2 examples/too_large/train.py --mesh pp=2    half of the layers each
    paceline run -n 4 examples/too_large/train.py --mesh fsdp=4  a quarter each
    paceline run -n 1 examples/too_large/train.py --mesh dp=1    the full model, to compare

The model is built on the meta device, without values. Each process materializes only its shard, one
layer at a time. Parameters take 128 MB here, and four times that with gradients and AdamW's two
averages. At the end each process prints its peak memory, including torch itself.
"""

from __future__ import annotations

import argparse
import resource

import paceline as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

WIDTH, DEPTH = 1024, 32


class Block(nn.Module):
    """A square matrix of 4 MB with a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh()


def peak_mb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mesh", default="fsdp=2")
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)
    x = torch.randn(8 * args.steps, WIDTH)
    loader = DataLoader(TensorDataset(x, x.roll(1, 1)), batch_size=4)

    pl.init()
    with torch.device("cpu" if args.mesh == "dp=1" else "meta"):
        model = nn.Sequential(*(Block() for _ in range(DEPTH)))
    whole = sum(param.numel() for param in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = pl.distribute(
        model, optimizer, mesh=args.mesh, loss=F.mse_loss, example=x[:4]
    )
    for step, (inputs, targets) in enumerate(pl.shard(loader)):
        loss = model.train_step(inputs, targets)
        if pl.rank() == 0:
            print(f"step {step} loss {loss:.4f}", flush=True)
    held = sum(param.numel() for group in optimizer.param_groups for param in group["params"])
    print(f"process {pl.rank()}: {held} of {whole} parameters, {peak_mb()} MB at most", flush=True)


if __name__ == "__main__":
    main()
