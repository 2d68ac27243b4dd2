"""Loops of JAX and TensorFlow without Keras."""

from __future__ import annotations

import pytest
from environment import assert_passed, require, run_script

JAX = (
    "flax_and_optax",
    "equinox_loop",
    "kinds_of_arrays",
    "memory_is_kept",
    "without_a_compiler",
)
TENSORFLOW = ("custom_loop", "kinds_of_tensors")


def test_jax_loops() -> None:
    require("jax", "flax", "equinox", "optax")
    assert_passed(run_script("jax_checks.py", *JAX), *JAX)


@pytest.mark.slow
def test_tensorflow_loops() -> None:
    require("tensorflow")
    assert_passed(run_script("tensorflow_checks.py", *TENSORFLOW), *TENSORFLOW)
