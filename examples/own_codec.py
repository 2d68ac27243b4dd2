"""A custom codec: every number in 16 bits, with some mantissa bits set to zero.

    paceline run -n 2 examples/own_codec.py

The rounding error is added to the next gradient (error feedback, which every codec has), so that
training works even with few bits. Paceline handles small tensors, the exchange between workers,
lost workers and checkpoints.
"""

from __future__ import annotations

import paceline as pl
import torch
from paceline.extend import COUNT, Codec, CodecSpec, Draw, Option, register_codec
from torch import nn


class Cut(Codec):
    """bfloat16, with some bits of the mantissa set to zero."""

    def __init__(self, spec: CodecSpec) -> None:
        super().__init__(spec)
        self.mask = -1 << int(spec.option("bits"))

    def num_bytes(self, count: int) -> int:
        return 2 * count

    def compress(self, values: torch.Tensor, payload: torch.Tensor, draw: Draw) -> None:
        payload.view(torch.bfloat16).copy_(values)
        payload.view(torch.int16).bitwise_and_(self.mask)

    def decode(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(payload.view(torch.bfloat16))


def main() -> None:
    bits = Option("bits", COUNT, "how many bits of the mantissa are cut off, of 7", 4)
    register_codec("cut", Cut, options=(bits,), min_elements=0)
    pl.init()
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pl.distribute(model, optimizer, compress="cut(bits=6)")
    chance = torch.Generator().manual_seed(pl.rank())
    loss = torch.zeros(())
    for _ in range(60):
        x = torch.randn(32, 8, generator=chance)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    pl.check_consistency(model)
    print(f"worker {pl.rank()}: loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
