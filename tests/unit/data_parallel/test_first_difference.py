"""Which line of several ranks' lists is named as the first that differs."""

from __future__ import annotations

import pytest

from paceline.data_parallel.checks.model import find_difference

A, B, C = ("a", "float32[2]", "01"), ("b", "float32[3]", "02"), ("c", "int64[]", "03")
OTHER_B = ("b", "float32[3]", "99")
WIDE_B = ("b", "float64[3]", "02")


def nothing(line):
    return (line[0], "nothing", "")


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ([[A, B], [A, OTHER_B]], [B, OTHER_B]),
        ([[A, B, C], [A, OTHER_B, C], [A, WIDE_B]], [B, OTHER_B, WIDE_B]),
        ([[A, B, C], [A, C]], [B, nothing(B)]),  # not: b against c
        ([[A, C], [A, B, C]], [nothing(B), B]),
        ([[A], [A, B]], [nothing(B), B]),
        ([[], [A]], [nothing(A), A]),
        ([[A, B], [B, A]], [A, B]),
    ],
)
def test_first_difference(told, expected):
    assert find_difference(told) == expected
