"""The same bits every time: on one host those of folding in rank order, whatever the memory."""

from __future__ import annotations

import pytest
import torch

import paceline as pl
from paceline import _core
from paceline.comm.group import Group
from support import run_ranks
from support.reference import bits

COUNTS = (1, 63, 4096, 4097, 65_536 + 5, 200_003)


def noise(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers whose sum depends on the order of adding them."""
    generator = torch.Generator().manual_seed(rank * 7 + count)
    scale = 10.0 ** torch.randint(-3, 4, (count,), generator=generator).float()
    return (torch.randn(count, generator=generator) * scale).to(dtype)


def results(group: Group, dtype: torch.dtype, op: str) -> list[torch.Tensor]:
    """All-reduce every size in both kinds of memory, and reduce-scatter it."""
    found = []
    for count in COUNTS:
        mine = noise(group.rank, count, dtype)
        found.append(group.all_reduce(mine.clone(), op))
        found.append(group.all_reduce(pl.empty(count, dtype=dtype).copy_(mine), op))
        found.append(group.reduce_scatter([mine] * group.size, op))
    return found


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_one_host_folds_in_rank_order(world_size: int) -> None:
    def battery(group: Group) -> None:
        n = group.size
        for portable in (False, True):
            _core.use_portable_kernels(portable)
            for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
                wide = torch.float64 if dtype == torch.float64 else torch.float32
                for op in ("sum", "mean"):
                    found = iter(results(group, dtype, op))
                    for count in COUNTS:
                        total = noise(0, count, dtype).to(wide)
                        for rank in range(1, n):
                            total = total + noise(rank, count, dtype).to(wide)
                        expected = (total / n if op == "mean" else total).to(dtype)
                        for way in ("torch memory", "engine memory", "reduce_scatter"):
                            case = (_core.kernel_name(), dtype, op, count, way)
                            assert bits(next(found)) == bits(expected), case

    run_ranks(world_size, battery)


@pytest.mark.parametrize("hosts", [2, 3, 4, (0, 1, 0, 1), (0, 1, 1, 1)])
def test_several_hosts_agree_and_repeat_themselves(hosts) -> None:
    def battery(group: Group) -> list[bytes]:
        first = results(group, torch.float32, "sum")
        second = results(group, torch.float32, "sum")
        _core.use_portable_kernels(True)
        third = results(group, torch.float32, "sum")
        for i, found in enumerate(zip(first, second, third, strict=True)):
            assert bits(found[0]) == bits(found[1]) == bits(found[2]), i
            count = COUNTS[i // 3]
            exact = sum(noise(rank, count, torch.float64) for rank in range(group.size))
            # Another order of adding moves the last bits of the largest summand, about 4e3.
            assert torch.allclose(found[0].double(), exact, rtol=1e-5, atol=1e-2), i
        return [bits(tensor) for i, tensor in enumerate(first) if i % 3 != 2]

    everybody = run_ranks(4, battery, hosts=hosts)
    assert all(others == everybody[0] for others in everybody)


def test_not_a_number_is_never_lost() -> None:
    def battery(group: Group) -> None:
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
            for op in ("sum", "mean", "min", "max", "product"):
                for count in (10, 70_000):
                    tensor = torch.ones(count, dtype=dtype)
                    if group.rank == 1:
                        tensor[3], tensor[4] = float("nan"), float("inf")
                    group.all_reduce(tensor, op)
                    case = (group.rank, dtype, op, count)
                    assert bool(tensor[3].isnan()), case
                    assert tensor[4].item() == (1 if op == "min" else float("inf")), case
                    assert bool(tensor[5:].isfinite().all()), case

    for hosts in (1, 3):
        run_ranks(3, battery, hosts=hosts)
