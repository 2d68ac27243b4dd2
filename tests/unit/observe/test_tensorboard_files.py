"""TensorBoard reads what we write: scalars, histograms, odd names and numbers."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

from paceline.observe.record.sampling import JOB, Sample
from paceline.observe.record.tensorboard import TensorBoard, _checksum, safe_tag


def read(directory: Path) -> EventAccumulator:
    found = EventAccumulator(str(directory), size_guidance={"scalars": 0, "histograms": 0})
    found.Reload()
    return found


def test_samples_become_runs_of_their_own(tmp_path: Path):
    board = TensorBoard(tmp_path)
    for step in (10, 20):
        worker = Sample(("worker", 3), step, {"time/wait share": 0.5}, {"loss": 1 / step})
        board.write([worker, Sample(JOB, step, {"workers": 4.0})])
    worker, job = read(tmp_path / "worker-3"), read(tmp_path / "job")
    assert [(e.step, round(e.value, 4)) for e in worker.Scalars("loss")] == [(10, 0.1), (20, 0.05)]
    assert [e.value for e in worker.Scalars("time/wait share")] == [0.5, 0.5]
    assert worker.Scalars("loss")[0].wall_time > 1e9
    assert job.Tags()["scalars"] == ["workers"]


def test_values_that_are_no_numbers(tmp_path: Path):
    values = {"nan": math.nan, "inf": math.inf, "huge": 1e300, "tiny": -1e-300}
    TensorBoard(tmp_path).write([Sample(("worker", 0), 1, {}, values)])
    found = read(tmp_path / "worker-0")
    told = {name: found.Scalars(name)[0].value for name in values}
    assert math.isnan(told["nan"]) and told["inf"] == told["huge"] == math.inf
    assert told["tiny"] == 0


def test_staleness_is_a_histogram(tmp_path: Path):
    counts = Counter({0: 3, 1: 2, 7: 1})
    TensorBoard(tmp_path).write([Sample(("worker", 0), 4, staleness=counts)])
    event = read(tmp_path / "worker-0").Histograms("staleness histogram")[0]
    histogram = event.histogram_value
    assert (event.step, histogram.num, histogram.sum) == (4, 6, 9)
    assert list(histogram.bucket_limit) == [0.5, 1.5, 6.5, 7.5]
    assert list(histogram.bucket) == [3, 2, 0, 1]


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        ("val/accuracy", "val/accuracy"),
        ("<script>alert(1)</script>", "_script_alert(1)_/script_"),
        ("\x1b[2J\n\x00", "__2J__"),
        ("/../../etc/passwd", "../../etc/passwd"),
        ("損失 %", "損失 %"),
        ("///", "unnamed"),
        ("", "unnamed"),
        ("x" * 1000, "x" * 100),
    ],
)
def test_names_are_made_safe(tmp_path: Path, name: str, tag: str):
    assert safe_tag(name) == tag
    TensorBoard(tmp_path).write([Sample(("worker", 0), 1, {}, {name: 2.0})])
    assert read(tmp_path / "worker-0").Scalars(tag)[0].value == 2.0
    assert [path.name for path in tmp_path.iterdir()] == ["worker-0"]


def test_the_checksum_is_that_of_record_files():
    for data in (b"", b"a", bytes(range(256)) * 3):
        assert int.from_bytes(_checksum(data), "little") == masked_crc32c(data)
