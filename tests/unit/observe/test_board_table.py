"""The table of a job: what fits into how many columns."""

from __future__ import annotations

import pytest

from paceline.observe.display.board import BoardSnapshot, ProcessRow
from paceline.observe.display.table import table_lines
from paceline.runtime.formatting import cut, duration, number, rate, width_of


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (3.0, "3"),
        (0.123456, "0.1235"),
        (float("nan"), "nan"),
        (1e30, "1e+30"),
        (123456.7, "123457"),
    ],
)
def test_values_are_short(value: float, shown: str) -> None:
    assert number(value) == shown


def test_rates_and_times_are_readable() -> None:
    assert [rate(v) for v in (0.123, 9.96, 99.96, 12345.6, 3e9)] == [
        "0.12", "10.0", "100", "12346", "3e+09",
    ]  # fmt: skip
    assert [duration(v) for v in (0.4, 59.6, 190, 3600, 7500, 90_000)] == [
        "400 ms", "1 min", "3 min 10 s", "1 h", "2 h 5 min", "1 d 1 h",
    ]  # fmt: skip


def test_wide_characters_take_two_columns() -> None:
    assert width_of("损失") == 4 and width_of("\x1b[1mab\x1b[0m") == 2 and width_of("e\u0301") == 1
    assert cut("损失函数", 6) == "损..." and cut("loss", 4) == "loss" and cut("losses", 4) == "l..."


def _row(label: str = "0", state: str = "running") -> ProcessRow:
    return ProcessRow(
        label=label,
        step=1000,
        values={"loss": 0.123456, "tokens_per_s": 123456.7, "accuracy": 0.98765},
        state=state,
        samples_per_s=1234.5,
        input=3.4,
        wait=20.6,
        staleness=1.25,
        sent_per_s=19.5e6,
    )


def _picture(*rows: ProcessRow, words: tuple[str, ...] = ()) -> BoardSnapshot:
    return BoardSnapshot(("loss", "tokens_per_s", "accuracy"), rows, "", words)


@pytest.mark.parametrize(
    ("width", "titles", "below"),
    [
        (
            160,
            "rank step samples/s loss tokens_per_s accuracy input % wait % stale MB/s state",
            [],
        ),
        (
            84,
            "rank step samples/s loss tokens_per_s input % wait % stale MB/s state",
            ["no room for accuracy"],
        ),
        (
            60,
            "rank step samples/s loss input % wait % stale",
            ["all running; no room for accuracy, tokens_per_s, MB/s"],
        ),
        (
            40,
            "rank step samples/s loss wait %",
            ["all running; no room for accuracy,", "tokens_per_s, MB/s, input %, stale"],
        ),
        (24, "rank step samples/s", ["all running; no room for", "accuracy, tokens_per_..."]),
    ],
)
def test_a_table_drops_columns_instead_of_cutting_numbers(
    width: int, titles: str, below: list[str]
) -> None:
    lines = table_lines(_picture(_row(), _row("1")), width, limit=10)
    assert " ".join(lines[0].split()) == titles
    assert all(width_of(line) <= max(width, 20) for line in lines)
    assert lines[1].split()[:3] == ["0", "1000", "1234"] and lines[2].split()[0] == "1"
    assert lines[3:] == below


def test_columns_stand_under_their_titles() -> None:
    title, row = table_lines(_picture(_row()), 160, limit=10)
    for name in ("rank", "loss", "input %", "MB/s"):
        end = title.index(name) + len(name)
        assert row[end - 1] != " " and row[end : end + 1] in (" ", ""), (name, title, row)


def test_a_state_that_differs_stays_and_is_cut() -> None:
    picture = _picture(_row(), _row("1", "stopped because rank 0 failed"))
    lines = table_lines(picture, 40, limit=10)
    assert lines[0].endswith("state") and lines[2].endswith("stopped becaus...")
    assert all(len(line) <= 40 for line in lines)
    assert table_lines(picture, 160, limit=10)[2].endswith("stopped because rank 0 failed")


def test_more_ranks_than_lines_are_counted() -> None:
    rows = [_row(str(k), "running" if k < 30 else "finished") for k in range(40)]
    lines = table_lines(_picture(*rows), 100, limit=8)
    assert len(lines) == 9 and lines[-1] == "... 23 more running, 10 more finished"


def test_what_nobody_knows_has_no_column() -> None:
    row = ProcessRow(label="0", step=None, values={}, state="starting")
    assert table_lines(BoardSnapshot((), [row], ""), 80, limit=8) == [
        "rank   step   steps/s   state",
        "   0      -         -   starting",
    ]


def test_words_below_are_two_lines_at_most() -> None:
    words = (
        "62 % done, 3 min 10 s left",
        "the other workers wait for worker 2 (its input)",
        "x" * 90,
    )
    lines = table_lines(_picture(_row(), words=words), 40, limit=8)
    assert lines[2].startswith("62 % done, 3 min 10 s left") and len(lines) == 4
    assert lines[3].endswith("...")
