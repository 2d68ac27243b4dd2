"""When to save: by steps, or by seconds that become steps."""

from __future__ import annotations

import pytest

from paceline.errors import UsageError
from paceline.state.checkpoint import interval as module
from paceline.state.checkpoint.interval import SaveSchedule


def alone(own: float) -> float:
    return own


def test_every_so_many_steps() -> None:
    due = SaveSchedule(4)
    due.begin(0)
    assert [step for step in range(1, 13) if due.is_due(step, alone)] == [4, 8, 12]


def test_never_by_itself() -> None:
    due = SaveSchedule(None)
    due.begin(0)
    assert not any(due.is_due(step, alone) for step in range(1, 100))


def test_seconds_become_steps_by_the_slowest_workers_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s)
    due, asked = SaveSchedule("2s"), list[float]()

    def slowest(own: float) -> float:
        asked.append(own)
        return 0.1  # another worker takes so long for a step

    due.begin(0)
    found = []
    for step in range(1, 61):
        now_s = 0.05 * step
        if due.is_due(step, slowest):
            found.append(step)
            due.begin(step)
    assert found == [20, 40, 60]
    assert asked == pytest.approx([0.05] * 3), "once for each save"


def test_a_newcomer_comes_to_the_same_answers() -> None:
    old, new = SaveSchedule("1h"), SaveSchedule("1h")
    old.begin(7)
    new.begin(0)
    new.load(old.counts())
    assert new.counts() == old.counts()


@pytest.mark.parametrize("every", [0, -1, True, 1.5, "10", "soon", "-3s", "0s", "10 apples", []])
def test_what_is_no_time_is_refused(every: object) -> None:
    with pytest.raises(UsageError, match="expected a number of steps"):
        SaveSchedule(every)  # type: ignore[arg-type]


@pytest.mark.parametrize(("text", "seconds"), [("30s", 30), ("10min", 600), ("1.5h", 5400)])
def test_units(text: str, seconds: float) -> None:
    assert SaveSchedule(text)._seconds == seconds
