"""ssp:0 = ps = allreduce = one process, to the bit, for every kind of script.

All ways are tried in one job: every rank trains the same script by all-reduce and through the
servers and compares all that came out, the optimizer's state included. One process that plays all
workers (workloads.py) computes the same bits; one with the whole batch differs by rounding only.

Servers cut parameters at cache lines. Fused, foreach and plain kernels compute the same bits there
as in one piece (at other places fused SGD would not), so no optimizer of elements needs borders.
"""

from __future__ import annotations

import functools

import gradient_scripts
import pytest
import scripts
import stateful_scripts
import torch
from ways import Script, Way, applicable, require_equal
from workloads import OPTIMIZERS, batch_of, loss_of, make_model, part_of, state_of, train_emulated

import paceline as pl
from paceline.comm.group import Group
from support import run_ranks
from support.reference import bits

# Workers, the hosts of workers and servers, options. The model is one bucket, which two servers
# share, or several. (All-reduce between hosts adds the sums of hosts: with three workers on two of
# them that is another order than the servers'.)
PLACES = [
    pytest.param(2, [0, 0, 0], {}, marks=pytest.mark.slow),
    (2, [0, 0, 0, 0], {}),
    pytest.param(2, [0, 0, 0], {"wait": "layer", "bucket_mb": 0.1}, marks=pytest.mark.slow),
    (2, [0, 1, 0], {}),
    pytest.param(3, [0, 0, 0, 1, 0], {"bucket_mb": 0.1}, marks=pytest.mark.slow),
]
NAMES = (
    *("several_groups", "step_lr", "one_cycle", "muon"),
    *("tied_weights", "batch_norm", "channels_last", "float64", "two_dtypes"),
)
ON_GRADIENTS = (
    *("clip_norm", "clip_value", "clip_behind_autograd", "replace_gradients", "accumulation"),
    *("zeros_stay", "left_out_steps", "grad_scaler", "unused_parameters", "gradients_used_twice"),
)
STATEFUL = (
    *("clamped_parameters", "moved_parameters", "decayed_before_the_step", "loaded_model"),
    *("frozen_and_thawed", "resumed", "forgotten_state", "state_on_one_rank"),
    *("uneven_batches", "averaged_buffers"),
)
SCRIPTS: dict[str, Script] = {
    **{name: scripts.with_optimizer(name) for name in scripts.SETTINGS},
    **{name: getattr(scripts, name) for name in NAMES},
    **{name: getattr(gradient_scripts, name) for name in ON_GRADIENTS},
    **{name: getattr(stateful_scripts, name) for name in STATEFUL},
}


# -- in the ranks ---------------------------------------------------------------------------------


def compare_all(group: Group, options: dict[str, str | float]) -> None:
    for name, script in applicable(SCRIPTS).items():
        print(name, flush=True)
        expected = script(Way(group, "allreduce", update="replicated"))
        found = script(Way(group, "ps", **options))
        require_equal(found, expected, name)


def compare_lockstep(group: Group) -> None:
    """A staleness of 0 is lockstep, and a bucket for every parameter changes nothing."""
    for name in ("nesterov", "adam one by one", "fused adamw", "clip_norm", "left_out_steps"):
        expected = SCRIPTS[name](Way(group, "ps"))
        for way in (Way(group, "ssp:0", bucket_mb=0.001), Way(group, "ps", wire="fp32", seed=3)):
            require_equal(SCRIPTS[name](way), expected, (name, str(way)))


def train(group: Group, kind: str, name: str, steps: int) -> dict[str, torch.Tensor]:
    model = make_model(kind)
    if group.rank:  # rank 0's must win
        for param in model.parameters():
            param.data.add_(group.rank)
    optimizer = OPTIMIZERS[name](model)
    pl.distribute(model, optimizer, pace="ps")
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, part_of(batch_of(kind, step), group.rank, group.size)).backward()
        optimizer.step()
    pl.check_consistency(model, optimizer)
    return state_of(model)


# -- in the test session --------------------------------------------------------------------------


@pytest.mark.parametrize(("workers", "hosts", "options"), PLACES)
def test_scripts_compute_the_same_bits(
    workers: int, hosts: list[int], options: dict[str, str | float]
) -> None:
    servers = len(hosts) - workers
    run_ranks(workers, compare_all, options, servers=servers, hosts=hosts, timeout_s=100)


def test_a_staleness_of_0_is_lockstep() -> None:
    run_ranks(2, compare_lockstep, servers=2)


@pytest.mark.parametrize("hosts", [[0, 0, 0, 0, 0], [0, 0, 0, 1, 1]])
def test_workers_equal_one_process_that_plays_them(hosts: list[int]) -> None:
    def body(group: Group) -> dict[tuple[str, str], dict[str, torch.Tensor]]:
        return {case: train(group, *case, steps) for case in cases}

    steps, threads = 15, torch.get_num_threads()
    cases = [("wide", "momentum"), ("resnet", "adamw"), ("gpt", "fused adamw"), ("mlp", "sgd")]
    by_rank = run_ranks(3, body, servers=2, hosts=hosts)
    torch.set_num_threads(1)
    try:
        for case in cases:
            expected = train_emulated(*case, 3, steps)[1]
            for found in by_rank:
                for name, value in expected.items():
                    assert bits(found[case][name]) == bits(value), (case, name)
    finally:
        torch.set_num_threads(threads)


def test_the_whole_batch_in_one_process_differs_by_rounding_only() -> None:
    def body(group: Group) -> None:
        for script in (in_double("AdamW"), in_double("RMSprop"), in_double("SGD")):
            expected, found = script(Way(group, "plain")), script(Way(group, "ps"))
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    torch.testing.assert_close(found[name].cpu(), value, rtol=1e-9, atol=1e-11)

    run_ranks(2, body, servers=2, hosts=[0, 1, 0, 1])


def in_double(kind: str) -> Script:
    return functools.partial(_train_in_double, kind)


def _train_in_double(kind: str, way: Way) -> dict[str, object]:
    model = scripts.wide(torch.float64)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=1e-3, weight_decay=0.1)
    return {
        name: value
        for name, value in scripts.train(way, model, optimizer).items()
        if not name.startswith("/seen")  # losses of parts
    }
