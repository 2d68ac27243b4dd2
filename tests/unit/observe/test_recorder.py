"""The recorder keeps what it can, and never holds up the job: full disks, dead disks, floods."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.observe.record import recorder as module
from paceline.observe.record.files import RunFiles
from paceline.observe.record.recorder import RunRecorder
from paceline.observe.record.sampling import Sampler
from paceline.observe.telemetry.events import Note, ProgressReport, RunEnded
from paceline.observe.telemetry.file_formats import EventReader
from paceline.runtime.process_names import ProcessName, process_names

NOISE = os.urandom(4096)


def recorder_of(directory: Path, num_workers: int = 2, **more) -> RunRecorder:
    return RunRecorder(
        RunFiles(directory, process_names(num_workers), lambda _: b"{}\n", **more),
        Sampler(process_names(num_workers)),
    )


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not is_true():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.01)


def events_in(directory: Path) -> list:
    reading = EventReader(directory / "events.jsonl")
    events = [line.event for line in reading.lines()]
    assert reading.damaged == 0
    return events


def test_everything_is_kept_in_order(tmp_path: Path):
    directory = tmp_path / "deep" / "run"
    recorder = recorder_of(directory)
    said: list[str] = []
    recorder.start(said.append)
    told = [ProgressReport(0, 1, {"loss": float("nan")}), Note(1, "</script>\x00 \u2028")]
    for event in told:
        recorder.record(event)
    recorder.output(ProcessName(0, 0), b"out\xff\n")
    recorder.output(ProcessName(7, 1, is_newcomer=True), b"replaced\n")
    assert recorder.close(RunEnded(0, 1.0)) == [] and said == []
    found = events_in(directory)
    assert str(found[0].values["loss"]) == "nan" and found[1:] == [told[1], RunEnded(0, 1.0)]
    assert (directory / "rank-0.log").read_bytes() == b"out\xff\n"
    assert (directory / "rank-1.log").read_bytes() == b"replaced\n"
    assert (directory / "config.json").exists() and (directory / "tb" / "worker-0").is_dir()
    assert recorder.close() == [], "once is enough"


def test_the_record_can_be_read_while_it_grows(tmp_path: Path):
    recorder = recorder_of(tmp_path)
    recorder.start(print)
    recorder.record(Note(0, "first"))
    wait_until(lambda: (tmp_path / "events.jsonl").exists() and bool(events_in(tmp_path)))
    recorder.close()


def test_a_run_that_never_began_leaves_nothing(tmp_path: Path):
    recorder = recorder_of(tmp_path / "run")
    recorder.record(Note(0, "x"))
    assert recorder.close(RunEnded(1, 0.0)) == []
    assert not (tmp_path / "run").exists()


def test_a_successor_goes_on_behind_a_line_that_was_cut(tmp_path: Path):
    first = recorder_of(tmp_path)
    first.start(print)
    first.record(Note(0, "first"))
    first.close()
    (tmp_path / "rank-0.log").write_text("kept")
    with open(tmp_path / "events.jsonl", "ab") as file:
        file.write(b'{"t":1.0,"ev')
    second = recorder_of(tmp_path, keeps_logs=False, is_resumed=True)
    second.start(print)
    second.record(Note(0, "second"))
    second.close()
    reading = EventReader(tmp_path / "events.jsonl")
    assert [line.event.text for line in reading.lines()] == ["first", "second"]
    assert reading.damaged == 1 and (tmp_path / "rank-0.log").read_text() == "kept"


def test_more_logs_than_files_may_be_open(tmp_path: Path):
    recorder = recorder_of(tmp_path, 100)
    recorder.start(print)
    for _ in range(3):
        for name in process_names(100):
            recorder.output(name, f"{name.rank}\n".encode())
    recorder.close()
    assert all((tmp_path / f"rank-{r}.log").read_text() == f"{r}\n" * 3 for r in range(100))


def _below_a_file(tmp_path: Path) -> Path:
    (tmp_path / "file").touch()
    return tmp_path / "file" / "run"


def _a_file(tmp_path: Path) -> Path:
    (tmp_path / "file").touch()
    return tmp_path / "file"


def _full_events(tmp_path: Path) -> Path:
    (tmp_path / "events.jsonl").symlink_to("/dev/full")
    return tmp_path


def _full_log(tmp_path: Path) -> Path:
    (tmp_path / "rank-0.log").symlink_to("/dev/full")
    return tmp_path


def _no_place_for_tensorboard(tmp_path: Path) -> Path:
    (tmp_path / "tb").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_below_a_file, "cannot be written: Not a directory"),
        (_a_file, "cannot be written: File exists"),
        (_full_events, "cannot be written any more: No space left on device"),
        (_full_log, "cannot be written any more: No space left on device"),
        (_no_place_for_tensorboard, "cannot be written any more: Not a directory"),
    ],
)
def test_what_cannot_be_written_is_said_once(tmp_path: Path, make, reason: str):
    directory = make(tmp_path)
    recorder = recorder_of(directory)
    said: list[str] = []
    recorder.start(said.append)
    for step in range(100):
        recorder.record(ProgressReport(0, step, {"loss": 1.0}))
        recorder.output(ProcessName(0, 0), NOISE)
    assert recorder.close(RunEnded(0, 1.0)) == []
    assert len(said) == 1 and not recorder.is_writing
    assert f"{directory} {reason}; the job continues without logs, config.json, events" in said[0]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(path)]
    done = subprocess.run(command, check=False)
    if done.returncode:
        pytest.skip("no disk can be mounted here")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.root
def test_a_disk_that_becomes_full(small_disk: Path):
    recorder = recorder_of(small_disk)
    said: list[str] = []
    recorder.start(said.append)
    recorder.record(Note(0, "first"))
    wait_until(lambda: (small_disk / "events.jsonl").exists() and bool(events_in(small_disk)))
    for step in range(100):
        recorder.record(ProgressReport(0, step, {"loss": 1.0}))
        recorder.output(ProcessName(0, 0), NOISE)
    recorder.close(RunEnded(0, 1.0))
    assert len(said) == 1 and "cannot be written any more: No space left on device" in said[0]
    assert next(iter(EventReader(small_disk / "events.jsonl").lines())).event == Note(0, "first")


def test_a_disk_that_hangs_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "HANGS_S", 0.3)
    os.mkfifo(tmp_path / "rank-0.log")  # opening it waits for a reader, which never comes
    recorder = recorder_of(tmp_path)
    recorder.start(print)
    for _ in range(3000):
        recorder.output(ProcessName(0, 0), NOISE)
    assert recorder._backlog_bytes > module.BACKLOG_LIMIT_BYTES
    wait_until(lambda: not recorder.is_behind)  # the ranks are read again
    held_bytes = recorder._backlog_bytes
    for _ in range(3000):
        recorder.output(ProcessName(0, 0), NOISE)
    for _ in range(module.MAX_EVENTS + 5000):
        recorder.record(Note(0, "x"))
    assert recorder._backlog_bytes == held_bytes
    assert recorder._queue.qsize() <= module.MAX_EVENTS + 1
    lines = recorder.close(RunEnded(0, 1.0))
    assert lines == [
        f"paceline: {tmp_path}: the disk does not respond; the end of the record is lost"
    ]
    _release(recorder, tmp_path / "rank-0.log")


def _release(recorder: RunRecorder, fifo: Path) -> None:
    """Let the thread end: it finds a reader, and then one that has gone away."""
    reader = os.open(fifo, os.O_RDONLY)
    while not os.read(reader, 1):  # it was opened only to empty it
        time.sleep(0.01)
    os.close(reader)
    recorder._thread.join(30)
    assert not recorder._thread.is_alive()


def test_a_disk_that_comes_back_and_what_is_missing(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(module, "HANGS_S", 0.3)
    os.mkfifo(tmp_path / "rank-0.log")
    recorder = recorder_of(tmp_path)
    recorder.start(print)
    for _ in range(module.MAX_EVENTS + 500):
        recorder.record(Note(0, "x"))
    fifo = os.open(tmp_path / "rank-0.log", os.O_RDONLY)
    (line,) = recorder.close(RunEnded(0, 1.0))
    os.close(fifo)
    kept = len(events_in(tmp_path)) - 1
    assert 0 < module.MAX_EVENTS + 500 - kept <= 500
    assert line == (
        f"paceline: {tmp_path}: {module.MAX_EVENTS + 500 - kept} events are missing: the disk was"
        " too slow"
    )


def test_a_flood_of_events(tmp_path: Path):
    recorder = recorder_of(tmp_path)
    recorder.start(print)
    event = ProgressReport(0, 7, {"loss": 0.5})
    for _ in range(500_000):
        recorder.record(event)
    assert recorder._queue.qsize() <= module.MAX_EVENTS + 1
    recorder.close(RunEnded(0, 1.0))
    kept = sum(1 for _ in EventReader(tmp_path / "events.jsonl").lines()) - 1
    assert kept + recorder._dropped_events == 500_000 and kept > 1000


_WITHOUT = """
import sys
from pathlib import Path
sys.modules["tensorboard"] = None  # as if it were not installed
from paceline.observe.record.files import RunFiles
from paceline.observe.record.sampling import Sampler
from paceline.observe.record.recorder import RunRecorder
from paceline.runtime.process_names import process_names
from paceline.observe.telemetry.events import ProgressReport
names = process_names(2)
recorder = RunRecorder(RunFiles(Path(sys.argv[1]), names, lambda _: b""), Sampler(names))
recorder.start(print)
recorder.record(ProgressReport(0, 1, {"loss": 1.0}))
recorder.record(ProgressReport(1, 1, {"loss": 1.0}))
recorder.close()
"""


def test_without_tensorboard_a_line_says_how_to_get_it(tmp_path: Path):
    command = [sys.executable, "-c", _WITHOUT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    want = "paceline: no TensorBoard files are written; pip install tensorboard\n"
    assert (done.stdout, done.stderr) == (want, "")
    assert len(events_in(tmp_path)) == 2 and not (tmp_path / "tb").exists()


_NOT_AT_THE_START = """
import sys
import paceline.cli.run, paceline.launcher.run_directory
print(*sorted({name.split(".")[0] for name in sys.modules}))
"""


def test_heavy_packages_are_imported_when_they_are_needed():
    command = [sys.executable, "-c", _NOT_AT_THE_START]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert {"torch", "tensorboard", "prometheus_client", "numpy"}.isdisjoint(done.stdout.split())
