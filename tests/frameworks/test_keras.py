"""Keras 3 on torch, TensorFlow and JAX: one job for each backend."""

from __future__ import annotations

import pytest
from environment import assert_passed, require, run_script

CHECKS = (
    "equals_one_process",
    "large_layers",
    "bad_calls",
    "uneven_data",
    "accumulation",
    "inf_on_one_worker",
    "local_pace",
    "saved_model",
    "compiled_again",
    "without_weights",
    "callbacks",
    "sharded_data",
    "uneven_accumulation",
)
QUICK = ("equals_one_process", "uneven_data")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "tensorflow", "jax"])
def test_a_distributed_model(backend: str) -> None:
    require("keras", "tensorflow", *(["jax"] if backend == "jax" else []))
    ended = run_script("keras_checks.py", *CHECKS, env={"KERAS_BACKEND": backend})
    assert_passed(ended, *CHECKS)


def test_a_distributed_model_quickly() -> None:
    require("keras", "jax")
    ended = run_script("keras_checks.py", *QUICK, env={"KERAS_BACKEND": "jax"})
    assert_passed(ended, *QUICK)
