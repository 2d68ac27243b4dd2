"""Lightning, Accelerate and Transformers: the same model as in one process, on two workers."""

from __future__ import annotations

import pytest
from environment import assert_passed, require, run_script

LIGHTNING = ("lightning_strategy", "lightning_accumulates", "lightning_pace")


def test_lightning_trains_at_any_pace() -> None:
    require("lightning")
    assert_passed(run_script("torch_libraries.py", *LIGHTNING), *LIGHTNING)


@pytest.mark.slow
def test_accelerate_with_one_line() -> None:
    require("accelerate")
    assert_passed(run_script("torch_libraries.py", "accelerate_one_line"), "accelerate_one_line")


def test_accelerate_and_transformers_without_a_line() -> None:
    require("accelerate", "transformers")
    names = ("accelerate_no_line", "transformers_trainer")
    assert_passed(run_script("torch_libraries.py", *names, env={"PACELINE_AS_GLOO": "1"}), *names)
