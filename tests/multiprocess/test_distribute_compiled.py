"""Models under torch.compile, before and after they are distributed."""

from __future__ import annotations

import copy

import pytest
import torch
from against_one_process import UPDATES, Pair, loss, require_close, rows, sgd
from torch import nn

import paceline as pl
from paceline.comm.group import Group
from support import run_ranks


def compiled(group: Group, backend: str) -> None:
    for update in UPDATES:
        for first in (True, False):
            torch.compiler.reset()
            torch.manual_seed(3)
            model = nn.Sequential(
                nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 300), nn.Linear(300, 2)
            )
            pair = Pair.__new__(Pair)
            pair.group, pair.plain = group, model.double()
            pair.plain_optimizer = sgd(model.parameters())
            inner = copy.deepcopy(model)
            compile = lambda m: torch.compile(m, backend=backend, fullgraph=True)  # noqa: E731
            pair.optimizer = sgd(inner.parameters())
            pair.ours = compile(inner) if first else inner
            pl.distribute(pair.ours, pair.optimizer, update=update)
            called = pair.ours if first else compile(inner)
            assert called.no_sync
            for step in range(3):
                x = rows(group, seed=step)
                for forward, optimizer in ((model, pair.plain_optimizer), (called, pair.optimizer)):
                    optimizer.zero_grad()
                    loss(forward, x if forward is model else pair.mine(x)).backward()
                    optimizer.step()
                for name, param in inner.named_parameters():
                    require_close(param, model.get_parameter(name), f"{first} {name}")
                    require_close(param.grad, model.get_parameter(name).grad, f"{first} {name}")
                pl.check_consistency(inner, pair.optimizer)


def test_compiled_models() -> None:
    run_ranks(2, compiled, "aot_eager")


@pytest.mark.slow
def test_models_compiled_to_machine_code() -> None:
    run_ranks(2, compiled, "inductor", timeout_s=110)
