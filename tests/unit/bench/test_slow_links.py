"""What bench/slow_network.py reads off its turns, whom it lets in, and how long its turns are."""

from __future__ import annotations

import json

import pytest
from harness.training_kinds import at_pace, kind_of
from pace_runs import parts
from slow_runs import codecs
from slow_runs.report import CEILING, FP16, KEPT, PLAIN, POWERSGD, Link
from slow_runs.turns import Amount, Line, steps_in

PACED, LOCAL = at_pace("allreduce"), at_pace("local:8")


def line(name: str, *turns_s: float) -> Line:
    return Line(name, kind_of(name).label, turns_s, 2e6)


def link(rate_mbit: int = 1000) -> Link:
    lines = [
        line(CEILING, 0.25, 0.25, 0.5),
        line(FP16, 0.5, 1.0, 2.0),
        line(POWERSGD, 1.0, 0.5, 0.5),
        line(PACED, 0.5, 0.25, 0.5),
        line(LOCAL, 0.125, 0.125, 0.125),
        line(PLAIN),  # failed in its turn
    ]
    return Link(rate_mbit, 128, lines, [*(one.name for one in lines), KEPT])


def test_throughput_is_that_of_the_best_and_of_the_median_turn():
    assert link().rates(PACED) == {"best": 512.0, "median": 256.0}


def test_ratios_are_to_the_best_of_several_references():
    assert link().ratio(PACED, FP16) == {"best": 2.0, "median": 2.0}
    assert link().ratio(PACED, FP16, POWERSGD) == {"best": 2.0, "median": 1.0}
    assert link().ratio(PACED, PLAIN) is None
    assert link().ratio(PACED, FP16, PLAIN) is None  # who is missing may be the best


def test_the_figures_are_of_the_fastest_that_averages_every_step():
    assert link().best_of_ours() == PACED  # local:8 is faster, but does not
    figures = {figure: (promise, told) for figure, promise, told in link().figures()}
    told = "2.00 by best, 2.00 by median (paceline allreduce)"
    assert figures["1000 Mbit/s, / DDP's fp16 hook"] == ("must 1.5", told)
    assert figures["1000 Mbit/s, / DDP gloo"][1] == "not measured (paceline allreduce)"
    better = "2.00 by best, 1.00 by median (paceline allreduce)"
    assert ("100 Mbit/s, / the better of both hooks", "must 1.2", better) in link(100).figures()
    assert link().figures(LOCAL)[1][2] == "4.00 by best, 8.00 by median (paceline local:8)"


def test_who_failed_is_in_the_table_and_in_the_json(capsys):
    link().show()
    shown = capsys.readouterr().out.splitlines()
    failed = [line.split("failed")[0].strip() for line in shown if "failed" in line]
    assert failed == ["DDP gloo", "independent, memory kept"]
    assert link().as_json()["failed"] == [PLAIN, KEPT]


def test_a_pace_that_cannot_run_here_is_left_out_with_the_reason():
    wanted = ["local:8", "allreduce[compress=lzma]", "ps", "hogwild", "local:8[batch=1]"]
    paces, notes = codecs.known(wanted)
    assert paces == ["local:8"]
    assert [note.partition(": left out: ")[0] for note in notes] == wanted[1:]
    assert "needs parameter servers" in notes[1] and "share memory" in notes[2]


@pytest.mark.parametrize(
    ("period", "taken_s", "steps"),
    [
        (1, [], 2),  # the first turn is short
        (1, [9.0, 0.5], 8),  # as many as fit, by the last one
        (1, [9.0], 2),  # but never fewer than that
        (8, [], 8),
        (8, [0.25], 16),
        (8, [0.29], 16),  # 13.8 would fit; whole periods only
        (50, [9.0], 50),
    ],
)
def test_turns_have_the_steps_that_fit_and_whole_periods(period, taken_s, steps):
    assert steps_in(Amount(rounds=3, turn_s=4.0), period, taken_s) == steps


def test_contenders_know_how_their_workers_keep_together():
    compressed = kind_of(at_pace("allreduce[compress=topk:0.01+int8]"))
    assert compressed.is_coordinated and not compressed.is_free and compressed.period == 1
    streaming = kind_of(at_pace("diloco:50[fragments=2]"))
    assert not streaming.is_coordinated and not streaming.is_free and streaming.period == 50
    assert kind_of("independent").is_free and kind_of("async").is_free
    assert not kind_of("ps").is_free and not kind_of(FP16).is_free


def test_codecs_become_rows_beside_the_one_without():
    rows = codecs.rows(["int8", "topk:0.01+int8", "powersgd:1", "randomk:0.1"])
    assert [row.label for row in rows] == [
        "allreduce",
        "int8",
        "topk:0.01+int8",
        "powersgd:1",
        "randomk:0.1",
    ]
    assert [row.pace for row in rows[:2]] == ["allreduce", "allreduce[compress=int8]"]
    assert [row.family for row in rows] == ["lockstep", "bits", "values", "rank", "values"]
    assert not any(row.optimizers for row in rows)
    own, plain = codecs.rows(["dgc:0.01(warmup=8)", "dgc(momentum=0)"])[1:]
    assert (own.family, plain.family) == ("values", "values")
    assert own.optimizers and own.note and not plain.optimizers  # its momentum is not the task's


def test_a_part_that_is_measured_again_replaces_its_former_self_only(tmp_path, capsys):
    kept = tmp_path / "deep" / "codecs.json"
    found = {"tasks": {}, "workers": 4}
    about = {"title": "Codecs", "left_out": ["int9: left out: because"]}
    parts.carry_out({"loss": lambda _: found}, kept, about, quick=True)
    other = {"scenarios": {}, "sleep_s": 0.01, "steps": 8}
    parts.carry_out({"stragglers": lambda _: other}, kept, about, quick=False)
    parts.carry_out({"loss": lambda _: {**found, "workers": 2}}, kept, about, quick=False)
    content = json.loads(kept.read_text(encoding="utf-8"))
    assert content["loss"]["workers"] == 2 and content["stragglers"]["steps"] == 8
    written = kept.with_suffix(".md").read_text(encoding="utf-8")
    assert written.startswith("# Codecs\n") and "- int9: left out: because" in written
    assert "--quick" not in written and written in capsys.readouterr().out
