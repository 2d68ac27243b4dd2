"""check_consistency: equal ranks get equal digests, different ones hear what differs and where."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.comm.group import Group
from paceline.errors import InconsistentRanks, UsageError
from support import run_processes, run_ranks


def network() -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))
    model.to(memory_format=torch.channels_last)
    model.register_buffer("narrow", torch.arange(5).to(torch.bfloat16))
    model.register_buffer("nothing", torch.empty(0))
    model.register_buffer("flag", torch.tensor(True))
    model.register_buffer("turned", torch.arange(6.0).view(2, 3).t())
    model.register_buffer("table", torch.eye(3).to_sparse())
    model.register_buffer("wave", torch.ones(2, dtype=torch.complex64).conj())
    return model


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(2, 3, 4, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


# -- in the ranks ---------------------------------------------------------------------------------


def equal_ranks(group: Group) -> list[str]:
    model, optimizer = trained()
    digests = [pl.check_consistency(model), pl.check_consistency(model, optimizer)]
    if group.rank == 1:  # other memory, the same values
        model[0].weight.data = model[0].weight.data.contiguous()
        model.turned = model.turned.contiguous()
    assert pl.check_consistency(model) == digests[0]
    model[0].weight.data[0, 0, 0, 0] += 1
    digests.append(pl.check_consistency(model))
    lazy = nn.Sequential(nn.LazyLinear(2))
    digests.append(pl.check_consistency(lazy))
    return digests


def caught(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> InconsistentRanks:
    with pytest.raises(InconsistentRanks) as info:
        pl.check_consistency(model, optimizer)
    return info.value


def differing(group: Group, rank: int, change: Callable) -> tuple[str, str, tuple]:
    model, optimizer = trained()
    if group.rank == rank:
        with torch.no_grad():
            change(model, optimizer)
    error = caught(model, optimizer)
    pl.check_consistency(network())  # the ranks are still in step
    return error.name, str(error), error.sides


def change_weight(model, optimizer):
    model[3].weight[1, 3] -= 0.5
    model[3].bias[0] += 9.0


def change_narrow(model, optimizer):
    model.narrow[2] = 2.015625


def change_sign_of_zero(model, optimizer):
    model.turned[0, 0] = -0.0


def change_to_infinity(model, optimizer):
    model.turned[0, 0] = float("inf")


def change_to_nan(model, optimizer):
    model.turned[0, 0] = float("nan")


def change_table(model, optimizer):
    model.table = model.table * 2


def change_shape(model, optimizer):
    model.nothing = torch.zeros(2)


def change_names(model, optimizer):
    model.register_buffer("extra", torch.zeros(1))


def change_state(model, optimizer):
    optimizer.state[model[3].bias]["exp_avg"][1] = 7.0


def change_rate(model, optimizer):
    optimizer.param_groups[0]["betas"] = (0.9, 0.5)


def change_order(model, optimizer):
    flag = model.flag
    del model.flag
    model.register_buffer("flag", flag)


CHANGES = {
    change_weight: (
        "parameter 3.weight",
        "float32[2, 16] differs",
        "by up to 0.5, at flat index 19",
    ),
    change_narrow: ("buffer narrow", "bfloat16[5] differs", "by up to 0.0156, at flat index 2"),
    change_sign_of_zero: ("buffer turned", "differs", "in the sign of zero or in what is not a"),
    change_to_infinity: ("buffer turned", "differs", "by up to inf, at flat index 0"),
    change_to_nan: ("buffer turned", "float32[3, 2] differs", "("),
    change_table: ("buffer table", "float32[3, 3] torch.sparse_coo differs", ""),
    change_shape: ("buffer nothing", "float32[0] on rank", "float32[2] on rank"),
    change_names: ("buffer extra", "buffer extra: float32[1] on rank", "buffer extra: nothing on"),
    change_order: ("", "buffer flag: bool[] on rank", "buffer turned: float32[3, 2] on rank"),
    change_state: ("optimizer state exp_avg of 3.bias", "float32[2] differs", "by up to"),
    change_rate: ("optimizer group 0 betas [1]", "float differs", "(here: 0."),
}


def all_changes(group: Group, rank: int) -> list[tuple[str, str, tuple]]:
    return [differing(group, rank, change) for change in CHANGES]


def three_sides(group: Group) -> tuple:
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, [1.0, 2.0, 2.0, 3.0][group.rank])
    error = caught(model)
    assert "ranks 1, 2 against rank 0 against rank 3 (by up to 2, at flat index 0)" in str(error)
    return error.sides


# -- in the test session --------------------------------------------------------------------------


def test_equal_ranks_have_equal_digests_in_every_run():
    runs = [run_ranks(2, equal_ranks), run_ranks(3, equal_ranks, hosts=3)]
    assert len({tuple(digests) for run in runs for digests in run}) == 1
    digests = runs[0][0]
    assert len(set(digests)) == len(digests)
    assert all(len(digest) == 16 and int(digest, 16) >= 0 for digest in digests)


@pytest.mark.parametrize(("world_size", "rank"), [(2, 1), (3, 0)])
def test_every_difference_is_named_on_all_ranks(world_size, rank):
    told = run_ranks(world_size, all_changes, rank)
    others = tuple(r for r in range(world_size) if r != rank)
    for number, (change, (name, *texts)) in enumerate(CHANGES.items()):
        for found, message, sides in (of_rank[number] for of_rank in told):
            assert name in found, change
            assert all(text in message for text in texts), message
            assert set(sides) == {others, (rank,)}, message
            if world_size > 2:
                assert sides[0] == others


def test_more_than_two_sides():
    assert set(map(tuple, run_ranks(4, three_sides))) == {((1, 2), (0,), (3,))}


def test_before_init_it_says_so():
    (outcome,) = run_processes(check_before_init, [{}])
    assert outcome.error is None and outcome.status == 0, outcome


def check_before_init(number: int) -> None:
    with pytest.raises(UsageError, match=r"call paceline\.init\(\) first"):
        pl.check_consistency(nn.Linear(1, 1))
