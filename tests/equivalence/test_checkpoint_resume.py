"""A job that goes on from a checkpoint: to the bit as if it had never stopped; or, at another pace
or with other workers, from the values that stood for all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.comm.group import Group
from paceline.state.files import load as reading
from support import run_ranks

STEPS, SAVED_AT = 11, 6

LOCKSTEP = [
    "allreduce[update=replicated]",
    "allreduce[update=sharded]",
    "allreduce[compress=int8(feedback=yes)]",
    "allreduce[compress=topk:0.1+int8]",
    "allreduce[compress=powersgd:2]",
    "allreduce@0, local:3@4",
    "local:4",
    "post_local:3[after=5]",
    "diloco:4",
    "diloco:4[fragments=2,delay=1]",
    "diloco:4[compress=int8]",
    "bmuf:4[after=2]",
    "easgd:3",
    "gossip:ring",
    "bitmap",
    "bitmap[feedback=yes]",
    "partial:0.5[carry=yes]",
]
SERVED = ["ps", "ps[compress=int8(feedback=yes)]", "diloco:4", "bmuf:4[after=2]", "easgd:3"]


def make_model() -> nn.Module:
    torch.manual_seed(5)
    layers = (nn.Linear(16, 96), nn.BatchNorm1d(96), nn.Dropout(0.2), nn.Linear(96, 96), nn.Tanh())
    return nn.Sequential(*layers, nn.Linear(96, 4))


def train(pace: str, directory: str, until: int, resume: str = "auto") -> dict[str, Any]:
    """Train until a step, saving behind some; return what this worker has then."""
    model = make_model()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = pl.distribute(model, optimizer, pace=pace)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
    torch.manual_seed(100 + pl.rank())
    checkpoint = pl.Checkpoint(
        directory, every=SAVED_AT, resume=resume, model=model, scheduler=scheduler
    )
    first = checkpoint.steps
    for _ in range(checkpoint.steps, until):
        x = torch.randn(6, 16)  # from the generator that was saved
        nn.functional.mse_loss(model(x), x[:, :4]).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        checkpoint.step()
    checkpoint.wait()
    if pace in LOCKSTEP or pace in SERVED:
        pl.world().barrier()  # published, if this was the last
    found = {name: value.clone() for name, value in model.state_dict().items()}
    with model.agreed():  # type: ignore[operator]
        agreed = {name: value.clone() for name, value in model.state_dict().items()}
    rate = optimizer.param_groups[0]["lr"]
    return {"first": first, "values": found, "agreed": agreed, "rate": rate}


def train_each(group: Group, paces: list[str], root: str, until: int) -> list[dict[str, Any]]:
    del group
    found = []
    for number, pace in enumerate(paces):
        found.append(train(pace, f"{root}/{number}", until))
    return found


def require_equal(found: dict[str, Any], expected: dict[str, Any], case: str) -> None:
    assert found["rate"] == expected["rate"], case
    for name, value in expected["values"].items():
        assert torch.equal(found["values"][name], value), f"{case}: {name}"


@pytest.mark.parametrize(
    ("paces", "servers"), [(LOCKSTEP, 0), (SERVED, 2)], ids=["no servers", "two servers"]
)
def test_a_resumed_job_goes_on_to_the_bit(paces: list[str], servers: int, tmp_path: Path) -> None:
    whole = run_ranks(2, train_each, paces, str(tmp_path), STEPS, servers=servers, timeout_s=120)
    resumed = run_ranks(2, train_each, paces, str(tmp_path), STEPS, servers=servers, timeout_s=120)
    for rank in range(2):
        for pace, expected, found in zip(paces, whole[rank], resumed[rank], strict=True):
            assert expected["first"] == 0
            assert SAVED_AT <= found["first"] < STEPS, pace
            require_equal(found, expected, f"rank {rank}, {pace}")


# From which pace to which, by workers and servers of the job that goes on.
MOVES = {
    (3, 0): [
        ("allreduce", "allreduce"),
        ("diloco:4", "diloco:4"),
        ("allreduce[compress=topk:0.1+int8]", "allreduce[compress=topk:0.1+int8]"),
    ],
    (2, 1): [("local:4", "ps"), ("allreduce", "ssp:2"), ("diloco:4", "allreduce")],
    (1, 0): [("allreduce", "easgd:3")],
}


@pytest.mark.parametrize(("workers", "servers"), MOVES)
def test_other_paces_and_workers_begin_with_what_stood_for_all(
    workers: int, servers: int, tmp_path: Path
) -> None:
    root, moves = str(tmp_path), MOVES[workers, servers]
    befores, afters = [before for before, _ in moves], [after for _, after in moves]
    run_ranks(2, train_each, befores, root, SAVED_AT, servers=1)
    saved = [
        reading.load(tmp_path / str(number) / f"step-{SAVED_AT:09d}").tensors
        for number in range(len(moves))
    ]
    for results in run_ranks(workers, train_each, afters, root, SAVED_AT, servers=servers):
        for move, found, tensors in zip(moves, results, saved, strict=True):
            assert found["first"] == SAVED_AT, move
            for name, value in found["values"].items():
                assert torch.equal(value, tensors[f"model/{name}"]), (move, name)


def _from_free_running(group: Group, root: str, pace: str, until: int) -> dict[str, Any]:
    del group
    return train(pace, root, until)


@pytest.mark.parametrize("pace", ["async", "ssp:2", "ssp:2[push=delta]", "backup:1"])
def test_free_running_workers_save_at_one_moment(pace: str, tmp_path: Path) -> None:
    """What the servers have is what all workers have made of it, and each says how far it is."""
    root = str(tmp_path)
    run_ranks(3, _from_free_running, root, pace, 2 * STEPS, servers=1)
    loaded = reading.newest(tmp_path).loaded
    assert loaded is not None
    workers = [own for own in loaded.content["workers"] if own is not None]
    assert workers, "somebody was there"
    if pace != "async":  # all behind the same step of their own
        assert {own["models"][0]["steps"] for own in workers} == {loaded.step}
    resumed = run_ranks(3, _from_free_running, root, pace, 2 * STEPS + 2, servers=1)
    firsts = [found["first"] for found in resumed]
    steps = [own and own["models"][0]["steps"] for own in loaded.content["workers"]]
    assert firsts == [loaded.step if own is None else own for own in steps]
