"""Every mesh trains as one process does: losses, parameters, clipped gradients, evaluation.

By rounding only: a cut matrix or batch adds its products in another order. In float64 that is
1e-16 for each sum, and 20 steps (AdamW divides small numbers by each other) blow it up to less than
1e-9. In float32, where a sum is off by 1e-7, it is a few 1e-5. mesh_models.py has the models and
says what the one process does where batch norm sees parts of a batch.
"""

from __future__ import annotations

import functools
import traceback
from typing import Any

import pytest
import torch
from mesh_models import (
    BATCH,
    MICROBATCHES,
    OPTIMIZERS,
    Case,
    Result,
    Shares,
    batch_of,
    loss_of,
    make_model,
    reference,
    result_of,
)

import paceline as pl
from paceline.comm.group import Group
from support import run_ranks

# Relative, of losses; of parameters with as much added absolutely.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 5e-5}
MAX_NORM = 0.1  # less than any gradient here has: the reference checks it

OF_TWO = ("dp=2", "tp=2", "pp=2", "fsdp=2")
OF_FOUR = ("dp=2,tp=2", "dp=2,pp=2", "pp=2,tp=2", "dp=2,fsdp=2", "fsdp=2,tp=2")
OF_ONE_AXIS = ("tp=4", "pp=4", "fsdp=4", "dp=4")
OF_EIGHT = ("dp=2,pp=2,tp=2", "dp=4,tp=2")
MESHES = ("dp=1", *OF_TWO, *OF_FOUR, *OF_ONE_AXIS, *OF_EIGHT)
CASES = [
    Case(model, optimizer, max_norm=None if optimizer == "momentum" else MAX_NORM)
    for model in ("transformer", "mlp", "resnet")
    for optimizer in ("momentum", "adamw")
]


@pytest.fixture(autouse=True)
def _one_thread():
    """Ranks compute with one thread; how many there are may change the order of adding."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# -- in the ranks ---------------------------------------------------------------------------------


def train(group: Group, mesh: str, case: Case, **options: Any) -> Result:
    """Train this worker's part; losses are those of its unit (by hand: of its share)."""
    shares = Shares.of(mesh)
    mine = functools.partial(shares.mine, number=group.rank)
    model = make_model(case.model, case.dtype)
    optimizer = OPTIMIZERS[case.optimizer](model)
    if shares.is_pipelined:
        example = mine(batch_of(case.model, 0, case.dtype)[0])
        options = {"example": (example,), "microbatches": MICROBATCHES, **options}
    if case.max_norm is not None and not case.by_hand:
        options["max_norm"] = case.max_norm
    model, optimizer = pl.distribute(model, optimizer, mesh=mesh, loss=loss_of, **options)
    losses = []
    for step in range(case.steps):
        x, y = (mine(whole) for whole in batch_of(case.model, step, case.dtype))
        if case.by_hand:
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            if case.max_norm is not None:
                pl.clip_grad_norm_(model, case.max_norm)
            optimizer.step()
        else:
            loss = model.train_step(x, y)
        losses.append(float(loss))
    return result_of(model, optimizer, losses, case)


def train_all(group: Group, mesh: str, cases: list[tuple[Case, dict[str, Any]]]) -> list[Any]:
    """Return a result for each case, or what went wrong with it: the next one may work."""
    torch.set_num_threads(1)

    def attempt(case: Case, options: dict[str, Any]) -> Any:
        try:
            return train(group, mesh, case, **options)
        except Exception:
            return traceback.format_exc(limit=-4)

    return [attempt(case, options) for case, options in cases]


# -- in the test session --------------------------------------------------------------------------


def mean_losses(mesh: str, of_workers: list[Result]) -> list[float]:
    """Average over the shares; train_step has averaged over those of a unit already."""
    shares = Shares.of(mesh)
    by_share = {shares.index(number): r.losses for number, r in enumerate(of_workers)}
    return [sum(losses) / len(by_share) for losses in zip(*by_share.values(), strict=True)]


def units_that_disagree(mesh: str, of_workers: list[Result]) -> list[int]:
    """Return the units whose processes were not told the same losses."""
    size = Shares.of(mesh).unit_size
    units = [of_workers[first : first + size] for first in range(0, len(of_workers), size)]
    return [n for n, unit in enumerate(units) if any(r.losses != unit[0].losses for r in unit)]


def problems_of(mesh: str, case: Case, of_workers: list[Any]) -> list[str]:
    """Compare with one process; return what is wrong, a line for each."""
    if errors := [found for found in of_workers if isinstance(found, str)]:
        return [f"{case}: {len(errors)} workers failed, the first with\n{errors[0]}"]
    shares = Shares.of(mesh)
    parts = shares.parts if case.model == "resnet" else 1
    expected = reference(case, parts, max(1, parts // shares.count))
    close = {"rtol": TOLERANCE[case.dtype], "atol": TOLERANCE[case.dtype]}
    problems = []
    if not case.by_hand and (units := units_that_disagree(mesh, of_workers)):
        problems.append(f"{case}: the processes of units {units} were told different losses")
    losses = mean_losses(mesh, of_workers)
    for step, (a, b) in enumerate(zip(losses, expected.losses, strict=True)):
        if abs(a - b) > close["rtol"] * abs(b):
            problems.append(f"{case}: loss of step {step}: {a}, expected {b}")
            break
    for number, found in enumerate(of_workers):
        if shares.cuts(case.model) and not found.num_held < expected.num_held:
            problems.append(f"{case}: worker {number} holds all {found.num_held} parameters")
        if list(found.state) != list(expected.state):
            odd = set(found.state) ^ set(expected.state)
            problems.append(f"{case}: worker {number}'s state has other names: {odd or 'order'}")
            continue
        wrong = [
            name
            for name, value in expected.state.items()
            if found.state[name].shape != value.shape
            or not torch.allclose(found.state[name], value, **close)
        ]
        if wrong:
            told = f"{len(wrong)} tensors, the first {wrong[:3]}"
            problems.append(f"{case}: worker {number}: other values in {told}")
        elif not torch.allclose(found.output, expected.output, **close):
            problems.append(f"{case}: worker {number}: evaluates to something else")
    return problems


def require_equal(mesh: str, cases: list[tuple[Case, dict[str, Any]]]) -> None:
    by_rank = run_ranks(Shares.of(mesh).num_workers, train_all, mesh, cases, timeout_s=60)
    lines = [
        line
        for number, (case, _) in enumerate(cases)
        for line in problems_of(mesh, case, [results[number] for results in by_rank])
    ]
    assert not lines, "\n".join([f"{mesh}:", *lines])


@pytest.mark.parametrize("mesh", MESHES)
def test_meshes_equal_one_process(mesh: str) -> None:
    require_equal(mesh, [(case, {}) for case in CASES])


@pytest.mark.parametrize("mesh", [*OF_TWO, *OF_FOUR])
def test_clipped_gradients_are_those_of_one_process(mesh: str) -> None:
    """One step of plain SGD with a rate of 1 subtracts the clipped gradient, and nothing else."""
    models = ("transformer", "mlp", "resnet")
    cases = [Case(model, "plain", max_norm=MAX_NORM, steps=1) for model in models]
    require_equal(mesh, [(case, {}) for case in cases])


@pytest.mark.parametrize("mesh", ["dp=2", "tp=2", "fsdp=2", "dp=2,tp=2", "fsdp=2,tp=2"])
def test_the_ordinary_loop_does_what_train_step_does(mesh: str) -> None:
    cases = [Case(model, "adamw", max_norm=MAX_NORM, by_hand=True) for model in ("transformer",)]
    cases.append(Case("mlp", "momentum", by_hand=True))
    require_equal(mesh, [(case, {}) for case in cases])


def test_schedules_and_splits_change_nothing() -> None:
    case = Case("transformer", "adamw", max_norm=MAX_NORM)
    options: list[dict[str, Any]] = [
        *({"schedule": name} for name in ("gpipe", "1f1b", "interleaved:2", "zero-bubble")),
        {"splits": ["blocks.1"]},
        {"splits": ["blocks.3"], "activations": "recompute"},
        {"microbatches": BATCH},
    ]
    require_equal("pp=2", [(case, chosen) for chosen in options])


def test_stages_may_begin_between_matrices_that_are_cut_together() -> None:
    """What leaves the first of two such matrices is in pieces: a stage may have to send those."""
    case = Case("mlp", "momentum", steps=3)
    require_equal("pp=2,tp=2", [(case, {"splits": [layer]}) for layer in ("1", "2", "4", "6")])


@pytest.mark.parametrize("mesh", ["tp=2", "fsdp=2", "dp=2"])
def test_activations_computed_again_are_the_same(mesh: str) -> None:
    cases = [Case("transformer", "adamw"), Case("mlp", "momentum")]
    require_equal(mesh, [(case, {"activations": "recompute"}) for case in cases])


@pytest.mark.parametrize("mesh", ["tp=2", "pp=2", "fsdp=2", "dp=2,tp=2"])
def test_float32_differs_by_its_rounding(mesh: str) -> None:
    """SGD: where gradients are rounding alone, AdamW makes steps of full length of them."""
    cases = [Case(model, "momentum", torch.float32) for model in ("transformer", "mlp")]
    require_equal(mesh, [(case, {}) for case in cases])
