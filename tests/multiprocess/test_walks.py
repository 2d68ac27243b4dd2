"""How many of our files a gradient passes from its hook to the applied update: traced, not told.

The Python files come from a real step of two workers. The C++ files are a list, whose functions are
looked for in the sources. The page docs/gradient-journey.md shows both, and is held to them.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.comm.group import Group
from paceline.data_parallel.update.step import ReplicatedUpdate, ShardedUpdate
from support import run_ranks
from support.passages import documented
from support.walks import ROOT, Walk, cpp_problems

MOST_FILES = 14
# In the order in which the request of a bucket reaches them; support/walks.py has the rule.
CPP = {
    "bindings/ready_hook.cc": ["void run(", "on_full()"],
    "bindings/module.cc": ["start_all_reduce", "void wait("],
    "paceline/collectives/group.cc": ["Group::submit", "Group::enqueue", "Group::run"],
    "paceline/collectives/request.cc": ["Descriptor describe(", "void require_match("],
    "paceline/engine/engine.cc": ["Engine::announce_work", "Engine::wait_any", "Engine::poll_all"],
    "paceline/loop/operation.cc": ["Operation::advance", "Operation::finish"],
    "paceline/collectives/team.cc": ["Team::run(", "Team::post_request", "Team::reduce_slice"],
    "paceline/reduce/kernels.cc": ["void reduce("],
}


def step_walk(group: Group, update: str) -> tuple[list[str], list[str]]:
    del group
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 30), nn.Tanh(), nn.Linear(30, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = pl.distribute(model, optimizer, update=update)
    update_class = ShardedUpdate if update == "sharded" else ReplicatedUpdate
    # The hook of a small parameter is in the core, and calls this when its bucket is full.
    walk = Walk(begin="_submit_full", end=update_class.run)
    for watch in (nullcontext(), nullcontext(), nullcontext(), walk):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 6)).square().mean()
        with watch:
            loss.backward()
            optimizer.step()
    return walk.files, walk.later


def test_the_cpp_files_of_an_all_reduce_are_there() -> None:
    assert cpp_problems(CPP) == []


def table(heading: str) -> list[str]:
    return list(documented(ROOT / "docs/gradient-journey.md", heading))


@pytest.mark.parametrize("update", ["replicated", "sharded"])
def test_a_gradient_passes_few_files(update: str) -> None:
    (files, later), other = run_ranks(2, step_walk, update)
    assert (files, later) == other  # the same on both workers
    shown = table("## The walk, file by file")
    python = [name for name in shown if not name.startswith("cpp/")]
    cpp = [name.removeprefix("cpp/") for name in shown if name.startswith("cpp/")]
    assert cpp == list(CPP)
    assert later == table("## After the update")
    assert files == python
    assert len(files) + len(CPP) <= MOST_FILES
