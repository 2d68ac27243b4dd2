"""What bench/paces.py reads off its measurements: noise, times to a loss, ranks, and the tables."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pace_runs import figures, jobs, plans, report, table
from pace_runs.figures import Noise, rank, seconds_to, target_of
from pace_runs.shares import shares
from servers.delays import one_slow, sometimes_slow

CURVE = [(10, 1.0, 4.0), (20, 2.0, 3.0), (30, 3.0, 2.0), (40, 4.0, 2.5)]


def row(label: str) -> table.Row:
    return next(row for row in table.TABLE if row.label == label)


def test_the_time_to_a_loss_lies_on_the_line_between_two_points():
    assert seconds_to(CURVE, 3.0) == 2.0
    assert seconds_to(CURVE, 2.25) == 2.75
    assert seconds_to(CURVE, 5.0) == 1.0  # it was there from the beginning
    assert seconds_to(CURVE, 1.9) is None


@given(st.lists(st.floats(0.5, 5.0), min_size=1, max_size=12), st.floats(0.4, 5.0))
def test_a_loss_is_reached_between_the_first_point_below_it_and_the_one_before(losses, target):
    curve = [(number, float(number), loss) for number, loss in enumerate(losses)]
    first = next((number for number, loss in enumerate(losses) if loss <= target), None)
    at_s = seconds_to(curve, target)
    assert (at_s is None) == (first is None)
    if first is not None and at_s is not None:
        assert max(0, first - 1) <= at_s <= first


def test_the_target_is_what_the_reference_has_after_most_of_its_steps():
    assert target_of([(s, s / 10, 4.0 - s / 50) for s in range(0, 101, 10)]) == 2.8
    assert target_of([(50, 1.0, 2.61), (100, 2.0, 2.41)]) == 2.45  # rounded up: it is reached


def test_who_never_gets_to_the_target_comes_last_the_better_ones_first():
    curves = {
        "diverged": [(10, 1.0, math.nan)],
        "slow": [(10, 5.0, 2.0)],
        "bad": [(10, 1.0, 3.5)],
        "fast": [(10, 1.0, 2.0)],
        "better": [(10, 1.0, 3.0)],
    }
    assert rank(curves, 2.5) == [
        ("fast", 1.0),
        ("slow", 5.0),
        ("better", None),
        ("bad", None),
        ("diverged", None),
    ]


def test_a_loss_is_judged_by_the_spread_of_the_reference():
    noise = Noise.of([2.0, 2.1, 1.9, 2.05, 1.95])
    assert noise.mean == pytest.approx(2.0) and noise.sd == pytest.approx(0.0790569)
    assert noise.compare([2.1, 2.15]) == "within 2 sd"
    assert noise.compare([1.9]) == "within 2 sd"
    assert noise.compare([2.3]) == "0.300 worse (+3.8 sd)"
    assert noise.compare([1.7]) == "0.300 better (-3.8 sd)"
    assert noise.compare([2.0, math.nan]) == "diverged"


def test_without_a_spread_only_the_same_loss_is_within_it():
    assert Noise.of([2.0]).compare([2.0]) == "within 2 sd"
    assert "worse" in Noise.of([2.0]).compare([2.1])


def test_throughput_counts_until_the_last_has_ended():
    assert figures.steps_per_s([10, 10, 30], [1.0, 2.0, 5.0]) == 10.0
    assert figures.sent_per_step([10, 30], [1000, 3000]) == 100.0


@pytest.mark.parametrize("label", ["ssp:3", "async"])
@pytest.mark.parametrize("total", [40, 97, 200])
def test_free_running_workers_share_out_the_whole_number_of_steps(label, total):
    for delays in (one_slow(4, 0.01, 4.0), sometimes_slow(4, 0.01, 0.1, 4.0, seed=total)):
        steps = shares(row(label), total, 4, delays)
        assert sum(steps) == total and min(steps) > 0


def test_a_slow_worker_does_less_only_where_the_others_need_not_wait():
    delays = one_slow(4, 0.01, 4.0)
    assert shares(row("allreduce"), 400, 4, delays) == [100] * 4
    assert shares(row("ps"), 401, 4, delays) == [101] * 4  # nobody can leave out a step
    free = shares(row("async"), 400, 4, delays)
    assert free[3] == pytest.approx(400 / 13, abs=1) and free[0] == pytest.approx(1600 / 13, abs=1)
    bounded = shares(row("ssp:3"), 400, 4, delays)
    assert max(bounded) - min(bounded) <= 4
    assert shares(row("async"), 400, 4, None) == [100] * 4


def test_every_row_of_the_table_is_a_pace_or_is_left_out_with_a_reason():
    there, notes = table.known(table.TABLE)
    assert len(there) + len(notes) == len(table.TABLE)
    assert len({row.label for row in table.TABLE}) == len(table.TABLE)
    assert {"allreduce", "ps", "async", "local:8", "diloco:50"} <= {row.label for row in there}
    wrong = table.Row("mine", "no_such_pace:3", "local")
    there, notes = table.known([wrong, row("ps")])
    assert there == [row("ps")] and notes[0].startswith("mine: left out: pace 'no_such_pace:3'")


def test_rows_are_chosen_by_label_or_by_word():
    chosen = [row.label for row in table.choose(["ps", "local:8"])]
    assert chosen == ["ps", "local:8"]
    assert [row.label for row in table.choose(["local"])] == ["local:8", "local:8 streaming"]
    assert len(table.choose(["gossip"])) == 3
    assert table.choose() == list(table.TABLE)
    with pytest.raises(SystemExit, match="there is no row 'locale'"):
        table.choose(["locale"])


def test_a_tenth_of_the_steps_comes_into_the_pace():
    assert row("post_local:8").text(640) == "post_local:8[after=64]"
    assert row("bmuf:10").text(3) == "bmuf:10[after=1]"


def test_a_training_with_delays_is_a_line_that_json_can_carry():
    delays = plans.scenarios(plans.QUICK)["steady"]
    line = plans.timed(row("async"), plans.QUICK, delays)
    assert json.loads(json.dumps(line))["steps"] == line["steps"]
    assert sum(line["steps"]) == 4 * plans.QUICK.timed_steps
    alone = plans.one_process(plans.QUICK, 2, row("allreduce"))
    assert [run["steps"] for run in alone] == [[48]] * 4 and alone[0]["batch"] == 256


def test_only_trainings_that_all_workers_have_ended_are_gathered(tmp_path):
    for rank_, runs in enumerate([["a", "b"], ["a"]]):
        told = [
            {"run": run, "steps": 5, "s": 1.0 + rank_, "sent": 10, "curve": [[5, 1.0, 2.0]]}
            for run in runs
        ]
        text = "".join(json.dumps(line) + "\n" for line in told)
        (tmp_path / f"{rank_}.jsonl").write_text(text)
    found = jobs.gather(tmp_path, 2)
    assert found == {
        "a": {"steps": [5] * 2, "s": [1.0, 2.0], "sent": [10] * 2, "curve": [[5, 1.0, 2.0]]}
    }


def result(loss: float, seconds: float = 2.0) -> dict[str, object]:
    curve = [[50, seconds / 2, loss + 0.5], [100, seconds, loss]]
    return {"steps": [100] * 4, "s": [seconds] * 4, "sent": [1000] * 4, "curve": curve}


FACTS = {"cores": 2, "cpu": "x", "idle_before": 1.0, "date": "today", "commit": "c", "quick": False}


def test_the_report_ranks_paces_and_names_those_that_failed():
    found = {"allreduce": result(2.0), "async": result(2.0, 1.0), "ps": {"failed": "why"}}
    scenarios = {"steady": found, "stalls": {"ps": {"failed": "why"}}}
    part = {"scenarios": scenarios, "sleep_s": 0.01, "steps": 100, "machine": FACTS}
    text = report.render({"stragglers": part, "left_out": ["bitmap: left out: because"]})
    ranked = [line for line in text.splitlines() if line.startswith("| 1 |")]
    assert ranked == ["| 1 | `async` | 1.0 | 0.50 | 2.000 | 400 |"]
    assert "| | `ps` | failed |" in text and "allreduce has failed" in text
    assert "- bitmap: left out: because" in text


def test_the_report_sets_losses_and_bytes_against_the_reference():
    task = {
        "allreduce": [result(2.0), result(2.2)],
        "async": [result(3.0)],
        "ps": [{"failed": "w"}],
    }
    part = {"tasks": {"book": task}, "steps": {"book": 100}, "batch": {"book": 8}, "workers": 4}
    part["notes"] = {"async": "why"}
    rows = {
        "allreduce": {"steps_per_s": 50.0, "sent_per_step": 1000.0},
        "diloco:50": {"steps_per_s": 96.0, "sent_per_step": 20.0},
        "independent": {"steps_per_s": 100.0, "sent_per_step": 0.0},
    }
    text = report.render(
        {
            "loss": {**part, "machine": FACTS},
            "throughput": {"rows": rows, "sleep_s": 0.02, "machine": {**FACTS, "quick": True}},
        }
    )
    assert "| `allreduce` | 2.1000 (2) | within 2 sd | 1600 |  |" in text
    assert "| `async` | 3.0000 (1) | 0.900 worse (+6.4 sd) | 1600 | why |" in text
    assert "| `ps` | failed | | |" in text
    assert "| `diloco:50` | 96 | 96.0% | 0.02 | 0.0200 (1/50.0) |" in text
    assert text.count("--quick") == 1
