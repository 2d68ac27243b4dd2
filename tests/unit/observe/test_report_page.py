"""Pages about all kinds of runs: what they say, and that there always is one."""

from __future__ import annotations

import math
import re

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.observe.report.canvas import AxisScale, format_tick, padded_range, round_step
from paceline.observe.telemetry import events as ev
from paceline.observe.telemetry.events import RunEnded, RunStarted
from paceline.observe.telemetry.staleness import TableReport, WorkerReport
from paceline.observe.telemetry.step_times import StepTimes
from paceline.runtime.formatting import duration, percent, short_number
from support.recorded import STARTED, Parsed, page_of, training, whole


def text_of(events: list) -> str:
    return Parsed(page_of(events)).text


def test_head_and_headline() -> None:
    text = text_of(whole(training()))
    for words in ("20261117-071204-train-3f2a", "finished", "paceline run -n 2 train.py"):
        assert words in text
    assert "2026-11-17 07:12 UTC" in text and "allreduce" in text and "Paceline 0.1.0" in text
    assert "samples per second640" in text  # 2 workers, 32 samples each, 10 steps per second
    assert "waiting for other processes28 %" in text
    assert "final loss0.276" in text
    assert "Worker 1 is the slowest: it computes longer." in text


def test_input_is_named_as_the_cause() -> None:
    slow = [
        (t, ev.ProgressReport(e.rank, e.step, {}, steps=tuple(
            StepTimes(s.step, s.end_s, s.took_s, 0.06 if e.rank == 1 else 0.01, s.wait_s, 32)
            for s in e.steps)))
        for t, e in training()
    ]  # fmt: skip
    assert "Worker 1 is the slowest: it waits longer for its input." in text_of(whole(slow))


@pytest.mark.parametrize("waited_s", [0.0, 1.0])
def test_servers_know_whether_the_slowest_was_waited_for(waited_s: float) -> None:
    """As in the closing lines: at free-running paces a slow worker costs the others nothing."""
    told = TableReport("model", 0, 9, (WorkerReport(0, 20, {1: 20}, {1: waited_s}),))
    first, *others = whole([*training(), (1.9, told)])
    started = msgspec.structs.replace(first[1], servers=1)
    text = text_of([(0.0, started), *others])
    assert ("Worker 1 is the slowest" in text) == bool(waited_s)
    assert ("the exchange itself (network, servers)" in text) == (not waited_s)


def test_sections_are_there_when_their_data_is() -> None:
    bare = text_of(whole([]))
    everything = text_of(
        whole(
            [
                *training(),
                (0.5, ev.ServerLoad(2, 0, 100.0, 1e6, 0.5, 3)),
                (1.0, ev.ServerLoad(2, 0, 120.0, 1e6, 0.6, 1)),
                (0.7, ev.MemberLost("worker", 1, 1, "vm:7", "killed", 2)),
                (0.8, ev.Resumed(0, 7, 1, (1,), 0.2, True)),
                (0.9, ev.MemberJoined("worker", 1, 3, "vm:8", 3)),
                (1.9, TableReport("model", 0, 9, (WorkerReport(0, 3, {0: 2, 3: 1}, {1: 0.5}),))),
            ]
        )
    )
    for title in (
        "Loss over time", "Loss over samples", "Learning rate", "Throughput",
        "Where the time of a step goes", "Waits between workers", "One step, all workers",
        "Staleness of table model", "Load", "Queue", "What happened",
    ):  # fmt: skip
        assert title in everything
        assert title not in bare
    assert "worker 1 (rank 1, vm:7) was lost: killed" in everything
    assert "1 worker resumes at step 7 after 200 ms, without rank 1" in everything
    assert "Counted by the servers." in everything


def test_who_waited_for_whom_without_servers() -> None:
    page = page_of(whole(training(3, 20, slow=2), 3))
    assert "worker 0 waited for worker 2: 1 s" in page
    assert "worker 2 waited for worker 0: 0 s" in page


def test_a_worker_that_joined_has_its_own_number_not_its_rank() -> None:
    joined = (0.0, ev.MemberJoined("worker", 1, 9, "vm:8", 2))
    moved = [
        (t, ev.ProgressReport({0: 0, 1: 9}[e.rank], e.step, e.values, steps=e.steps))
        for t, e in training()
    ]
    page = page_of(whole([joined, *moved]))
    assert "worker 1: compute" in page and "worker 9: compute" not in page


def test_a_run_without_an_end_may_still_run() -> None:
    text = text_of([(0.0, STARTED), *training()])
    assert "running or killed" in text and "recorded so far" in text


def test_a_failure_shows_its_exit_code() -> None:
    assert "exit code 17" in text_of([(0.0, STARTED), (1.0, RunEnded(17, 1.0))])


def test_losses_that_are_not_finite() -> None:
    bad = [
        (3.0, ev.ProgressReport(1, 21, {"loss": math.nan})),
        (3.1, ev.ProgressReport(0, 21, {"loss": 0.1})),
    ]
    text = text_of(whole([*training(), *bad, (3.2, ev.ProgressReport(1, 22, {"loss": -math.inf}))]))
    assert "final lossnot finite" in text
    assert "2 values were not finite; red: the first one, of worker 1" in text
    assert "no value was finite" in text_of(whole(bad[:1]))


def test_one_worker_waits_for_nobody() -> None:
    text = text_of(whole(training(1, slow=0), 1))
    assert "slowest" not in text and "Waits between workers" not in text
    assert "Loss over time" in text


def test_no_steps_and_no_samples() -> None:
    assert "samples per second" not in text_of(
        whole([(1.0, ev.ProgressReport(0, 1, {"loss": 1.0}))])
    )
    uncounted = [
        (t, ev.ProgressReport(e.rank, e.step, e.values, steps=tuple(
            StepTimes(s.step, s.end_s, s.took_s, s.input_s, s.wait_s) for s in e.steps)))
        for t, e in training()
    ]  # fmt: skip
    text = text_of(whole(uncounted))
    assert "steps per second10" in text and "Loss over steps" in text


def test_hundreds_of_workers_make_a_page_of_ordinary_size() -> None:
    waited = tuple(
        WorkerReport(w, 10, {w % 7: 5, 1000 * w: 1}, {v: 0.1 for v in range(512) if v != w})
        for w in range(512)
    )
    told = [*training(512, 8, slow=77), (9.0, TableReport("t", 0, 9, waited))]
    page = page_of(whole(told, 512))
    assert len(page) < 1_000_000
    text = Parsed(page).text
    assert "24 of 512 workers" in text and "worker 77" in text
    assert "The 16 stalest of 512 workers." in text


def test_many_happenings_and_values_are_counted_not_listed() -> None:
    notes = [(0.001 * i, ev.Note(0, f"note number {i}.")) for i in range(5000)]
    values = [(1.0, ev.ProgressReport(0, 1, {f"value {i}": 1.0 for i in range(100)}))]
    text = text_of(whole([*notes, *values]))
    assert "note number 0." in text and "note number 4999." in text
    assert "note number 2500." not in text and "... 4,800 more ..." in text
    assert "92 more values were reported." in text


integers = st.integers(-(2**70), 2**70) | st.integers(0, 5)
floats = st.floats() | st.floats(0, 10)
texts = st.text(max_size=10)
counts = st.dictionaries(integers, integers, max_size=4)
step_times = st.builds(
    StepTimes, step=integers, end_s=floats, took_s=floats, input_s=floats, wait_s=floats,
    samples=integers,
)  # fmt: skip
FIELDS = {int: integers, float: floats, str: texts, dict[str, float]: st.dictionaries(
    texts | st.sampled_from(["loss", "lr"]), floats, max_size=3)}  # fmt: skip
KINDS = [
    ev.Note, ev.ServerLoad, ev.Resumed, ev.Preemptible, ev.EpochEnded, ev.MemberLost,
    ev.MemberJoined, ev.MemberLeft, ev.Promoted, ev.PartitionsMoved, ev.BackupCaughtUp,
    ev.CoordinatorRestarted,
    RunStarted, RunEnded,
]  # fmt: skip
ranks = st.integers(-1, 3) | integers
events = st.one_of(
    st.builds(
        ev.ProgressReport, rank=ranks, step=integers, age_s=floats,
        values=FIELDS[dict[str, float]], steps=st.lists(step_times, max_size=3).map(tuple),
    ),
    st.builds(
        TableReport, table=texts, server=integers, version=integers,
        workers=st.lists(
            st.builds(
                WorkerReport, worker=ranks, updates=integers, staleness=counts,
                waited_s=st.dictionaries(ranks, floats, max_size=4),
            ),
            max_size=3,
        ).map(tuple),
    ),
    *(st.from_type(kind) for kind in KINDS),
)  # fmt: skip


@settings(max_examples=120, deadline=None)
@given(st.lists(st.tuples(floats, events), max_size=25))
def test_any_sequence_of_events_makes_a_page(told: list) -> None:
    page = page_of(told)
    assert page.endswith("</html>\n") and len(page) < 2_000_000
    assert not re.search(r' (?:points|[xyr][12]?|c[xy]|width|height)="[^"]*(?:nan|inf|e)', page)


@settings(max_examples=300, deadline=None)
@given(st.floats(-1e29, 1e29), st.floats(-1e29, 1e29), st.booleans())
def test_every_range_has_a_few_ticks(one: float, other: float, from_zero: bool) -> None:
    scale = AxisScale(*padded_range((one, other), from_zero=from_zero), 0, 100)
    ticks = scale.ticks()
    assert 1 <= len(ticks) <= 9
    assert all(0 <= scale.at(value) <= 100 for value, _ in ticks)
    assert scale.at(max(one, other)) >= scale.at(min(one, other))


@pytest.mark.parametrize(
    ("value", "words"),
    [(0, "0"), (0.01234, "0.0123"), (12.3456, "12.3"), (15428.4, "15,428"), (5.12e6, "5.12M"),
     (1e-7, "1.00e-7"), (math.nan, "not finite")],
)  # fmt: skip
def test_numbers_for_people(value: float, words: str) -> None:
    assert short_number(value) == words


def test_times_shares_and_ticks_for_people() -> None:
    told = [duration(x) for x in (0, 0.0004, 0.35, 4.21, 200, 7500, 3e5)]
    assert told == ["0 s", "0.4 ms", "350 ms", "4.21 s", "3 min 20 s", "2 h 5 min", "3 d 11 h"]
    assert [percent(x) for x in (0, 0.004, 0.234, 1)] == ["0 %", "0.4 %", "23 %", "100 %"]
    ticks = ((0.5, 0.5), (0.02, 0.02), (20_000, 5000), (2e6, 1e6))
    assert [format_tick(x, s) for x, s in ticks] == ["0.5", "0.02", "20k", "2M"]
    assert [round_step(x) for x in (0.9, 0.3, 6, 80)] == [1.0, pytest.approx(0.2), 5.0, 100.0]
