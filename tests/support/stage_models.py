"""Small models of every kind that users write, for tests of cutting them into stages."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

WIDTH = 8


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, width)

    def forward(self, x, scale=None, *, mask=None, shift=0.0):
        y = self.inner(self.norm(x)) + shift
        if scale is not None:
            y = y * scale
        if mask is not None:
            y = y.masked_fill(mask, 0.0)
        return x + torch.tanh(y)


class CrossBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.block = Block()

    def forward(self, x, memory):
        found, _ = self.attention(x, memory, memory, need_weights=False)
        return self.block(x + found)


class EncoderDecoder(nn.Module):
    """Cross attention: what the encoder made goes to every block of the decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, WIDTH)
        self.encoder = nn.ModuleList(Block() for _ in range(2))
        self.decoder = nn.ModuleList(CrossBlock() for _ in range(2))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, source, target):
        memory = self.words(source)
        for block in self.encoder:
            memory = block(memory)
        x = self.words(target)
        for block in self.decoder:
            x = block(x, memory=memory)
        return self.head(x)


class UNet(nn.Module):
    """Skip connections over all that is between."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            nn.Sequential(nn.Conv2d(c, d, 3, padding=1), nn.BatchNorm2d(d), nn.ReLU(inplace=True))
            for c, d in [(1, 4), (4, 4), (4, 4)]
        )
        self.pool = nn.MaxPool2d(2)
        self.up = nn.ModuleList(nn.Conv2d(8, 4, 3, padding=1) for _ in range(2))
        self.last = nn.Conv2d(4, 1, 1)

    def forward(self, x):
        skips = []
        for level, block in enumerate(self.down):
            x = block(x)
            if level < len(self.down) - 1:
                skips.append(x)
                x = self.pool(x)
        for block, skip in zip(self.up, reversed(skips), strict=True):
            x = F.interpolate(x, size=skip.shape[-2:])
            x = block(torch.cat([x, skip], dim=1)).relu_()
        return self.last(x)


class TwoInputs(nn.Module):
    """Two inputs, a dict with a tuple in it, a number, and an integer tensor come out."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, WIDTH), nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, a, b):
        x, y = self.left(a), self.right(b)
        best = (x + y).argmax(-1)
        keep = best > 2
        for block in self.blocks:
            x = block(x, shift=0.5, mask=keep.unsqueeze(-1))
        scores = self.head(x)
        return {"scores": scores, "pair": (y, best), "count": len(self.blocks), "keep": ~keep}


class Rope(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("speeds", torch.linspace(1, 2, WIDTH // 2), persistent=False)

    def forward(self, x, positions):
        angles = positions[:, None].float() * self.speeds
        both = torch.cat([angles, angles], -1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)


class RopeBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.block = nn.Linear(WIDTH, WIDTH), Block()

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None):
        cos, sin = position_embeddings
        turned = self.mix(hidden_states)
        turned = turned * cos + turned.roll(WIDTH // 2, -1) * sin
        turned = (turned @ turned.mT + attention_mask).softmax(-1) @ turned
        return (self.block(hidden_states + turned),)


class RopeDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(10, WIDTH)
        self.rotary_emb = Rope()
        self.layers = nn.ModuleList(RopeBlock() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens, mask=None, use_cache=False):
        x = self.embed_tokens(tokens)
        length = tokens.size(1)
        positions = torch.arange(length, device=x.device)
        around = self.rotary_emb(x, positions)
        if mask is None:
            mask = torch.full((length, length), float("-inf"), device=x.device).triu_(1)
        for layer in self.layers[: len(self.layers)]:
            x = layer(x, attention_mask=mask, position_embeddings=around)[0]
        return self.norm(x)


class RopeModel(nn.Module):
    """As large language models are written: a wrapper, and cos and sin for all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.model = RopeDecoder()
        self.lm_head = nn.Linear(WIDTH, 10, bias=False)
        self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens):
        return (self.lm_head(self.model(tokens=tokens)),)


class TiedGPT(nn.Module):
    """An assertion on sizes, a buffer, dropout, and the embedding's weight as the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, WIDTH)
        self.place = nn.Parameter(torch.randn(6, WIDTH))
        self.register_buffer("mask", torch.ones(6, 6).tril() == 0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.unused = nn.Linear(2, 2)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, tokens):
        many, length = tokens.shape
        assert length <= 6, "too long"
        if tokens.dim() != 2:
            raise ValueError("one dimension too many")
        if self.training:
            self.steps += 1
        x = self.embed(tokens) + self.place[:length]
        x = F.dropout(x, 0.5, self.training)
        hidden = self.mask[:length, :length].any(1)[:, None]
        for number, block in enumerate(self.blocks):
            x = block(x, scale=torch.tensor(0.5 * number + 1.0), mask=hidden if number else None)
            x = x.view(many, length, -1)
        return F.linear(F.dropout(x, 0.5, training=self.training), self.embed.weight)


class InPlace(nn.Module):
    """Views and writes in place between the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        x = self.layers[0](x)
        first, second = x[..., : WIDTH // 2], x[..., WIDTH // 2 :]
        y = self.layers[1](x.clone())
        x.mul_(2.0)
        x[:, 0] = 1.0
        z = self.layers[2](y * torch.cat([second, first], -1))
        z += y
        held = torch.zeros(z.shape[1])
        held[1] = 3.0
        z = self.act(self.layers[3](z))
        return z + held + x, first


class Doubler(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 3  # told apart from what autograd would find


class Shared(nn.Module):
    """A layer that is called three times, a custom gradient, no_grad, a constant, a transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.same, self.last = Block(), Block(), Block()
        self.constant = [torch.full((WIDTH,), 2.0)]
        self.stack = [self.first, self.last]  # not registered a second time

    def forward(self, x):
        x = self.same(self.stack[0](x))
        x = Doubler.apply(x)
        with torch.no_grad():
            level = self.same(x).mean()
        turned = x.transpose(0, 1)
        x = self.same(x) * level + self.constant[0]
        x = self.stack[1](x)
        return x + turned.transpose(0, 1).view(-1).view(x.shape)


class Statistics(nn.Module):
    """A buffer that the forward writes to in one place, and reads in others."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.register_buffer("average", torch.zeros(WIDTH))
        self.again = again

    def forward(self, x, note=None, times=1):
        x = self.layers[0](x)
        self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        x = self.layers[1](x) * times
        x = self.layers[2](x - self.average)
        if self.again:
            self.average.add_(1.0)
        return self.layers[3](x) + self.average
