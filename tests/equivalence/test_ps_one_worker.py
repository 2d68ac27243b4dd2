"""Free-running training with one worker equals the plain script, to the bit.

Whatever the helpers against staleness are: there is none. With push=delta the servers add x' - x to
x, which is x' up to one rounding: no bits there.
"""

from __future__ import annotations

import gradient_scripts
import pytest
import scripts
import stateful_scripts
import torch
from ways import Script, Way, applicable, require_equal

from paceline.comm.group import Group
from support import run_ranks

ALONE: dict[str, Script] = {
    **{name: scripts.with_optimizer(name) for name in ("nesterov", "adamw", "fused adam")},
    **{
        name: getattr(scripts, name)
        for name in ("several_groups", "one_cycle", "muon", "channels_last", "float64")
    },
    **{
        name: getattr(gradient_scripts, name)
        for name in (
            *("clip_norm", "clip_behind_autograd", "replace_gradients", "accumulation"),
            *("zeros_stay", "left_out_steps", "grad_scaler", "gradients_used_twice"),
            "unused_parameters",
        )
    },
    **{
        name: getattr(stateful_scripts, name)
        for name in ("clamped_parameters", "moved_parameters", "loaded_model", "resumed")
    },
    "decayed_before_the_step": stateful_scripts.decayed_before_the_step,
    "forgotten_state": stateful_scripts.forgotten_state,
}
HELPERS = (
    *("ssp:3", "ssp:0[unit=version]", "ssp:2[unit=version]", "async[compensate=dc]"),
    *("async[lr=staleness]", "async[softsync=1]", "async[max_staleness=1]", "async[push=params]"),
)


def train_alone(group: Group) -> None:
    for name, script in applicable(ALONE).items():
        print(name, flush=True)
        require_equal(script(Way(group, "async")), script(Way(group, "allreduce")), name)


def train_alone_with_helpers(group: Group) -> None:
    names = ("one_cycle", "clip_norm", "clamped_parameters")
    for name in applicable({name: ALONE[name] for name in names}):
        expected = ALONE[name](Way(group, "allreduce"))
        for pace in HELPERS:
            print(name, pace, flush=True)
            require_equal(ALONE[name](Way(group, pace)), expected, (name, pace))
        found = ALONE[name](Way(group, "async[push=delta]"))
        for key, value in expected.items():
            if key.startswith("/model"):
                torch.testing.assert_close(found[key], value, rtol=2e-6, atol=1e-8, msg=name)


@pytest.mark.parametrize(
    "hosts", [pytest.param([0, 0], marks=pytest.mark.slow), [0, 1], [0, 0, 1]], ids=str
)
def test_one_worker_is_the_plain_script(hosts: list[int]) -> None:
    run_ranks(1, train_alone, servers=len(hosts) - 1, hosts=hosts)


@pytest.mark.parametrize("hosts", [[0, 0, 0], [0, 1, 1]])
def test_one_worker_needs_no_help_against_staleness(hosts: list[int]) -> None:
    run_ranks(1, train_alone_with_helpers, servers=2, hosts=hosts)
