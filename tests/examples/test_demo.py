"""`make demo`: two trainings, and a table that follows from what they measured."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

COMPARE = Path(__file__).resolve().parents[2] / "examples" / "demo" / "compare.py"


def test_the_demo_trains_twice_and_compares(tmp_path: Path) -> None:
    command = [sys.executable, str(COMPARE), "--steps", "15"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "15 steps with 2 workers" in done.stdout
    assert "15 steps with plain PyTorch in 1 process" in done.stdout

    def row(name: str) -> list[float]:
        (line,) = re.findall(rf"^ *{name} +(.*)$", done.stdout, re.MULTILINE)
        return [float(word) for word in re.findall(r"[\d.]+", line.replace(",", ""))]

    one, two = row("samples/s")
    speed_up = row("speed-up")[1]
    # The speeds are shown in whole samples, the ratio with two digits.
    assert abs(speed_up - two / one) <= 0.006 + 2 / one
    assert abs(row("efficiency")[1] - 50 * speed_up) <= 1
    # The same steps on the same samples: at most one of the 360 images falls on the other side.
    accuracies = row("test accuracy")
    assert min(accuracies) > 80 and abs(accuracies[0] - accuracies[1]) <= 0.4
    kept = re.findall(r"TensorBoard files are in (\S+)$", done.stderr, re.MULTILINE)
    assert len(kept) == 2
    assert all((tmp_path / directory / "events.jsonl").exists() for directory in kept)
    assert re.search(r"optimizer's update +plain +(sharded|replicated)", done.stdout)


def test_the_demo_refuses_to_measure_next_to_nothing():
    done = subprocess.run(
        [sys.executable, str(COMPARE), "--steps", "2"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and "--steps 2: at least 10" in done.stderr
