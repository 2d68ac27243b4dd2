"""Keras models whose optimizer runs on parameter servers, on each backend."""

from __future__ import annotations

import pytest
from environment import assert_passed, require, run_script

CHECKS = ("refusals", "ps_equals_one_process", "free_paces", "uneven_in_lockstep")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "tensorflow", "jax"])
def test_a_model_on_servers(backend: str) -> None:
    require("keras", "tensorflow", "jax")
    ended = run_script(
        "keras_servers.py",
        *CHECKS,
        options=("-n", "2", "-s", "1"),
        env={"KERAS_BACKEND": backend},
    )
    assert_passed(ended, *CHECKS)
