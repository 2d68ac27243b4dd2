"""Weights of batches: who announced last counts, and passes inside passes do not disturb."""

from __future__ import annotations

import pytest

from paceline.errors import UsageError
from paceline.runtime.batch_weight import Contribution


def test_watchers_hear_of_changes_as_long_as_they_live() -> None:
    class Watcher:
        def __init__(self) -> None:
            self.heard: list[float] = []

        def on_change(self, weight: float) -> None:
            self.heard.append(weight)

    contribution, watcher = Contribution(), Watcher()
    contribution.watch(watcher.on_change)
    for weight in (1.0, 0.5, 0.5, 0.0):
        contribution.set(weight)
    assert watcher.heard == [0.5, 0.0]
    heard = watcher.heard
    del watcher
    contribution.set(1.0)
    assert heard == [0.5, 0.0]


@pytest.mark.parametrize("weight", [-0.1, float("inf"), float("nan")])
def test_impossible_weights_are_refused(weight: float) -> None:
    with pytest.raises(UsageError, match="finite"):
        Contribution().set(weight)


def test_an_inner_pass_leaves_the_outer_weight_as_it_was() -> None:
    contribution = Contribution()
    outer, inner = contribution.announcer(), contribution.announcer()
    outer.set(0.5)
    inner.set(1.5)
    assert contribution.weight == 1.5
    inner.close()
    assert contribution.weight == 0.5
    outer.close()
    outer.close()
    assert contribution.weight == 1.0


def test_two_passes_side_by_side_leave_nothing_behind() -> None:
    contribution = Contribution()
    first, second = contribution.announcer(), contribution.announcer()
    for _ in range(2):
        first.set(0.5)
        second.set(1.5)
    first.close()
    assert contribution.weight == 1.5
    second.close()
    assert contribution.weight == 1.0
