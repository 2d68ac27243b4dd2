"""bench/telemetry.py from end to end, with few steps: it runs, and measures both sides."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def measured(out: Path, *options: str) -> list[dict[str, Any]]:
    command = [sys.executable, str(ROOT / "bench" / "telemetry.py"), "--quick", "--out", str(out)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "must" in done.stdout
    (written,) = out.glob("telemetry-*.json")
    found: list[dict[str, Any]] = json.loads(written.read_text(encoding="utf-8"))["found"]
    return found


def test_steps_are_measured_with_telemetry_and_without(tmp_path: Path) -> None:
    found = measured(tmp_path)
    assert [pair["title"] for pair in found] == [
        "same processes",
        "two jobs",
        "two jobs alike",
    ]
    for pair in found:
        assert len(pair["on_s"]) == len(pair["off_s"]) == 2
        assert all(time_s > 0 for time_s in pair["on_s"] + pair["off_s"])


@pytest.mark.slow
def test_the_launcher_is_measured_with_its_table_and_without(tmp_path: Path) -> None:
    (found,) = measured(tmp_path, "--display", "--rounds", "1")
    assert len(found["terminal"]) == len(found["pipe"]) == 1
