"""Training with sharded parameters equals training of the whole model in one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from sharded_models import (
    Transformer,
    assert_holds,
    batch,
    loss_of,
    made,
    mlp,
    move_to_bucket,
    sharded,
    uneven,
)
from torch import nn

from paceline.model_parallel.fsdp.blocks import recompute
from paceline.model_parallel.fsdp.fully_sharded import FullyShardedModel
from paceline.model_parallel.fsdp.materialize import MetaModel, materialize
from paceline.model_parallel.sharding.layout import LocalShard, Slice, SliceSpec
from support import run_ranks

EXACT = {"rtol": 1e-10, "atol": 1e-10}  # float64: only the order of sums differs


def mine(x: torch.Tensor) -> torch.Tensor:
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def mean(loss: torch.Tensor) -> torch.Tensor:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def train_both(whole, model, shards, steps=20, passes=1, tolerance=EXACT, rows=None):
    """Train the whole model with global batches, and the shards with this process's rows of them.

    Every loss, every gradient before the step and all parameters at the end are compared.
    """
    index, count = rows or (dist.get_rank(), dist.get_world_size())
    whole_optimizer = torch.optim.AdamW([p for p in whole.parameters() if p.requires_grad], 0.01)
    plain = [held.tensor for _, held in shards.shards.items() if held.tensor.requires_grad]
    optimizer = torch.optim.AdamW(plain, 0.01)
    for step in range(steps):
        for n in range(passes):
            x, y = batch(whole, step * passes + n)
            expected = loss_of(whole, x, y)
            loss = loss_of(model, x.chunk(count)[index], y.chunk(count)[index])
            expected.backward()
            loss.backward()
            torch.testing.assert_close(mean(loss), expected.detach(), **tolerance)
        shards.collect_gradients()
        shards.collect_gradients()  # nothing is counted twice
        wholes = dict(whole.named_parameters())
        for name, held in shards.shards.items():
            if wholes[name].grad is None:
                assert held.tensor.grad is None
            else:
                grad = held.spec.of(wholes[name].grad)
                torch.testing.assert_close(held.tensor.grad, grad, **tolerance)
        whole_optimizer.step()
        optimizer.step()
        whole_optimizer.zero_grad()
        shards.drop_gradients()
        with torch.no_grad():  # evaluation sees the step that was just taken
            x, y = batch(whole, 1000 + step)
            torch.testing.assert_close(loss_of(model, x, y), loss_of(whole, x, y), **tolerance)
    assert_holds(shards, dict(whole.named_parameters()), **tolerance)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_training_equals_one_process(num_ranks):
    def body(_):
        torch.set_num_threads(1)
        for maker in (mlp, uneven, Transformer):
            whole, model = made(maker), made(maker)
            shards = sharded(model)
            assert_holds(shards, dict(whole.named_parameters()), rtol=0, atol=0)
            train_both(whole, model, shards, steps=20)

    run_ranks(num_ranks, body)


def test_parameters_may_move_to_other_memory():
    def body(_):
        torch.set_num_threads(1)
        for maker in (mlp, uneven, Transformer):
            whole, model = made(maker), made(maker)
            shards = sharded(model)
            bucket = move_to_bucket(shards)
            train_both(whole, model, shards, steps=5)
            before = bucket.clone()
            move_to_bucket(shards)  # while FSDP has run already
            bucket.zero_()  # nobody looks there any more
            train_both(whole, model, shards, steps=5)
            assert not bucket.any() and before.any()

    run_ranks(3, body)


def test_a_step_between_evaluation_and_the_next_forward_is_seen():
    def body(_):
        torch.set_num_threads(1)
        for maker in (mlp, uneven, Transformer):
            whole, model = made(maker), made(maker)
            shards = sharded(model)
            x, y = batch(whole, 0)
            with torch.no_grad():
                loss_of(model, x, y)
                for held in shards.shards.values():  # no refresh()
                    held.tensor.mul_(0.5)
                for param in whole.parameters():
                    param.mul_(0.5)
                torch.testing.assert_close(loss_of(model, x, y), loss_of(whole, x, y), **EXACT)
            loss_of(model, x, y)  # a forward whose backward never comes
            with torch.no_grad():
                for held in shards.shards.values():
                    held.tensor.add_(0.25)
                for param in whole.parameters():
                    param.add_(0.25)
            torch.testing.assert_close(loss_of(model, x, y), loss_of(whole, x, y), **EXACT)

    run_ranks(2, body)


def test_gradients_of_several_passes_add_up():
    def body(_):
        torch.set_num_threads(1)
        for maker in (uneven, Transformer):
            whole, model = made(maker), made(maker)
            train_both(whole, model, sharded(model), steps=5, passes=3)
        # Also when they are collected in between.
        whole, model = made(mlp), made(mlp)
        shards = sharded(model)
        for step in range(3):
            x, y = batch(whole, step)
            loss_of(whole, x, y).backward()
            loss_of(model, mine(x), mine(y)).backward()
            shards.collect_gradients()
        for name, param in whole.named_parameters():
            held = shards.shards[name]
            torch.testing.assert_close(held.tensor.grad, held.spec.of(param.grad), **EXACT)

    run_ranks(2, body)


def test_frozen_parameters_stay():
    def body(_):
        torch.set_num_threads(1)
        for maker, frozen in ((mlp, ["2.weight", "0.bias"]), (Transformer, ["words.weight"])):
            whole, model = made(maker), made(maker)
            for name in frozen:
                whole.get_parameter(name).requires_grad_(False)
                model.get_parameter(name).requires_grad_(False)
            shards = sharded(model)
            train_both(whole, model, shards, steps=5)
            for name in frozen:
                assert not shards.shards[name].tensor.requires_grad

    run_ranks(2, body)


def test_recomputed_blocks_give_the_same_with_dropout():
    def body(_):
        torch.set_num_threads(1)
        for is_before in (True, False):
            models = [made(lambda: Transformer(dropout=0.5)) for _ in range(2)]
            if is_before:
                assert recompute(models[1]) == ["blocks.0", "blocks.1"]
            shards = [sharded(model) for model in models]
            if not is_before:
                recompute(models[1])
            calls: list[int] = []
            models[1].blocks[0].attention.register_forward_hook(
                lambda *_, calls=calls: calls.append(1)
            )
            for step in range(5):
                losses = []
                for model, held in zip(models, shards, strict=True):
                    torch.manual_seed(step + 100 * dist.get_rank())
                    x, y = batch(model, step)
                    loss = loss_of(model, mine(x), mine(y))
                    loss.backward()
                    held.collect_gradients()
                    losses.append(loss.item())
                assert losses[0] == losses[1]
                for (name, a), (_, b) in zip(*(s.shards.items() for s in shards), strict=True):
                    assert torch.equal(a.tensor.grad, b.tensor.grad), name
                    for param in (a.tensor, b.tensor):
                        param.data.sub_(param.grad, alpha=0.1)
                for one in shards:
                    one.drop_gradients()
            assert len(calls) == 10  # once forwards, once in backward

    run_ranks(2, body)


def test_a_model_on_meta_becomes_real_part_by_part():
    def body(_):
        torch.set_num_threads(1)
        for maker in (mlp, uneven):
            models = []
            for _ in range(2):
                with torch.device("meta"):
                    models.append(maker().double())
            whole, model = models
            recipes = [MetaModel.of(one) for one in models]
            held = {
                n: LocalShard(p, SliceSpec(tuple(p.shape))) for n, p in whole.named_parameters()
            }
            materialize(held, recipes[0], seed=7)
            shards = sharded(model)
            materialize(shards.shards, recipes[1], seed=7)
            shards.refresh()
            assert_holds(shards, dict(whole.named_parameters()), rtol=0, atol=0)
            train_both(whole, model, shards, steps=3)
            move_to_bucket(shards)
            train_both(whole, model, shards, steps=3)

    run_ranks(3, body)


class Gather(torch.autograd.Function):
    """Columns of all processes beside each other, all of which compute the same from there on."""

    @staticmethod
    def forward(ctx, mine, group):
        ctx.group = group
        every = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(every, mine.contiguous(), group)
        return torch.cat(every, -1)

    @staticmethod
    def backward(ctx, grad):
        return grad.chunk(ctx.group.size(), -1)[ctx.group.rank()], None


class Column(nn.Module):
    """A linear layer of which this process has some rows: the simplest cut of tp, by hand."""

    def __init__(self, whole, mesh):
        super().__init__()
        self.group = mesh.get_group()
        self.slice = Slice(0, mesh.get_local_rank(), mesh.size())
        self.weight = nn.Parameter(self.slice.of(whole.weight.detach()))

    def forward(self, x):
        return Gather.apply(nn.functional.linear(x, self.weight), self.group)


def test_slices_of_slices():
    def body(_):
        torch.set_num_threads(1)
        dist.init_process_group("paceline")
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))

        def maker():
            return nn.Sequential(nn.Linear(6, 10, bias=False), nn.Linear(10, 6))

        whole, model = made(maker), made(maker)
        model[0] = Column(model[0], mesh["tp"])
        parts = {n: SliceSpec(tuple(p.shape)) for n, p in whole.named_parameters()}
        parts["0.weight"] = parts["0.weight"].then(model[0].slice)
        shards, index = FullyShardedModel(model, mesh, parts), mesh.get_local_rank("fsdp")
        assert shards.shards["0.weight"].tensor.shape == (3 - index, 6)
        assert_holds(shards, dict(whole.named_parameters()), rtol=0, atol=0)
        train_both(whole, model, shards, steps=5, rows=(index, 2))

    run_ranks(4, body)


class Twice(nn.Module):
    """One block that runs twice, and one that shares a matrix with the head."""

    def __init__(self):
        super().__init__()
        block = nn.Linear(6, 6)
        self.blocks = nn.ModuleList([block, nn.Linear(6, 6), block])
        self.head = nn.Linear(6, 6)
        self.head.weight = self.blocks[1].weight

    def forward(self, x):
        for block in self.blocks:
            x = block(x).tanh()
        return self.head(x)


def test_blocks_that_are_shared():
    def body(_):
        torch.set_num_threads(1)
        whole, model = made(Twice), made(Twice)
        shards = sharded(model)
        assert model.head.weight is model.blocks[1].weight and model.blocks[0] is model.blocks[2]
        train_both(whole, model, shards, steps=5)

    run_ranks(2, body)


def test_the_wire_carries_tensors_only():
    def body(_):
        torch.set_num_threads(1)
        from torch.distributed import distributed_c10d

        def refuse(*_, **__):
            raise AssertionError("an object collective was called")

        for name in dir(distributed_c10d):
            if "object" in name and callable(getattr(distributed_c10d, name)):
                setattr(distributed_c10d, name, refuse)
                if hasattr(dist, name):
                    setattr(dist, name, refuse)
        whole, model = made(Transformer), made(Transformer)
        train_both(whole, model, sharded(model), steps=2)

    run_ranks(2, body)


def test_tied_parameters_are_one_and_wholes_are_freed():
    def body(_):
        torch.set_num_threads(1)
        model = made(Transformer)
        originals = dict(model.named_parameters())
        num_bytes = sum(p.numel() * p.element_size() for p in originals.values())
        shards = sharded(model)
        assert model.head.weight is model.words.weight
        assert "head.weight" not in shards.shards
        assert list(shards.shards) == list(originals)
        assert all(p.numel() == 0 for p in originals.values())
        assert sum(held.tensor.nbytes for held in shards.shards.values()) < 0.55 * num_bytes
        assert model.scale.shape == ()  # buffers stay whole
        for name, held in shards.shards.items():
            assert model.get_parameter(name).to_local().data_ptr() == held.tensor.data_ptr()

    run_ranks(2, body)


def test_what_cannot_be_sharded_is_refused():
    def body(_):
        torch.set_num_threads(1)
        from paceline.errors import UsageError

        scalar = mlp()
        scalar.gain = nn.Parameter(torch.tensor(1.0))
        with pytest.raises(UsageError, match=r"parameter gain .* shape \(1,\)"):
            sharded(scalar)
        mixed = mlp()
        mixed[2].double()
        with pytest.raises(UsageError, match=r"float32 \(0.weight\) and .*float64 \(2.weight\)"):
            sharded(mixed)
        model = mlp()
        shards = sharded(model)
        model[0].weight = nn.Parameter(torch.zeros(1))
        with pytest.raises(UsageError, match=r"0\.weight: it was replaced"):
            shards.refresh()

    run_ranks(2, body)
