"""Plans by hand: words, torch's own styles, edited automatic plans, and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.nn import functional as F

from paceline.errors import UsageError
from paceline.model_parallel.tensor.parallelize import parallelize, tensor_plan
from paceline.model_parallel.tensor.plan import TensorPlan
from support import run_ranks
from support import tensor_models as models


def mesh() -> DeviceMesh:
    torch.set_num_threads(1)
    dist.init_process_group("paceline")
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


class LocalBlock(nn.Module):
    """A block as torch's styles want it: it takes as many heads as its projections give."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.q, self.k = nn.Linear(32, 32), nn.Linear(32, 32)
        self.v, self.o = nn.Linear(32, 32), nn.Linear(32, 32)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (m(y).unflatten(-1, (-1, 8)).transpose(1, 2) for m in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList([LocalBlock(), LocalBlock()])
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 64)

    def forward(self, index: Tensor) -> Tensor:
        x = self.words(index)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def sequence_parallel_plan() -> dict[str, object]:
    """As torch's guide writes it: between the blocks' parts the sequence is cut."""
    column = ColwiseParallel(input_layouts=Shard(1))
    return {
        "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "blocks.*.norm1": SequenceParallel(use_local_output=True),
        "blocks.*.norm2": SequenceParallel(use_local_output=True),
        **{f"blocks.*.{name}": column for name in ("q", "k", "v")},
        "blocks.*.o": RowwiseParallel(output_layouts=Shard(1)),
        "blocks.*.mlp": PrepareModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Replicate()
        ),
        "blocks.*.mlp.0": ColwiseParallel(),
        "blocks.*.mlp.2": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(use_local_output=True),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


def check(model: nn.Module, index: Tensor, plan: TensorPlan, whole: nn.Module) -> None:
    losses = []
    for one in (model, whole):
        loss = F.cross_entropy(one(index).flatten(0, 1), (index.flatten() * 3 + 1) % 64)
        loss.backward()
        losses.append(float(loss.detach()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-10)
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in whole.named_parameters()]
    for name, param in model.named_parameters():
        assert type(param) is nn.Parameter and type(param.data) is Tensor, name
        wanted = whole.get_parameter(name).grad
        wanted = plan.parts[name].of(wanted) if name in plan.parts else wanted
        assert param.grad is not None and not isinstance(param.grad, DTensor), name
        torch.testing.assert_close(
            param.grad, wanted, rtol=1e-9, atol=1e-11, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("size", [2, 4])
def test_styles_of_torch(size):
    def body(_):
        device_mesh = mesh()
        torch.manual_seed(1)
        model = Words().double()
        whole = copy.deepcopy(model)
        params = list(model.parameters())
        plan = parallelize(model, device_mesh, sequence_parallel_plan())
        assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
        assert "blocks.1.q.weight" in plan.parts and "words.weight" in plan.parts
        assert "norm.weight" not in plan.parts
        rows = {row.module: row for row in plan.rows}
        assert rows["blocks.0.mlp.0"].bytes_after * size == rows["blocks.0.mlp.0"].bytes_before
        assert rows["blocks.0.mlp"].bytes_before == 0 and rows["words"].num_forward is None
        assert "ColwiseParallel" in plan.table() and plan.replicated == []
        check(model, torch.randint(64, (2, 8)), plan, whole)

    run_ranks(size, body)


def test_words_patterns_and_edited_plans():
    def body(_):
        device_mesh = mesh()
        torch.manual_seed(1)
        index = torch.randint(64, (2, 8))
        blocks = {"mix": "column", "out": "row", "think.0": "column", "think.2": "row"}
        by_words = {f"blocks.[01].{name}": word for name, word in blocks.items()}
        model = models.example_gpt().double()
        whole = copy.deepcopy(model)
        plan = parallelize(model, device_mesh, by_words)
        assert str(plan["blocks.0.mix"]) == "column, 3 blocks"
        assert "head.weight" not in plan.parts and "blocks.1.mix.bias" in plan.parts
        check(model, index, plan, whole)

        model = copy.deepcopy(whole)
        whole.zero_grad(), model.zero_grad()
        automatic = tensor_plan(model, tp=2)
        assert all(
            param.shape == p.shape
            for param, p in zip(model.parameters(), whole.parameters(), strict=True)
        )
        automatic["blocks.0.think.0"] = "replicate"  # its row takes a piece of what is whole
        del automatic["head"]
        plan = parallelize(model, device_mesh, automatic)
        assert "blocks.0.think.0.weight" not in plan.parts
        assert "blocks.0.think.2.weight" in plan.parts and "head.weight" not in plan.parts
        check(model, index, plan, whole)

    run_ranks(2, body)


def test_one_axis_of_several():
    def body(_):
        torch.set_num_threads(1)
        dist.init_process_group("paceline")
        axes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
        stage, x = axes.get_local_rank("pp"), torch.randn(5, 12).double()
        torch.manual_seed(stage)
        model = models.mlp().double() if stage == 0 else models.GatedMLP().double()
        whole = copy.deepcopy(model)
        plan = parallelize(model, axes["tp"])
        assert all(
            part.slices[0].index == axes.get_local_rank("tp") for part in plan.parts.values()
        )
        torch.testing.assert_close(model(x), whole(x))
        with pytest.raises(UsageError, match="2 dimensions"):
            parallelize(whole, axes)

    run_ranks(4, body)


def refused(model: nn.Module, device_mesh: DeviceMesh, plan: object, **options) -> str:
    with pytest.raises(UsageError) as caught:
        parallelize(model, device_mesh, plan, **options)
    return str(caught.value)


class ThreeHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 3, 8).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(2))


def test_bad_plans_are_refused():
    def body(_):
        device_mesh = mesh()
        mlp = models.mlp()
        assert "'nothing' is no module" in refused(mlp, device_mesh, {"nothing": "row"})
        assert "'diagonal' is not a style" in refused(mlp, device_mesh, {"0": "diagonal"})
        said = refused(mlp, device_mesh, {"1": "column"})
        assert "1 is a ReLU, which has no style 'column'" in said
        odd = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 4))
        for column, row in (("column", "row"), (ColwiseParallel(), RowwiseParallel())):
            said = refused(odd, device_mesh, {"0": column})
            assert "0 has 9 output features (rows)" in said and "tp=2" in said
            assert "9 input features (columns)" in refused(odd, device_mesh, {"2": row})
        words = nn.Embedding(65, 4)
        assert "65 rows" in refused(words, device_mesh, {"": "embedding"})
        heads = nn.MultiheadAttention(12, 3)
        said = refused(heads, device_mesh, {"": "attention"}, example=(torch.randn(2, 1, 12),) * 3)
        assert "3 heads" in said and "tp=2" in said
        said = refused(ThreeHeads(), device_mesh, {"qkv": "column", "out": "row"})
        assert "qkv cannot be sharded as column on the axis tp=2" in said
        assert "(2, 8, 3, 3, 8) cannot be split into 2" in said
        said = refused(mlp, device_mesh, None, example=[torch.randn(2, 12)])
        assert "example must be the tuple" in said
        tied = Words()
        tied.head.weight = tied.words.weight
        assert "words" in refused(tied, device_mesh, {"words": "embedding"})
        # Nothing was changed by what was refused.
        parallelize(mlp, device_mesh)
        assert mlp[0].weight.shape == (16, 12)

    run_ranks(2, body)


def test_what_cannot_be_cut_stays_whole_with_a_reason():
    def body(_):
        device_mesh = mesh()
        odd = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 4), nn.LayerNorm(4))
        plan = parallelize(odd, device_mesh)
        assert not plan.parts and not plan.rows
        reasons = {one.module: one.reason for one in plan.replicated}
        assert reasons["0"] == "9 output features (rows) do not divide by tp=2"
        assert "layer_norm" in reasons["2"] and "norm" in reasons["3"]

        liar = Liar()
        plan = parallelize(liar, device_mesh)
        assert not plan.parts and liar.up.weight.shape == (32, 8)
        assert "differs" in {one.module: one.reason for one in plan.replicated}["up"]
        assert "differs" in plan.table()

        plan = parallelize(OwnFunction(), device_mesh)
        assert not plan.parts
        assert "gradient" in {one.module: one.reason for one in plan.replicated}["up"]

    run_ranks(2, body)


class Clamp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx, grad):
        return grad * (ctx.saved_tensors[0] > 0)


class OwnFunction(nn.Module):
    """Autograd functions do not tell tensors like ours that they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(Clamp.apply(self.up(x)))


class Liar(nn.Module):
    """Looks at the local piece behind our back: only probing can see that."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        return self.down(hidden * getattr(hidden, "local", hidden).abs().max().item())
