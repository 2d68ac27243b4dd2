"""Suites of tests/equivalence, with the models of their ranks on the test device.

They were written for the CPU and compare with formulas or with the CPU (support/on_device.py says
what is different here). `make device-test` runs more of them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "equivalence"))

from test_paces_equal_their_formulas import (
    test_block_momentum_as_fairseq_has_it,
    test_the_model_that_stands_for_all,
)

__all__ = [
    "test_block_momentum_as_fairseq_has_it",
    "test_the_model_that_stands_for_all",
]


@pytest.fixture(autouse=True)
def _on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_ON_DEVICE", "lazy")
