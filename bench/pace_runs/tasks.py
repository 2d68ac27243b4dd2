"""What is learned: the next letter of a real book, and scikit-learn's digits.

The book is the part of Moby Dick that is in the repository, so that a run is the same everywhere.
Both models are small, because four workers share few cores: what is compared are the paces.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

_BOOK = Path(__file__).resolve().parents[2] / "examples" / "gpt" / "moby-dick-excerpt.txt"
_CONTEXT, _LETTER, _WIDTH = 16, 16, 192
_DIGITS_WIDTH = 128


class NextLetter(nn.Module):
    """Three layers over the last 16 letters (as Bengio et al. 2003), about 100 k parameters."""

    def __init__(self, num_letters: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(num_letters, _LETTER)
        self.first = nn.Linear(_CONTEXT * _LETTER, _WIDTH)
        self.second = nn.Linear(_WIDTH, _WIDTH)
        self.out = nn.Linear(_WIDTH, num_letters)

    def forward(self, letters: Tensor) -> Tensor:
        x = F.gelu(self.first(self.letters(letters).flatten(1)))
        return self.out(x + F.gelu(self.second(x)))


@dataclass(frozen=True)
class Task:
    """A model, data to learn from and to be judged by, and the optimizer's settings."""

    train: Dataset[tuple[Tensor, Tensor]]
    num_train: int
    test: tuple[Tensor, Tensor]
    num_classes: int
    optimizer: str  # as make_optimizer reads it
    is_text: bool

    def model(self) -> nn.Module:
        """Make a fresh one from torch's generator."""
        if self.is_text:
            return NextLetter(self.num_classes)
        width = _DIGITS_WIDTH
        layers = [nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(width, self.num_classes))

    @torch.no_grad()
    def judge(self, model: nn.Module) -> float:
        """Return the mean loss over all held-out data, in nats."""
        x, y = self.test
        return float(F.cross_entropy(model(x), y))


def load(name: str) -> Task:
    """Return the task "book" or "digits"."""
    return {"book": _book, "digits": _digits}[name]()


def make_optimizer(text: str, model: nn.Module) -> torch.optim.Optimizer:
    """Make the optimizer that a text such as "adamw:0.002" or "sgd:0.2" describes."""
    kinds = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    word, _, rate = text.partition(":")
    return kinds[word](model.parameters(), lr=float(rate))


def _book() -> Task:
    text = _BOOK.read_text(encoding="ascii")
    alphabet = {letter: code for code, letter in enumerate(sorted(set(text)))}
    codes = torch.tensor([alphabet[letter] for letter in text])
    windows = codes.unfold(0, _CONTEXT + 1, 1)
    first_test = len(windows) * 9 // 10
    # A view: windows overlap, and a window over the border would have been seen.
    train, test = windows[: first_test - _CONTEXT], windows[first_test::2]
    pairs = TensorDataset(train[:, :-1], train[:, -1])
    judged_by = test[:, :-1].contiguous(), test[:, -1].contiguous()
    return Task(pairs, len(train), judged_by, len(alphabet), "adamw:0.002", True)


def _digits() -> Task:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.from_numpy(digits.data).float() / 16
    labels = torch.from_numpy(digits.target).long()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    pairs = TensorDataset(images[train], labels[train])
    return Task(pairs, len(train), (images[test], labels[test]), 10, "sgd:0.2", False)
