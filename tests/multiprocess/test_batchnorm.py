"""BatchNorm over the global batch against one process that has all samples.

Every rank knows the whole batch and computes the reference itself with plain modules. Tolerances:
the statistics are merged from parts, so results differ from one pass over all samples by rounding:
a few units in the last place of float64, and of float32 for sums of some hundred values.
"""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline.comm.group import Group
from paceline.data_parallel.model_state.batchnorm import use_global_statistics
from paceline.errors import UsageError
from paceline.runtime import job
from support import run_ranks
from support.reference import bits

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}
SHAPES = {nn.BatchNorm1d: (3,), nn.BatchNorm2d: (3, 4, 5), nn.BatchNorm3d: (3, 2, 3, 2)}


# -- in the ranks ---------------------------------------------------------------------------------


def parts_of(batch: torch.Tensor, sizes: list[int], rank: int) -> torch.Tensor:
    start = sum(sizes[:rank])
    return batch[start : start + sizes[rank]]


def close(found: torch.Tensor | None, expected: torch.Tensor | None, what: str) -> None:
    if expected is None:
        assert found is None, what
        return
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(
        found, expected, rtol=tolerance, atol=tolerance * 10, msg=lambda text: f"{what}: {text}"
    )


def train(module: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """One forward and backward whose output gradient differs from element to element."""
    out = module(x)
    ((out - target) ** 2).sum().backward()
    return out.detach()


def check_against_one_process(
    group: Group,
    plain: nn.Module,
    sizes: list[int],
    dtype: torch.dtype,
    *,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> None:
    plain = plain.to(dtype)
    mine = copy.deepcopy(plain)
    assert use_global_statistics(mine, group) == 1
    what = f"{plain}, {sizes}, {dtype}"
    for step in range(2):
        random = torch.Generator().manual_seed(step)
        shape = (sum(sizes), *SHAPES[type(plain)])
        batch, target = (torch.randn(shape, dtype=dtype, generator=random) for _ in range(2))
        batch = batch.contiguous(memory_format=memory_format)
        whole = batch.clone(memory_format=torch.preserve_format).requires_grad_()
        part = parts_of(batch, sizes, group.rank).requires_grad_()
        plain.zero_grad()
        mine.zero_grad()
        expected = train(plain, whole, target)
        found = train(mine, part, parts_of(target, sizes, group.rank))
        close(found, parts_of(expected, sizes, group.rank), f"output of {what}")
        close(part.grad, parts_of(whole.grad, sizes, group.rank), f"input gradient of {what}")
        for name, param in plain.named_parameters():
            total = group.all_reduce(mine.get_parameter(name).grad.clone())
            close(total, param.grad, f"gradient of {name} of {what}")
        for name, buffer in plain.named_buffers():
            if buffer.is_floating_point():
                close(mine.get_buffer(name), buffer, f"{name} of {what}")
                everybody = group.all_gather(mine.get_buffer(name))
                assert len({bits(other) for other in everybody}) == 1, f"{name} of {what}"
            else:
                assert torch.equal(mine.get_buffer(name), buffer), f"{name} of {what}"
        if sizes[group.rank]:
            assert found.stride() == parts_of(expected, sizes, group.rank).stride(), what


def all_kinds(group: Group) -> None:
    n = group.size
    even, uneven = [4] * n, [1 + 3 * rank for rank in range(n)]
    one_empty = [5] * (n - 1) + [0]
    first_empty = [0] + [1] * (n - 1) if n > 2 else [0, 3]
    for kind in SHAPES:
        for sizes in (even, uneven, one_empty, first_empty):
            for dtype in TOLERANCE:
                check_against_one_process(group, kind(3), sizes, dtype)
    for options in (
        {"momentum": None},
        {"affine": False},
        {"track_running_stats": False},
        {"affine": False, "track_running_stats": False, "eps": 0.1},
        {"momentum": 0.7},
    ):
        for dtype in TOLERANCE:
            check_against_one_process(group, nn.BatchNorm2d(3, **options), uneven, dtype)
    for dtype in TOLERANCE:
        check_against_one_process(
            group, nn.BatchNorm2d(3), uneven, dtype, memory_format=torch.channels_last
        )
    far_from_zero(group)
    weighted(group)


def far_from_zero(group: Group) -> None:
    """Sums of squares would leave nothing of a variance of 1 around a mean of 10 000."""
    batch = torch.randn(64 * group.size, 3, generator=torch.Generator().manual_seed(0)) + 10_000
    mine = nn.BatchNorm1d(3, momentum=None)
    use_global_statistics(mine, group)
    mine(parts_of(batch, [64] * group.size, group.rank))
    expected = batch.double().var(0).float()
    # The mean of each rank is a float32, whose last place is worth 0.001 there.
    torch.testing.assert_close(mine.running_var, expected, rtol=2e-3, atol=0)


def weighted(group: Group) -> None:
    """Each rank's loss is the mean of its own samples and counts by their number; the last rank
    repeats a sample that must not count."""
    sizes = [*range(2, group.size + 1), 0]
    shares = [size * group.size / sum(sizes) for size in sizes]
    torch.manual_seed(5)
    batch = torch.randn(sum(sizes), 4, dtype=torch.float64)
    part = parts_of(batch, sizes, group.rank) if sizes[group.rank] else batch[:1] * 1e9
    plain = nn.Sequential(
        nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)
    ).double()
    mine = copy.deepcopy(plain)
    use_global_statistics(mine, group)
    plain(batch).pow(2).mean().backward()
    job.current().contribution.set(shares[group.rank])
    mine(part).pow(2).mean().backward()
    job.current().contribution.set(1.0)
    for name, param in plain.named_parameters():
        scaled = mine.get_parameter(name).grad * shares[group.rank]
        close(group.all_reduce(scaled, "mean"), param.grad, name)
    close(mine[3].running_var, plain[3].running_var, "running variance")


def without_communication(group: Group) -> None:
    """What only rank 0 does here would wait for the others if it communicated."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    use_global_statistics(model, group)
    x = torch.randn(2, 3, 4, 4)
    model(x + group.rank)
    if group.rank == 0:
        model.eval()
        plain = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
        plain.load_state_dict(model.state_dict())
        assert torch.equal(plain.eval()(x), model(x))
        assert type(model[1]) is nn.BatchNorm2d
        twin = copy.deepcopy(model.train())
        assert torch.equal(twin(x), plain.train()(x))
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        torch.load(file, weights_only=False)(x)
    group.barrier()
    model.train()
    before = model[1].running_mean.clone()
    model(x + group.rank)
    assert not torch.equal(before, model[1].running_mean)


def half_precision(group: Group) -> None:
    for module, dtype in (
        (nn.BatchNorm2d(3), torch.bfloat16),  # as autocast has it: only the input is narrow
        (nn.BatchNorm2d(3).bfloat16(), torch.bfloat16),
        (nn.BatchNorm2d(3).half(), torch.float16),
    ):
        batch = torch.randn(4 * group.size, 3, 5, 5, generator=torch.Generator().manual_seed(0))
        batch, mine = batch.to(dtype), copy.deepcopy(module)
        use_global_statistics(mine, group)
        sizes = [4] * group.size
        part = parts_of(batch, sizes, group.rank).clone().requires_grad_()
        whole = batch.clone().float().requires_grad_()
        expected = train(module.float(), whole, torch.zeros_like(whole))
        found = train(mine, part, torch.zeros_like(part))
        assert found.dtype == part.grad.dtype == dtype
        # Eight bits of mantissa; the output itself is rounded to them before it is squared.
        close_enough = {"rtol": 2e-2, "atol": 2e-2}
        torch.testing.assert_close(
            found.float(), parts_of(expected, sizes, group.rank), **close_enough
        )
        torch.testing.assert_close(
            part.grad.float(), parts_of(whole.grad, sizes, group.rank), **close_enough
        )
        assert mine.weight.grad.dtype == mine.weight.dtype


def checkpointed(group: Group) -> None:
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 1)).double()
    mine = copy.deepcopy(plain)
    use_global_statistics(mine, group)
    batch = torch.randn(6 * group.size, 4, dtype=torch.float64)
    part = parts_of(batch, [6] * group.size, group.rank)
    for use_reentrant in (False, True):
        plain.zero_grad()
        mine.zero_grad()
        for model, x in ((plain, batch), (mine, part)):
            x = x.clone().requires_grad_()
            checkpoint(model, x, use_reentrant=use_reentrant).pow(2).sum().backward()
        for name, param in plain.named_parameters():
            close(group.all_reduce(mine.get_parameter(name).grad), param.grad, name)
        close(mine[1].running_mean, plain[1].running_mean, "running mean")
        close(mine[1].running_var, plain[1].running_var, "running variance")
        assert mine[1].num_batches_tracked == plain[1].num_batches_tracked


def compiled(group: Group) -> None:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 1)).double()
    use_global_statistics(model, group)
    fast = torch.compile(copy_of := copy.deepcopy(model), backend="eager")
    assert use_global_statistics(fast, group) == 1
    part = torch.randn(5, 4, dtype=torch.float64) + group.rank
    for _ in range(2):
        results = [train(m, part, torch.zeros(5, 1)) for m in (model, fast)]
        close(results[1], results[0], "output")
    for name, param in model.named_parameters():
        close(copy_of.get_parameter(name).grad, param.grad, name)
    assert torch.equal(copy_of[1].running_var, model[1].running_var)


def refusals(group: Group) -> list[str]:
    class Own(nn.BatchNorm1d):
        def forward(self, x):
            return super().forward(x) * 2

    told = []
    for bad in (nn.SyncBatchNorm(3), nn.LazyBatchNorm2d(), Own(3)):
        model = nn.Sequential(nn.BatchNorm1d(3), bad)
        with pytest.raises(UsageError) as caught:
            use_global_statistics(model, group)
        told.append(str(caught.value))
        assert "forward" not in vars(model[0])
    single = nn.BatchNorm1d(3)
    use_global_statistics(single, group)
    with pytest.raises(UsageError, match="the global batch has 1 value per channel"):
        single(torch.randn(1 if group.rank == 0 else 0, 3))
    assert single(torch.randn(0, 3)).shape == (0, 3)
    assert torch.equal(single.running_var, torch.ones(3))
    x = torch.randn(2, 3, requires_grad=True)
    (slope,) = torch.autograd.grad(single(x).pow(2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()
    assert use_global_statistics(nn.Linear(2, 2), group) == 0
    return told


# -- in the test session --------------------------------------------------------------------------


@pytest.mark.parametrize(("world_size", "hosts"), [(2, 1), (3, 1), (2, 2)])
def test_equals_one_process_with_the_global_batch(world_size, hosts):
    run_ranks(world_size, all_kinds, hosts=hosts)


def test_special_ways_of_training():
    def body(group):
        without_communication(group)
        half_precision(group)
        checkpointed(group)
        compiled(group)

    run_ranks(2, body)


def test_what_cannot_be_done_is_refused():
    told = run_ranks(2, refusals)
    assert told[0] == told[1]
    assert "1 is a SyncBatchNorm, which works on GPUs" in told[0][0]
    assert "1 is a LazyBatchNorm2d, whose size is not known yet" in told[0][1]
    assert "1 is a Own, which has a forward of its own" in told[0][2]


def test_alone_it_is_the_plain_module():
    def body(group):
        plain, mine = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
        assert use_global_statistics(mine, group) == 1
        x = torch.randn(5, 3)
        assert torch.equal(plain(x), mine(x))
        assert torch.equal(plain.running_var, mine.running_var)

    run_ranks(1, body)
