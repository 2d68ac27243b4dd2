"""Stock torch training on our backend: DDP, FSDP2, DTensor and pipelines give known results."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from support import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)
    )


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(8, 16, generator=generator)
    return x, x[:, :4] + 1


def quiet() -> None:
    import warnings

    warnings.simplefilter("ignore")


def train(wrapped: nn.Module, steps: int, rank: int) -> list[float]:
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        x, y = batch(step, rank)
        loss = nn.functional.mse_loss(wrapped(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("hosts", [1, 2], ids=["one host", "two hosts"])
def test_ddp_has_gloos_losses(hosts):
    def body(_):
        quiet()
        from torch.nn.parallel import DistributedDataParallel as DDP

        found = {}
        for backend in ("gloo", "paceline"):  # gloo meets over our control plane too
            dist.init_process_group(backend)
            found[backend] = train(DDP(model(), bucket_cap_mb=0.001), 6, dist.get_rank())
            dist.destroy_process_group()
        # Sums of two numbers do not depend on their order: two ranks agree bit by bit.
        assert found["paceline"] == found["gloo"]
        assert found["paceline"][-1] < found["paceline"][0]

    run_ranks(2, body, hosts=hosts)


def test_ddp_with_hooks_sparse_gradients_and_uneven_inputs():
    def body(_):
        quiet()
        dist.init_process_group("paceline")
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
        from torch.nn.parallel import DistributedDataParallel as DDP

        rank = dist.get_rank()
        compressed = DDP(model())
        compressed.register_comm_hook(None, default_hooks.fp16_compress_hook)
        losses = train(compressed, 6, rank)
        assert losses[-1] < losses[0]
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=2, start_powerSGD_iter=2
        )
        low_rank = DDP(model())
        low_rank.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        losses = train(low_rank, 6, rank)
        assert losses[-1] < losses[0]
        torch.manual_seed(0)
        embedding = DDP(nn.Embedding(10, 3, sparse=True))
        embedding(torch.tensor([rank, 5])).sum().backward()
        gradient = embedding.module.weight.grad.to_dense()[:, 0]
        assert gradient.tolist() == [0.5, 0.5, 0, 0, 0, 1, 0, 0, 0, 0]
        plain = DDP(model())
        with plain.join():  # rank 1 has two more batches than rank 0
            for step in range(2 + 2 * rank):
                x, y = batch(step, rank)
                nn.functional.mse_loss(plain(x), y).backward()

    run_ranks(2, body)


def test_fsdp2_and_tensor_parallel_equal_one_process():
    def body(_):
        quiet()
        dist.init_process_group("paceline")
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        rank, mesh = dist.get_rank(), dist.init_device_mesh("cpu", (2,))
        alone, sharded, split = model(), model(), model()
        for layer in sharded:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        parallelize_module(split, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (alone, sharded, split)]
        for step in range(4):
            (x0, y0), (x1, y1) = batch(step, 0), batch(step, 1)
            mine = (x0, y0) if rank == 0 else (x1, y1)
            together = torch.cat([x0, x1]), torch.cat([y0, y1])
            losses = [
                nn.functional.mse_loss(m(x), y)
                for m, (x, y) in ((alone, together), (sharded, mine), (split, together))
            ]
            for loss, optimizer in zip(losses, optimizers, strict=True):
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            average = losses[1].detach().clone()
            dist.all_reduce(average, dist.ReduceOp.AVG)
            torch.testing.assert_close(average, losses[0].detach())
            torch.testing.assert_close(losses[2].detach(), losses[0].detach())
        for name, parameter in sharded.named_parameters():
            expected = dict(alone.named_parameters())[name]
            torch.testing.assert_close(parameter.full_tensor(), expected, rtol=1e-4, atol=1e-5)

    run_ranks(2, body)


def test_pipeline_1f1b_equals_one_process():
    def body(_):
        quiet()
        dist.init_process_group("paceline")
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        rank, whole = dist.get_rank(), model()
        mine = nn.Sequential(*(whole[:2] if rank == 0 else whole[2:]))
        stage = PipelineStage(mine, rank, 2, torch.device("cpu"))
        schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
        x, y = batch(0, 0)
        for _ in range(2):
            losses: list[torch.Tensor] = []
            mine.zero_grad()
            if rank == 0:
                schedule.step(x)
            else:
                schedule.step(target=y, losses=losses)
        reference = model()
        expected = nn.functional.mse_loss(reference(x), y)
        expected.backward()
        parts = nn.Sequential(*(reference[:2] if rank == 0 else reference[2:]))
        for found, wanted in zip(mine.parameters(), parts.parameters(), strict=True):
            torch.testing.assert_close(found.grad, wanted.grad)
        if rank == 1:
            torch.testing.assert_close(torch.stack(losses).mean(), expected)

    run_ranks(2, body)


def test_functional_collectives():
    def body(_):
        quiet()
        dist.init_process_group("paceline")
        import torch.distributed._functional_collectives as f

        rank, n, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
        mine = torch.full((2,), float(rank), requires_grad=True)
        assert f.all_reduce(mine, "sum", group).tolist() == [1, 1]
        assert f.all_gather_tensor(mine, 0, group).tolist() == [0, 0, 1, 1]
        assert f.reduce_scatter_tensor(torch.arange(4.0), "sum", 0, group).tolist() == [
            4.0 * rank,
            4.0 * rank + 2,
        ]
        assert f.broadcast(mine, 1, group).tolist() == [1, 1]
        swapped = f.all_to_all_single(torch.arange(2.0) + 10 * rank, [1, 1], [1, 1], group)
        assert swapped.tolist() == [rank, 10.0 + rank]
        doubled = f.all_reduce_coalesced([mine.detach(), torch.ones(3)], "sum", group)
        assert doubled[0].tolist() == [1, 1] and doubled[1].tolist() == [2, 2, 2]
        from torch.distributed.nn.functional import all_gather, all_reduce

        all_reduce(mine).sum().backward()
        assert mine.grad.tolist() == [n, n]
        assert torch.cat(all_gather(mine)).sum().item() == 2

    run_ranks(2, body)
