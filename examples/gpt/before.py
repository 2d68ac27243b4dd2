"""Train a small GPT, letter by letter, on Herman Melville's Moby Dick.

    diff examples/gpt/before.py examples/gpt/after.py    what makes it distributed
    python examples/gpt/before.py                        plain PyTorch
    paceline run -n 2 examples/gpt/after.py              two workers

`fetch_book.py` downloads the full book. Without it, the chapters in this directory are used.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

HERE = Path(__file__).resolve().parent
BOOK, EXCERPT = HERE.parents[1] / "data" / "moby-dick.txt", HERE / "moby-dick-excerpt.txt"
WIDTH, HEADS, LAYERS, CONTEXT = 128, 4, 2, 64


class Block(nn.Module):
    """Causal attention, then two linear layers on each letter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.think = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        many, length, _ = x.shape
        parts = self.mix(self.norm1(x)).view(many, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).reshape(many, length, WIDTH))
        return x + self.think(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, num_letters: int) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(num_letters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)), nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, num_letters)

    def forward(self, letters: Tensor) -> Tensor:
        x = self.letters(letters) + self.places.weight[: letters.shape[1]]
        return self.head(self.blocks(x))


def loss_of(model: nn.Module, window: Tensor) -> Tensor:
    """Return the cross-entropy of the next letters, in nats."""
    return F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())


def load(num_chars: int) -> tuple[TensorDataset, Tensor, str]:
    """Return training windows, test windows, and the set of letters."""
    book = BOOK if BOOK.exists() else EXCERPT
    text = book.read_text(encoding="ascii")[:num_chars]
    alphabet = "".join(sorted(set(text)))
    print(f"{book.name}: {len(text)} characters, {len(alphabet)} different ones")
    codes = torch.tensor([alphabet.index(letter) for letter in text])
    windows = codes.unfold(0, CONTEXT + 1, CONTEXT).contiguous()
    num_test = len(windows) // 20
    return TensorDataset(windows[:-num_test]), windows[-num_test:], alphabet


@torch.no_grad()
def write(model: nn.Module, alphabet: str, begin: str, num_letters: int) -> str:
    """Continue a text with letters sampled from the model."""
    codes, dice = [alphabet.index(letter) for letter in begin], torch.Generator().manual_seed(0)
    for _ in range(num_letters):
        likely = model(torch.tensor([codes[-CONTEXT:]]))[0, -1].div(0.7).softmax(0)
        codes.append(int(likely.multinomial(1, generator=dice)))
    return "".join(alphabet[code] for code in codes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--chars", type=int, default=300_000, help="how much of the book to read")
    options = parser.parse_args()
    torch.manual_seed(0)

    train_set, test_windows, alphabet = load(options.chars)
    train = DataLoader(train_set, options.batch_size, shuffle=True)
    model: nn.Module = GPT(len(alphabet))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)

    for epoch in range(options.epochs):
        for (windows,) in train:
            optimizer.zero_grad()
            loss_of(model, windows).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        with torch.no_grad():
            print(f"epoch {epoch + 1}: test loss {float(loss_of(model, test_windows)):.4f}")
    print(write(model, alphabet, "The whale", 200))


if __name__ == "__main__":
    main()
