"""Models as people write them, for tests of tensor parallel: small, with sizes that divide by 4."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, VOCABULARY, CONTEXT = 32, 4, 64, 16


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Dropout(0.0), nn.Linear(32, 6))


class GatedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(12, 32, bias=False), nn.Linear(12, 32, bias=False)
        self.down = nn.Linear(32, 12, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class FusedGatedMLP(nn.Module):
    """Gate and up are one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(12, 64), nn.Linear(32, 12)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, dim=-1)
        return x + self.down(F.gelu(gate) * up)


class CausalSelfAttention(nn.Module):
    """As in nanoGPT: splits by the width, views with sizes of the input, a mask in a buffer."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attn_dropout, self.resid_dropout = nn.Dropout(dropout), nn.Dropout(dropout)
        self.n_head, self.n_embd = HEADS, WIDTH
        mask = torch.tril(torch.ones(CONTEXT, CONTEXT)).view(1, 1, CONTEXT, CONTEXT)
        self.register_buffer("bias", mask)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        y = self.attn_dropout(F.softmax(att, dim=-1)) @ v
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C)))


class NanoBlock(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = CausalSelfAttention(dropout)
        self.mlp = nn.ModuleDict(
            {"c_fc": nn.Linear(WIDTH, 4 * WIDTH), "c_proj": nn.Linear(4 * WIDTH, WIDTH)}
        )
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.drop(self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x)))))


class NanoGPT(nn.Module):
    """Tied embedding, loss inside, if there are targets."""

    def __init__(self, dropout: float = 0.0, tied: bool = True) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.h = nn.ModuleList([NanoBlock(dropout) for _ in range(2)])
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        if targets is None:
            return logits, None
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


class GroupedQueries(nn.Module):
    """As in Llama: separate projections, fewer heads of k and v, rotated halves, norms of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.head = WIDTH // 8
        self.q_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k_proj = nn.Linear(WIDTH, 4 * self.head, bias=False)
        self.v_proj = nn.Linear(WIDTH, 4 * self.head, bias=False)
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.q_norm = nn.RMSNorm(self.head)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        shape = (batch, length, -1, self.head)
        q = self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2)
        k = self.k_proj(x).view(shape).transpose(1, 2)
        v = self.v_proj(x).view(shape).transpose(1, 2)
        angle = torch.arange(length, dtype=x.dtype)[:, None] / torch.arange(1, 3, dtype=x.dtype)
        cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)
        q, k = (one * cos + self.rotated(one) * sin for one in (q, k))
        k = k[:, :, None].expand(batch, 4, 2, length, self.head).reshape(batch, 8, length, -1)
        v = v.repeat_interleave(2, dim=1)
        out = F.scaled_dot_product_attention(q * self.scale, k, v, is_causal=True)
        return x + self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))

    def rotated(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


class BatchedHeads(nn.Module):
    """Heads are made part of the batch, for bmm; einops-like einsum for the result."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.v, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        head = width // HEADS
        q, k = (
            m(x)
            .reshape(batch, length, HEADS, head)
            .permute(0, 2, 1, 3)
            .reshape(batch * HEADS, length, head)
            for m in (self.q, self.k)
        )
        weights = torch.softmax(torch.bmm(q, k.transpose(1, 2)) / head**0.5, dim=-1)
        v = self.v(x).unflatten(-1, (HEADS, head))
        mixed = torch.einsum("bhts,bshd->bthd", weights.view(batch, HEADS, length, length), v)
        return x + self.o(mixed.flatten(-2))


class BasicBlock(nn.Module):
    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, out, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(out), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        down = nn.Sequential(nn.Conv2d(width, out, 1, stride), nn.BatchNorm2d(out))
        self.down: nn.Module = nn.Identity() if width == out else down

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += self.down(x)
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.layers = nn.Sequential(BasicBlock(8, 8, 1), BasicBlock(8, 16, 2))
        self.fc = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(F.max_pool2d(self.stem(x), 2))
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, 0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def transformer() -> nn.Module:
    return nn.Transformer(WIDTH, HEADS, 1, 1, 64, 0.0, batch_first=True)


def example_gpt() -> nn.Module:
    """The example's own file."""
    path = Path(__file__).parents[2] / "examples" / "gpt" / "after.py"
    if "gpt_example" not in sys.modules:
        spec = importlib.util.spec_from_file_location("gpt_example", path)
        assert spec is not None and spec.loader is not None
        module = sys.modules["gpt_example"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["gpt_example"].GPT(VOCABULARY)
