"""What bench/model_parallel.py reads off its turns: ratios and bubbles."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.ranks import RankSet
from mesh_runs.contest import Contender, doubts
from mesh_runs.report import Table, bubble_figure, show_memory, theory
from mesh_runs.split import best_cut, slowest_stage


def contender(name: str, ranks: RankSet, own_s: list[list[float]], loss: float = 1.0) -> Contender:
    steps = [max(step) for step in zip(*own_s, strict=True)]
    return Contender(name, ranks, {16: steps}, {16: own_s}, {16: loss})


@pytest.fixture
def ranks(tmp_path: Path):
    nobody = RankSet("nobody", "nobody", 0, [], tmp_path)
    yield nobody
    nobody.stop()


@pytest.fixture
def table(ranks: RankSet) -> Table:
    return Table(
        "a table",
        16,
        [
            contender("pp-gloo", ranks, [[0.5, 1.0, 2.0]] * 2),
            contender("pp-ours", ranks, [[0.5, 0.5, 0.5]] * 2),
            contender("alone", ranks, [[0.25, 0.5, 0.5], [0.25, 1.0, 1.5]]),
            contender("alone-kept", ranks, [[0.375, 0.5, 0.5], [0.375, 0.25, 0.5]]),
        ],
    )


def test_ratios_are_by_minimum_and_by_median(table: Table) -> None:
    assert table.times("pp-ours", "pp-gloo") == {"min": 1.0, "median": 2.0}
    assert table.times("pp-ours", "pp-gloo-kept") is None
    what = table.figure("what", "must", "pp-ours", ["pp-gloo"])
    assert what == ("what", "must", "1.00 by min, 2.00 by median")
    assert table.figure("what", "", "pp-ours", ["tp-gloo"])[2] == "not measured"


def test_a_bubble_is_what_the_stages_alone_do_not_need(table: Table) -> None:
    # The mean of both stages: (0.25 + 0.25) / 2 and (0.5 + 1.0) / 2.
    assert table.ideal_s("alone") == {"min": 0.25, "median": 0.75}
    assert table.bubble("pp-gloo") == {"min": 0.5, "median": 0.25}
    assert table.bubble("pp-ours") == pytest.approx({"min": 0.375, "median": 0.125})
    assert table.bubble("pp-ours-zero") is None
    told = bubble_figure(table, "pp-ours", 8)
    assert told[1:] == ("must <= 12.2%", "37.5% by min, 12.5% by median (theory 11.1%)")


def test_theory() -> None:
    assert theory("pp-ours", 8) == pytest.approx(1 / 9)
    assert theory("pp-ours-interleaved", 8) == pytest.approx(1 / 17)
    assert theory("pp-ours", 8, processes=4) == pytest.approx(3 / 11)
    assert theory("pp-ours-zero", 8) == 0.0


def test_contenders_that_compute_something_else_are_named(ranks: RankSet) -> None:
    same = [contender("tp-gloo", ranks, [[1.0]]), contender("alone", ranks, [[1.0]], loss=7.0)]
    assert doubts(same, 16) == []
    other = contender("tp-ours", ranks, [[1.0]], loss=1.1)
    (line,) = doubts([*same, other], 16)
    assert "tp-ours 1.10000" in line and "alone" not in line


def test_memory_is_that_of_the_largest_process(capsys: pytest.CaptureFixture[str]) -> None:
    def process(held_bytes: int) -> dict[str, float]:
        return {"held_bytes": held_bytes, "Pss": 100.0}

    found = {"dp-gloo": [process(100)], "fsdp-ours": [process(40), process(50)], "dp-ours": []}
    (line,) = show_memory("memory", found, "dp-gloo")
    assert line == ("memory of fsdp-ours / replicated", "must <= 60 %", "50.0%")
    assert "\ndp-ours" not in capsys.readouterr().out


def test_the_best_cut_is_the_one_whose_slowest_stage_is_fastest() -> None:
    layers = [10.0, 10.0, 1.0, 1.0, 1.0]
    times = {(a, b): sum(layers[a:b]) for a in range(5) for b in range(a + 1, 6)}
    assert best_cut(times, 2) == (13.0, [1])
    assert best_cut(times, 3) == (10.0, [1, 2])
    assert slowest_stage(times, [2]) == 20.0
