"""The automatic plan, without other processes: what is recognised, what is refused, the table."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.errors import UsageError
from paceline.model_parallel.tensor.parallelize import tensor_plan
from paceline.model_parallel.tensor.plan import TensorPlan
from support import tensor_models as models


def styles(plan: TensorPlan) -> dict[str, str]:
    return {name: str(style) for name, style in plan.items()}


def reasons(plan: TensorPlan) -> dict[str, str]:
    return {one.module: one.reason for one in plan.replicated}


class ImageTransformer(nn.Module):
    """Patches by a convolution, a learned token before them, torch's encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, 32))
        self.places = nn.Parameter(torch.zeros(1, 65, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(len(x), -1, -1), x), dim=1) + self.places
        return self.head(self.encoder(x)[:, 0])


class Separate(nn.Module):
    """As in BERT: projections and output are in different modules; a bias of heads is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({name: nn.Linear(32, 32) for name in ("query", "key", "value")})
        self.output = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.1), nn.LayerNorm(32))
        self.bias = nn.Embedding(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        q, k, v = (m(x).view(*x.shape[:2], 4, 8).permute(0, 2, 1, 3) for m in self.inner.values())
        place = torch.arange(length)
        bias = self.bias((place[:, None] - place).clamp(0, 15)).permute(2, 0, 1)
        weights = (q @ k.mT / 8**0.5 + bias).softmax(-1)
        return self.output((weights @ v).permute(0, 2, 1, 3).reshape(x.shape))


class Bottleneck(nn.Module):
    def __init__(self, groups: int = 1) -> None:
        super().__init__()
        self.conv1, self.conv3 = nn.Conv2d(16, 8, 1), nn.Conv2d(8, 16, 1)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1, groups=groups)
        self.bn1, self.bn2, self.bn3 = nn.BatchNorm2d(8), nn.BatchNorm2d(8), nn.BatchNorm2d(16)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(x + self.bn3(self.conv3(F.relu(self.bn2(self.conv2(y))))))


class TiedByHand(nn.Module):
    """Uses the embedding's weight for its output, without a module."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mlp = nn.Embedding(64, 12), models.GatedMLP()

    def forward(self, index: Tensor) -> Tensor:
        return self.mlp(self.words(index)) @ self.words.weight.T


def test_other_peoples_models():
    plan = tensor_plan(ImageTransformer(), 2)
    assert styles(plan)["encoder.layers.1.self_attn"] == "attention"
    assert styles(plan)["encoder.layers.0.linear1"] == "column"
    assert "full tensor" in reasons(plan)["patches"] and "leaves the model" in reasons(plan)["head"]

    plan = tensor_plan(Separate(), 2, (torch.randn(2, 6, 32),))
    heads = {f"inner.{name}": "column" for name in ("query", "key", "value")}
    assert styles(plan) == {**heads, "output.0": "row", "bias": "embedding"}

    plan = tensor_plan(Bottleneck(), 4)
    assert styles(plan) == {"conv1": "column", "bn1": "norm", "conv2": "row"}
    assert "conv3" in reasons(plan)
    plan = tensor_plan(Bottleneck(groups=8), 4)
    assert not styles(plan) and "conv2d" in reasons(plan)["conv1"]

    plan = tensor_plan(TiedByHand(), 2)
    assert set(styles(plan)) == {"mlp.gate", "mlp.up", "mlp.down"}
    assert reasons(plan)["words"] == "its weight is used by other code too"


def test_what_does_not_divide_is_listed():
    plan = tensor_plan(models.NanoGPT(), 8)  # 4 heads, 64 words
    assert "cannot be split into 8" in reasons(plan)["h.0.attn.c_attn"]
    assert styles(plan)["h.0.mlp.c_fc"] == "column" and styles(plan)["lm_head"] == "vocabulary"
    plan = tensor_plan(models.NanoGPT(), 3)  # nothing but the 96 features of q, k and v
    assert not styles(plan)
    assert reasons(plan)["wte"] == "64 rows do not divide by tp=3"
    assert "divide" in reasons(plan)["h.0.mlp.c_fc"]


def test_a_model_that_no_guess_fits_needs_an_example():
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

        def forward(self, pairs: list[Tensor]) -> Tensor:
            return self.down(torch.stack(pairs).sum(0).relu() @ self.up.weight.T)

    plan = tensor_plan(Picky(), 2)
    assert not styles(plan)
    assert plan.table().endswith("pass example= for a better plan.")


def test_nothing_is_changed_and_the_table_is_readable():
    model = models.example_gpt()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    state = torch.get_rng_state()
    plan = tensor_plan(model, 2)
    assert torch.equal(torch.get_rng_state(), state) and model.training
    assert all(torch.equal(before[name], param) for name, param in model.named_parameters())
    table = plan.table()
    assert max(map(len, table.splitlines())) <= 100
    assert "blocks.*.mix (x2)" in table and "column, 3 blocks" in table
    sums = table.splitlines()[-3].split()
    assert sums[0] == "all" and sums[-2:] == ["7", "5"]
    rows = {row.module: row for row in plan.rows}
    assert rows["blocks.0.mix"].bytes_before == 4 * (3 * 128 * 128 + 3 * 128)
    assert rows["blocks.0.mix"].bytes_after * 2 == rows["blocks.0.mix"].bytes_before
    # A row's bias stays whole.
    assert rows["blocks.0.out"].bytes_after == 4 * (128 * 64 + 128)


def test_plans_are_edited_with_known_words():
    plan = tensor_plan(models.mlp(), 2)
    assert len(plan) == 2 and list(plan) == ["0", "3"]
    with pytest.raises(UsageError, match="'sideways' is not a style"):
        plan["0"] = "sideways"
    with pytest.raises(UsageError, match="at least 1"):
        tensor_plan(models.mlp(), 0)
