"""Cut models against whole ones: outputs, losses, gradients of all parameters put together again.

Tolerances: sums over a cut dimension are added in another order than in one process. In float64
that is 1e-10 of the largest value; in float32, 2e-5.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

from paceline.model_parallel.tensor.parallelize import parallelize
from paceline.model_parallel.tensor.plan import TensorPlan
from paceline.model_parallel.tensor.sharded_tensor import gather_tensors
from support import run_ranks
from support import tensor_models as models

TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}


# -- in the ranks ---------------------------------------------------------------------------------


def mesh() -> DeviceMesh:
    torch.set_num_threads(1)
    dist.init_process_group("paceline")
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def close(found: Tensor, expected: Tensor, what: str, least: float = 1e-3) -> None:
    """Compare; some gradients are zero but for rounding: they are compared with other sizes."""
    found, expected = found.detach(), expected.detach()
    assert found.shape == expected.shape, f"{what}: {found.shape} in place of {expected.shape}"
    scale = max(float(expected.abs().max()), least)
    error = float((found - expected).abs().max()) / scale
    assert error <= TOLERANCE[expected.dtype], f"{what} differs by {error:.2g} of the largest"


def whole_gradients(model: nn.Module, plan: TensorPlan) -> dict[str, Tensor]:
    """Put the gradients of all processes together."""
    found = {}
    for name, param in model.named_parameters():
        assert type(param) is nn.Parameter and param.is_leaf, name
        assert param.grad is not None, f"{name} has no gradient"
        pieces = [torch.empty_like(param.grad) for _ in range(plan.tp)]
        dist.all_gather(pieces, param.grad.contiguous())
        if name not in plan.parts:
            assert all(torch.equal(piece, pieces[0]) for piece in pieces), f"{name} differs"
            found[name] = pieces[0]
            continue
        part = plan.parts[name]
        (one,) = part.slices
        found[name] = torch.full(part.shape, float("nan"), dtype=param.dtype)
        for index, piece in enumerate(pieces):
            type(part)(part.shape, (type(one)(one.dim, index, one.count, one.blocks),)).put(
                found[name], piece
            )
    return found


def loss_of(model: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Return the output and a loss; token models get cross-entropy."""
    output = model(*args)
    output = output[0] if isinstance(output, tuple) else output
    if args[0].is_floating_point():
        return output, (output * output.detach().sin()).sum()
    target = (args[0] * 7 + 3) % models.VOCABULARY
    return output, F.cross_entropy(output.flatten(0, 1), target.flatten())


def check(
    name: str, model: nn.Module, args: tuple[Tensor, ...], device_mesh: DeviceMesh, **options
) -> TensorPlan:
    reference = copy.deepcopy(model)
    names = [name for name, _ in model.named_parameters()]
    params = list(model.parameters())
    plan = parallelize(model, device_mesh, **options)
    assert [name for name, _ in model.named_parameters()] == names
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True)), name
    expected, loss = loss_of(reference, args)
    loss.backward()
    output, cut_loss = loss_of(model, args)
    cut_loss.backward()
    close(gather_tensors(output), expected, f"{name}: output")
    close(cut_loss, loss, f"{name}: loss")
    wanted = {param: p.grad for param, p in reference.named_parameters()}
    largest = max(float(grad.abs().max()) for grad in wanted.values())
    for param, grad in whole_gradients(model, plan).items():
        close(grad, wanted[param], f"{name}: gradient of {param}", largest / 100)
    model.eval(), reference.eval()
    with torch.no_grad():
        output, _ = loss_of(model, args)
        assert type(output) is Tensor
        close(output, loss_of(reference, args)[0], f"{name}: output in evaluation")
    return plan


def tokens(batch: int = 3, length: int = 8) -> tuple[Tensor, ...]:
    return (torch.randint(models.VOCABULARY, (batch, length)),)


def floats(*shape: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return (torch.randn(*shape, dtype=dtype),)


def styles(plan: TensorPlan) -> dict[str, str]:
    return {name: str(style) for name, style in plan.items()}


# -- tests ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_sharded_models_equal_full_ones(size, dtype):
    def body(_):
        device_mesh = mesh()
        torch.manual_seed(1)

        plan = check("mlp", models.mlp().to(dtype), floats(5, 12, dtype=dtype), device_mesh)
        assert styles(plan) == {"0": "column", "3": "row"}
        assert [(row.num_forward, row.num_backward) for row in plan.rows] == [(0, 0), (1, 0)]

        gated = nn.Sequential(nn.Linear(5, 12), nn.LayerNorm(12), models.GatedMLP()).to(dtype)
        plan = check("gated", gated, floats(3, 4, 5, dtype=dtype), device_mesh)
        cut = {"2.gate": "column", "2.up": "column", "2.down": "row"}
        assert styles(plan) == cut
        assert sum(row.num_forward for row in plan.rows) == 1
        assert sum(row.num_backward for row in plan.rows) == 1

        plan = check(
            "fused gate", models.FusedGatedMLP().to(dtype), floats(3, 12, dtype=dtype), device_mesh
        )
        assert styles(plan) == {"both": "column, 2 blocks", "down": "row"}

        plan = check("nanoGPT", models.NanoGPT().to(dtype), tokens(), device_mesh)
        found = styles(plan)
        assert found["h.1.attn.c_attn"] == "column, 3 blocks"
        assert found["h.1.attn.c_proj"] == found["h.0.mlp.c_proj"] == "row"
        assert found["wte"] == "embedding" and found["lm_head"] == "vocabulary"

        plan = check("example", models.example_gpt().to(dtype), tokens(), device_mesh)
        found = styles(plan)
        assert found["blocks.0.mix"] == "column, 3 blocks" and found["blocks.0.out"] == "row"
        assert found["blocks.1.think.0"] == "column" and found["blocks.1.think.2"] == "row"

        plan = check(
            "Llama", models.GroupedQueries().to(dtype), floats(2, 6, 32, dtype=dtype), device_mesh
        )
        assert set(styles(plan)) == {"q_proj", "k_proj", "v_proj", "o_proj"}

        plan = check(
            "bmm", models.BatchedHeads().to(dtype), floats(2, 6, 32, dtype=dtype), device_mesh
        )
        assert set(styles(plan)) == {"q", "k", "v", "o"}

        plan = check(
            "encoder", models.encoder().to(dtype), floats(2, 6, 32, dtype=dtype), device_mesh
        )
        assert styles(plan)["layers.0.self_attn"] == "attention"
        assert styles(plan)["layers.0.linear2"] == "row"

        pair = floats(2, 5, 32, dtype=dtype) + floats(2, 4, 32, dtype=dtype)
        plan = check("transformer", models.transformer().to(dtype), pair, device_mesh)
        assert styles(plan)["decoder.layers.0.multihead_attn"] == "attention"

        plan = check(
            "ResNet", models.ResNet().to(dtype), floats(4, 3, 16, 16, dtype=dtype), device_mesh
        )
        found = styles(plan)
        assert found["layers.0.conv1"] == "column" and found["layers.0.conv2"] == "row"
        assert found["layers.0.bn1"] == "norm" and "layers.0.bn2" not in found

    run_ranks(size, body)
