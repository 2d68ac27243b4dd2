"""DistributedOptimizer and what stands beside it: against one process with the whole batch."""

from __future__ import annotations

import pytest

from paceline.comm.group import Group
from support.ranks import run_ranks


def trains(_: Group) -> None:
    """The parameters are those of one process, with every argument."""
    import copy
    import warnings

    import torch
    from torch import nn

    import paceline.horovod.torch as hvd

    hvd.init()
    me, n = hvd.rank(), hvd.size()
    torch.manual_seed(me)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(300, 260), nn.Linear(260, 3)
            self.unused = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.relu(self.first(x)))

    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        draw = torch.Generator().manual_seed(step)
        return torch.randn(4 * n, 300, generator=draw), torch.randn(4 * n, 3, generator=draw)

    def loss(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(net(x), y)

    def compare(steps: int = 3, passes: int = 1, factor: float = 1.0, **options: object) -> None:
        net = Net()
        hvd.broadcast_parameters(net.state_dict(), root_rank=0)
        alone = copy.deepcopy(net)
        plain = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        named = net.named_parameters()
        tight = options.get("compression") is None
        optimizer = hvd.DistributedOptimizer(
            plain, named_parameters=named, backward_passes_per_step=passes, **options
        )
        assert isinstance(optimizer, torch.optim.SGD)
        assert optimizer._parameter_names[net.first.weight] == "first.weight"
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert all(param.grad is None for param in net.parameters())
        same = torch.optim.SGD(alone.parameters(), lr=0.1 * factor, momentum=0.9)
        rates = torch.optim.lr_scheduler.StepLR(same, step_size=2, gamma=0.5)
        for step in range(steps):
            for part in range(passes):
                x, y = batch(step * passes + part)
                loss(net, x[me::n], y[me::n]).backward()
                loss(alone, x, y).backward()
            alone.unused.weight.grad = torch.zeros(2, 2)  # Horovod's zeros
            optimizer.step()
            assert net.unused.weight.grad is not None and not net.unused.weight.grad.any()
            same.step()
            for one in (optimizer, same):
                one.zero_grad()
            scheduler.step()
            rates.step()
        for mine, theirs in zip(net.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6 if tight else 2e-3)

    compare()
    compare(passes=3)
    compare(op=hvd.Sum, factor=n)
    compare(gradient_predivide_factor=2.0)
    compare(compression=hvd.Compression.fp16)
    compare(num_groups=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        synchronized(hvd, batch(0), Net())


def synchronized(hvd, data, net) -> None:  # type: ignore[no-untyped-def]
    """synchronize, skip_synchronize, several losses, and what must not be done."""
    import torch
    from torch import nn

    me, n = hvd.rank(), hvd.size()
    x, y = data[0][me::n], data[1][me::n]
    hvd.broadcast_parameters(net.named_parameters(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(net.parameters()))
    for _ in range(2):
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.synchronize()
        mean = hvd.allreduce(net.first.weight.grad.clone())
        torch.testing.assert_close(net.first.weight.grad, mean)  # they were reduced already
        norm = nn.utils.clip_grad_norm_(net.parameters(), 0.01)
        assert hvd.allreduce(norm).item() == pytest.approx(norm.item())
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()
    nn.functional.mse_loss(net(x), y).backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize"):
        optimizer.step()
    optimizer.zero_grad()
    # Losses that reach different parameters, one backward pass each, on some ranks only one.
    net.first(x).sum().backward()
    if me == 0:
        net.unused(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert net.unused.weight.grad.flatten().tolist() == pytest.approx([1 / n] * 4)
    # A rank without any gradient.
    optimizer.zero_grad()
    if me:
        net(x).sum().backward()
    optimizer.step()
    assert hvd.allgather(net.last.bias.detach().unsqueeze(0)).var(0).max() == 0
    # Too many passes, and gradients thrown away.
    optimizer.zero_grad()
    net(x).sum().backward()
    with pytest.raises(AssertionError, match="more than backward_passes_per_step"):
        net(x).sum().backward()
    with pytest.raises(AssertionError, match="zero_grad"):
        optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())  # begins again
    optimizer.zero_grad()
    net(x).sum().backward()
    optimizer.step()
    # Frozen and thawed while training.
    net.first.requires_grad_(False)
    optimizer.zero_grad()
    net(x).sum().backward()
    optimizer.step()
    net.first.requires_grad_(True)
    optimizer.zero_grad()
    net(x).sum().backward()
    optimizer.step()
    assert hvd.allgather(net.first.bias.detach().unsqueeze(0)).var(0).max() == 0


def unusual(_: Group) -> None:
    """Frozen layers, gradients that the script resets itself, shared states, unequal models."""
    import torch
    from torch import nn

    import paceline.horovod.torch as hvd

    hvd.init()
    me, n = hvd.rank(), hvd.size()

    # A layer is frozen before the optimizer is made, and another one is sparse.
    table, last = nn.Embedding(5, 2, sparse=True), nn.Linear(2, 1)
    last.bias.requires_grad_(False)
    for module in (table, last):
        hvd.broadcast_parameters(module.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([*table.parameters(), *last.parameters()], lr=0.1),
        [("table", table.weight), ("weight", last.weight), ("bias", last.bias)],
    )
    for _ in range(2):
        optimizer.zero_grad()
        last(table(torch.tensor([me, 4]))).sum().backward()
        optimizer.step()
    assert hvd.allgather(table.weight.detach().unsqueeze(0)).var(0).max() == 0
    assert hvd.allgather(last.weight.detach().unsqueeze(0)).var(0).max() == 0

    # The script resets gradients by hand. A scheduler that was made for the
    # plain optimizer sees rank 0's rate, and changes that of the distributed one.
    net = nn.Linear(3, 2)
    plain = torch.optim.SGD(net.parameters(), lr=1.0 + me, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=net.named_parameters())
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for _ in range(2):
        net(torch.full((1, 3), float(me))).sum().backward()
        optimizer.step()
        assert net.weight.grad.eq((n - 1) / 2).all()
        for param in net.parameters():
            param.grad.detach_().zero_()
        plain.param_groups[0]["lr"] *= 0.5  # as the scheduler does
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert optimizer.param_groups is plain.param_groups and optimizer.state is plain.state

    # Models of other shapes whose gradients fill as many cache lines.
    other = nn.Linear(3, 2 + me)
    unequal = hvd.DistributedOptimizer(torch.optim.SGD(other.parameters(), lr=0.1))
    other(torch.ones(1, 3)).sum().backward()
    with pytest.raises(hvd.HorovodInternalError, match=rf"\[{2 + me}, 3\].*same names, shapes"):
        unequal.step()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == n
    with pytest.raises(ValueError, match="is one already"):
        hvd.DistributedOptimizer(optimizer)
    with pytest.raises(ValueError, match="compression='fp16'"):
        hvd.DistributedOptimizer(plain, compression="fp16")


def trains_in_every_way(group: Group) -> None:
    trains(group)
    unusual(group)


def test_a_step_equals_that_of_one_process() -> None:
    run_ranks(2, trains_in_every_way)


def surroundings(_: Group) -> None:
    """Joined ranks, optimizer states, sparse gradients, batch norm, process sets, paces."""
    import torch
    from torch import nn

    import paceline.horovod.torch as hvd

    hvd.init()
    me, n = hvd.rank(), hvd.size()
    # Uneven numbers of steps, with join.
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0))
    for step in range(1 + me):
        optimizer.zero_grad()
        net(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        working = sum(rank >= step for rank in range(n))
        assert net.bias.grad.tolist() == pytest.approx([working / n] * 2)
    assert hvd.join() == n - 1

    # The state of every optimizer, also of one that has none yet; no gradients appear.
    kinds = ["SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "RMSprop", "Rprop", "Adamax", "NAdam"]
    for kind in [*kinds, "RAdam", "ASGD", "LBFGS", "SparseAdam"]:
        for steps in (0, 2):
            model = nn.Embedding(3, 2, sparse=True) if kind == "SparseAdam" else nn.Linear(3, 2)
            given = {"lr": 0.1 * (me + 1)}
            made = getattr(torch.optim, kind)(model.parameters(), **given)

            def closure(model=model, made=made) -> torch.Tensor:  # type: ignore[no-untyped-def]
                made.zero_grad()
                inputs = torch.tensor([me]) if kind == "SparseAdam" else torch.ones(2, 3) * (me + 1)  # noqa: B023
                found = model(inputs).square().sum()
                found.backward()
                return found

            for _ in range(steps if me == 0 else 0):
                made.step(closure)
            for param in model.parameters():
                param.grad = None
            hvd.broadcast_optimizer_state(made, root_rank=0)
            assert made.param_groups[0]["lr"] == pytest.approx(0.1)
            sizes = hvd.allgather_object(len(made.state_dict()["state"]))
            assert len(set(sizes)) == 1 and (sizes[0] > 0 or steps == 0 or kind == "SGD")
            assert all(param.grad is None for param in model.parameters())

    # Sparse gradients stay sparse, or become dense.
    for as_dense in (False, True):
        table = nn.Embedding(6, 2, sparse=True)
        hvd.broadcast_parameters(table.state_dict(), 0)
        wrapped = hvd.DistributedOptimizer(
            torch.optim.SGD(table.parameters(), lr=0.1), sparse_as_dense=as_dense
        )
        for _ in range(2):
            wrapped.zero_grad()
            table(torch.tensor([me, 5])).sum().backward()
            wrapped.step()
            assert table.weight.grad.is_sparse is not as_dense
            grad = table.weight.grad.to_dense()
            assert grad[me].tolist() == pytest.approx([1 / n] * 2)
            assert grad[5].tolist() == pytest.approx([1.0] * 2)

    # Batch normalization over all ranks equals that of the whole batch.
    whole = torch.randn(4 * n, 3, 2, generator=torch.Generator().manual_seed(7))
    sync, plain = hvd.SyncBatchNorm(3), nn.BatchNorm1d(3)
    mine, everything = whole[4 * me : 4 * me + 4].clone(), whole.clone()
    for tensor, module in ((mine, sync), (everything, plain)):
        module(tensor.requires_grad_()).square().sum().backward()
    torch.testing.assert_close(mine.grad, everything.grad[4 * me : 4 * me + 4])
    torch.testing.assert_close(sync.running_var, plain.running_var)
    sync.eval()(whole[: me + 1])  # no communication

    pair = hvd.add_process_set([0, 1])
    member = nn.Linear(2, 1)
    hvd.broadcast_parameters(member.state_dict(), 0)
    partial = hvd.DistributedOptimizer(
        torch.optim.SGD(member.parameters(), lr=1.0), process_set=pair
    )
    member(torch.full((1, 2), float(me))).sum().backward()
    partial.step()
    assert member.weight.grad.tolist() == [[0.5, 0.5] if me < 2 else [2.0, 2.0]], me

    # One argument more: another pace. The model is found when it is called.
    deep = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    paced = hvd.DistributedOptimizer(
        torch.optim.SGD(deep.parameters(), lr=0.1), deep.named_parameters(), pace="local:2"
    )
    for _ in range(2):
        paced.zero_grad()
        deep(torch.full((1, 2), float(me))).sum().backward()
        paced.synchronize()
        with paced.skip_synchronize():
            paced.step()
    assert hvd.allgather(deep[0].weight.detach().unsqueeze(0)).var(0).max() == 0

    def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(module.parameters(), lr=0.1)

    fresh = nn.Linear(2, 2)
    named = list(fresh.named_parameters())
    for arguments, message in [
        ({"named_parameters": named[:1]}, "lacks 1 of the optimizer's parameters"),
        ({"named_parameters": [("a", p) for _, p in named]}, "must be unique"),
        ({"named_parameters": fresh.parameters()}, "sequence of tuples"),
        ({"op": hvd.Adasum}, "Adasum is not supported"),
        ({"op": hvd.Max}, "pass Average or Sum"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "needs op=Average"),
        ({"backward_passes_per_step": 0}, "at least 1"),
        ({"groups": "all"}, "groups: pass a number"),
        ({"bucket_mb": 4}, "needs pace="),
        ({"pace": "local:2", "op": hvd.Sum}, "averages"),
    ]:
        with pytest.raises(ValueError, match=message):
            hvd.DistributedOptimizer(optimizer_of(fresh), **arguments)
    with pytest.raises(ValueError, match="not a state_dict"):
        hvd.broadcast_parameters(3, root_rank=0)
    unseen = hvd.DistributedOptimizer(optimizer_of(fresh), pace="local:2")
    with pytest.raises(ValueError, match="no module with all of the optimizer's parameters"):
        unseen.step()


def test_join_states_sparse_gradients_and_batch_norm() -> None:
    run_ranks(3, surroundings)


def served(_: Group) -> None:
    """A script of Horovod's through parameter servers, with one argument."""
    import torch
    from torch import nn

    import paceline.horovod.torch as hvd

    hvd.init()
    net = nn.Linear(4, 1)
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.05),
        named_parameters=net.named_parameters(),
        pace="ssp:3",
    )
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (net(torch.ones(8, 4)) - 3).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 10


def test_a_pace_with_servers() -> None:
    run_ranks(2, served, servers=1)
