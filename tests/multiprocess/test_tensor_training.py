"""Training cut models: dropout, recomputed activations, mixed precision, steps of an optimizer."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from paceline.model_parallel.tensor.parallelize import parallelize
from paceline.model_parallel.tensor.sharded_tensor import ShardedTensor
from support import run_ranks
from support import tensor_models as models


def mesh() -> DeviceMesh:
    torch.set_num_threads(1)
    dist.init_process_group("paceline")
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def everybodys(tensor: Tensor) -> list[Tensor]:
    pieces = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, tensor.contiguous())
    return pieces


def token_loss(model: nn.Module, idx: Tensor) -> Tensor:
    return model(idx, (idx * 5 + 1) % models.VOCABULARY)[1]


def train(model: nn.Module, args: list[tuple[Tensor, ...]]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for x in args:
        optimizer.zero_grad()
        is_real = x[0].is_floating_point()
        loss = model(*x).square().mean() if is_real else token_loss(model, x[0])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


class Masks(nn.Module):
    """Keeps the masks that its two dropouts have drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        inner = F.dropout(torch.ones_like(hidden), 0.5, self.training)
        if isinstance(inner, ShardedTensor):
            self.inner = inner.local
        self.outer = F.dropout(torch.ones_like(x), 0.5, self.training)
        return self.down(hidden * inner) * self.outer


@pytest.mark.parametrize("size", [2, 4])
def test_twenty_steps_equal_one_process(size):
    def body(_):
        device_mesh = mesh()
        dice = torch.Generator().manual_seed(3)
        words = [(torch.randint(64, (4, 8), generator=dice),) for _ in range(20)]
        images = [(torch.randn(4, 3, 16, 16, dtype=torch.float64, generator=dice),)] * 20
        rows = [(torch.randn(8, 12, dtype=torch.float64, generator=dice),) for _ in range(20)]
        torch.manual_seed(2)
        for model, batches in (
            (models.NanoGPT(), words),
            (models.ResNet(), images),
            (models.mlp(), rows),
        ):
            model.double()
            whole = copy.deepcopy(model)
            optimizer_sees = list(model.parameters())
            plan = parallelize(model, device_mesh)
            assert plan.parts and optimizer_sees == list(model.parameters())
            found, expected = train(model, batches), train(whole, batches)
            # float64: sums in another order, twenty steps on
            assert found == pytest.approx(expected, rel=1e-9)
            assert expected[-1] < expected[0]
            for name, param in model.named_parameters():
                part = plan.parts.get(name)
                wanted = whole.get_parameter(name).detach()
                wanted = wanted if part is None else part.of(wanted)
                torch.testing.assert_close(param.detach(), wanted, rtol=1e-8, atol=1e-9)
            for name, buffer in model.named_buffers():
                wanted = whole.get_buffer(name)
                if buffer.shape == wanted.shape:
                    torch.testing.assert_close(buffer, wanted, rtol=1e-9, atol=1e-9)

    run_ranks(size, body)


def test_dropout_is_equal_on_whole_tensors_and_different_on_pieces():
    def body(_):
        device_mesh = mesh()
        torch.manual_seed(100 + dist.get_rank())  # not what it should be: it is put right
        model = Masks()
        parallelize(model, device_mesh)
        x = torch.randn(16, 8)
        for _ in range(2):
            first = model(x)
            ours, others = everybodys(model.outer)
            assert torch.equal(ours, others)
            assert set(model.outer.unique().tolist()) == {0.0, 2.0}
            ours, others = everybodys(model.inner)
            # Half of 512 places agree by chance; 400 would be a wonder (12 standard deviations).
            assert int((ours == others).sum()) < 400
            del first
        torch.manual_seed(7)
        once = model(x)
        torch.manual_seed(7)
        assert torch.equal(once, model(x))

    run_ranks(2, body)


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved hooks", "reentrant"])
def test_recomputed_blocks_draw_the_same_masks(reentrant):
    def body(_):
        device_mesh = mesh()
        torch.manual_seed(1)
        model = models.NanoGPT(dropout=0.3, tied=False)
        parallelize(model, device_mesh)
        words = torch.randint(64, (3, 8))

        def gradients(recompute: bool) -> list[Tensor]:
            model.zero_grad()
            torch.manual_seed(5)
            x = model.wte(words) + model.wpe.weight[:8] * 1.0
            for block in model.h:
                x = checkpoint(block, x, use_reentrant=reentrant) if recompute else block(x)
            logits = model.lm_head(model.ln_f(x))
            F.cross_entropy(logits.flatten(0, 1), words.flatten()).backward()
            return [param.grad.clone() for param in model.parameters()]

        for plain, again in zip(gradients(False), gradients(True), strict=True):
            assert torch.equal(plain, again)
        twin = copy.deepcopy(model).eval()
        model.eval()
        assert torch.equal(twin(words)[0].full_tensor(), model(words)[0].full_tensor())
        state = torch.get_rng_state()
        assert all(torch.equal(state, other) for other in everybodys(state))

    run_ranks(2, body)


def test_mixed_precision():
    def body(_):
        device_mesh = mesh()
        torch.manual_seed(1)
        model = models.NanoGPT()
        whole = copy.deepcopy(model)
        plan = parallelize(model, device_mesh)
        words = torch.randint(64, (4, 8))
        losses = []
        for one in (model, whole):
            with torch.autocast("cpu", torch.bfloat16):
                loss = token_loss(one, words)
            loss.backward()
            losses.append(float(loss.detach()))
        # bfloat16 has 8 bits: products and sums of them differ by 1/256 of their size
        assert losses[0] == pytest.approx(losses[1], rel=1e-2)
        for name, param in model.named_parameters():
            assert param.grad.dtype == torch.float32
            wanted = whole.get_parameter(name).grad
            wanted = plan.parts[name].of(wanted) if name in plan.parts else wanted
            difference = float((param.grad - wanted).norm() / wanted.norm())
            assert difference < 0.1 or float(wanted.norm()) < 1e-3, f"{name} {difference}"

    run_ranks(2, body)


def test_losses_of_all_kinds():
    def body(_):
        device_mesh = mesh()
        torch.manual_seed(1)
        head = nn.Linear(6, 1024).double()
        whole = copy.deepcopy(head)
        parallelize(head, device_mesh, {"": "vocabulary"})
        x, target = torch.randn(10, 6).double(), torch.randint(1024, (10,))
        target[3] = -100
        options = [
            {},
            {"reduction": "sum"},
            {"reduction": "none"},
            {"label_smoothing": 0.2},
            {"ignore_index": int(target[0])},
            {"weight": torch.rand(1024).double()},  # gathers
        ]
        for option in options:
            if option.get("ignore_index") is not None:
                target[3] = 5
            results = []
            for model in (head, whole):
                model.zero_grad()
                logits = model(x)
                assert isinstance(logits, ShardedTensor) == (model is head)
                loss = F.cross_entropy(logits, target, **option)
                loss.square().sum().backward()
                results.append((loss.detach(), model.weight.grad))
            (loss, grad), (wanted, wanted_grad) = results
            torch.testing.assert_close(loss, wanted)
            torch.testing.assert_close(grad, wanted_grad.chunk(2)[dist.get_rank()])
        images, places = x.view(2, 5, 6), target.clamp(0).view(2, 5)
        losses = [
            F.cross_entropy(one(images).transpose(1, 2), places, reduction="none").detach()
            for one in (head, whole)
        ]
        torch.testing.assert_close(*losses)
        grads = []
        for one in (head, whole):
            one.zero_grad()
            logits = one(x)
            logits[:, 5:9] = -2.0  # not a piece: gathered, written, cut again
            logits[2].mul_(3)
            F.cross_entropy(logits, target.clamp(0)).backward()
            grads.append(one.weight.grad)
        torch.testing.assert_close(grads[0], grads[1].chunk(2)[dist.get_rank()])
        logits = head(x)
        best, likely = logits.argmax(-1), logits.softmax(-1)  # gathered
        torch.testing.assert_close(likely, whole(x).softmax(-1))
        assert torch.equal(best, whole(x).argmax(-1))

    run_ranks(2, body)
