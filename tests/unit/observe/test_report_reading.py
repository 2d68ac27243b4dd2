"""Directories that are runs, half runs, and none at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.observe.report.page import render, write
from paceline.observe.report.reading import read_run
from paceline.observe.telemetry.events import Note
from support.recorded import Parsed, training, whole, write_record


def text_of(directory: Path) -> str:
    return Parsed(render(read_run(directory))).text


def test_a_whole_run_has_no_remarks(tmp_path: Path) -> None:
    run = read_run(write_record(tmp_path, whole(training())))
    assert run.remarks == [] and run.state.steps == 40


def test_a_line_that_is_cut_is_counted_and_the_rest_is_shown(tmp_path: Path) -> None:
    text = text_of(write_record(tmp_path, whole(training()), b'{"t":3.5,"event":{"type":"prog'))
    assert "1 line of events.jsonl could not be read" in text and "Loss over time" in text


def test_an_empty_record_makes_a_page_that_says_so(tmp_path: Path) -> None:
    text = text_of(write_record(tmp_path, []))
    assert "events.jsonl is empty" in text and "running or killed" in text


@pytest.mark.parametrize(
    "content", [b'{"a": 1}\n[1, 2]\n', b"\x00\xff\xfe" * 100, b"loss,step\n1,2\n", b"\n\n\n"]
)
def test_a_foreign_record_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "events.jsonl").write_bytes(content)
    with pytest.raises(UsageError, match="none of its [123] lines is an event of a run"):
        read_run(tmp_path)


def test_what_is_no_run_is_refused_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no .*nothing; expected a run directory"):
        read_run(tmp_path / "nothing")
    for name in ("20261117-1", "20261118-2"):
        write_record(tmp_path / name, whole([]))
    with pytest.raises(UsageError, match=r"has no events\.jsonl; .* did you mean .*20261118-2\?"):
        read_run(tmp_path)
    with pytest.raises(UsageError, match=r"events\.jsonl is a file; expected a run directory"):
        read_run(tmp_path / "20261117-1" / "events.jsonl")


def test_of_several_runs_in_one_record_the_last_is_shown(tmp_path: Path) -> None:
    text = text_of(
        write_record(tmp_path, [*whole(training()), *whole([(0.5, Note(0, "the second"))])])
    )
    assert "also holds an earlier run" in text and "the second" in text
    assert "Loss over time" not in text


def test_settings_come_with_their_origins(tmp_path: Path) -> None:
    write_record(tmp_path, whole([]))
    settings = {
        "pace": {"value": "ssp:3", "origin": "command line"},
        "torch_version": {"value": "2.13.0", "origin": "found"},
        "odd": [1, None],
        "script": {"value": "<b>.py", "origin": "environment NAME"},
    }
    (tmp_path / "config.json").write_text(json.dumps(settings))
    text = text_of(tmp_path)
    assert "pacessp:3command line" in text and "odd[1,null]" in text and "<b>.py" in text
    assert "torch 2.13.0" in text


@pytest.mark.parametrize("content", ["{", "[]", '"x"', "\ud800"])
def test_a_broken_configuration_or_trace_is_a_remark(tmp_path: Path, content: str) -> None:
    write_record(tmp_path, whole(training()))
    for name in ("config.json", "trace.json"):
        (tmp_path / name).write_bytes(content.encode("utf-8", "surrogatepass"))
    run = read_run(tmp_path)
    assert any("config.json could not be read" in remark for remark in run.remarks)
    assert "One step, all workers" in render(run)


def test_a_page_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    write("first \ud800", target)
    assert target.read_bytes() == b"first ?"
    assert target.stat().st_mode & 0o077 or target.stat().st_mode & 0o400
    link = tmp_path / "link.html"
    link.symlink_to(target)
    write("second", link)
    assert link.is_symlink() and target.read_text() == "second"
    for place in (tmp_path, tmp_path / "no" / "page.html", Path("/dev/null")):
        with pytest.raises(UsageError, match="cannot write .* -o FILE"):
            write("third", place)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.html", "page.html"]
