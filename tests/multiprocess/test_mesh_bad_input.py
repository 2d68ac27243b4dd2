"""Meshes that cannot work: the same clear error on every worker, before anything is trained."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import paceline as pl
from paceline.comm.group import Group
from support import run_ranks

PIPELINED: dict[str, Any] = {"mesh": "pp=2", "loss": F.cross_entropy, "microbatches": 2}
EXAMPLE = (torch.zeros(4, 6),)


def stack(layers: int = 4, width: int = 6) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


Wrong = dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]]

MESHES: Wrong = {
    "a product": (stack, {"mesh": "dp=2,tp=2"}, r"dp 2 x tp 2 = 4.*has 2 workers"),
    "one axis": (stack, {"mesh": "tp=3"}, r"tp 3 = 3.*has 2 workers"),
    "an unknown axis": (stack, {"mesh": "dp=1,cp=2"}, r"'cp=2' is not an axis.*dp, pp, fsdp, tp"),
    "an axis twice": (stack, {"mesh": "tp=2,tp=1"}, r"tp is given twice"),
    "no size": (stack, {"mesh": "tp"}, r"'tp' is not an axis"),
    "nothing": (stack, {"mesh": ""}, r"is not an axis"),
    "a size of zero": (stack, {"mesh": "dp=2,tp=0"}, r"tp=0.*at least 1"),
    "pp and fsdp": (stack, {"mesh": "pp=2,fsdp=2"}, r"pp and fsdp cannot be combined"),
}
STAGES: Wrong = {
    "a split that is not there": (stack, {"example": EXAMPLE, "splits": ["7"]}, r"'7'"),
    "too many splits": (stack, {"example": EXAMPLE, "splits": ["1", "2"]}, r"2 split|3 stages"),
    "fewer layers than stages": (lambda: stack(1), {"example": EXAMPLE}, r"2 stages"),
    "no example": (stack, {}, r"example="),
    "no loss": (stack, {"example": EXAMPLE, "loss": None}, r"loss="),
    "an unknown schedule": (stack, {"example": EXAMPLE, "schedule": "2f2b"}, r"2f2b.*1f1b"),
    "no microbatches": (stack, {"example": EXAMPLE, "microbatches": 0}, r"microbatches"),
}
SLICES: Wrong = {
    "unknown activations": (stack, {"activations": "forget"}, r"forget.*keep|keep.*forget"),
    "a negative norm": (stack, {"max_norm": -1.0}, r"max_norm"),
    "an optimizer that mixes elements": (stack, {"optimizer": torch.optim.Adafactor}, "Adafactor"),
    "an unknown option": (stack, {"colour": "red"}, "colour"),
}


def refuse(group: Group, wrong: Wrong, common: dict[str, Any]) -> dict[str, str]:
    """Return what each wrong call says; a call that is not refused says so."""
    told = {}
    for name, (make, options, _) in wrong.items():
        model, chosen = make(), {**common, **options}
        kind = chosen.pop("optimizer", torch.optim.SGD)
        told[name] = what_is_said(model, kind(model.parameters(), lr=0.1), chosen)
    group.barrier()  # nobody is left waiting
    return told


CALLS: dict[str, tuple[Wrong, dict[str, Any]]] = {
    "meshes": (MESHES, {}),
    "stages": (STAGES, PIPELINED),
    "slices": (SLICES, {"mesh": "tp=2", "loss": F.cross_entropy}),
}


def what_is_said(
    model: nn.Module, optimizer: torch.optim.Optimizer, options: dict[str, Any]
) -> str:
    try:
        pl.distribute(model, optimizer, **options)
    except pl.errors.UsageError as error:
        return str(error)
    except Exception as error:
        return f"not a UsageError: {error!r}"
    return "not refused"


@pytest.mark.parametrize("wrong", ["meshes", "stages", "slices"])
def test_what_cannot_work_is_refused_with_what_to_do(wrong: str) -> None:
    def body(group: Group) -> dict[str, str]:
        return refuse(group, *CALLS[wrong])

    problems = [
        f"rank {rank}, {name}: expected {words!r}, was told {told[name]!r}"
        for rank, told in enumerate(run_ranks(2, body))
        for name, (_, _, words) in CALLS[wrong][0].items()
        if told[name].startswith("not ") or not re.search(words, told[name], re.DOTALL)
    ]
    assert not problems, "\n".join(problems)


def test_a_batch_that_microbatches_do_not_divide() -> None:
    def body(group: Group) -> list[str]:
        model = stack()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {**PIPELINED, "example": EXAMPLE}
        model, optimizer = pl.distribute(model, optimizer, **options)
        said = []
        for rows in (5, 1):
            with pytest.raises(pl.errors.UsageError) as caught:
                model.train_step(torch.zeros(rows, 6), torch.zeros(rows, dtype=torch.long))
            said.append(str(caught.value))
        loss = model.train_step(torch.zeros(8, 6), torch.zeros(8, dtype=torch.long))
        assert torch.isfinite(torch.as_tensor(loss))  # it goes on
        group.barrier()
        return said

    for five, one in run_ranks(2, body):
        assert re.search(r"\b5\b", five) and re.search(
            r"\b2\b.*microbatches|microbatches.*\b2\b", five
        )
        assert re.search(r"\b1\b", one)


def test_stages_cannot_be_called_like_a_whole_model() -> None:
    def body(group: Group) -> None:
        model = stack()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = pl.distribute(model, optimizer, **PIPELINED, example=EXAMPLE)
        with pytest.raises(pl.errors.UsageError, match="train_step"):
            model(torch.zeros(4, 6)).sum().backward()
        group.barrier()

    run_ranks(2, body)


def test_train_step_needs_a_loss_and_a_job_has_one_mesh() -> None:
    def body(group: Group) -> None:
        model = stack()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = pl.distribute(model, optimizer, mesh="tp=2")
        with pytest.raises(pl.errors.UsageError, match="loss"):
            model.train_step(torch.zeros(4, 6), torch.zeros(4, dtype=torch.long))
        other = stack()
        with pytest.raises(pl.errors.UsageError, match="fsdp=2.*tp=2"):
            pl.distribute(other, torch.optim.SGD(other.parameters(), lr=0.1), mesh="fsdp=2")
        group.barrier()

    run_ranks(2, body)
