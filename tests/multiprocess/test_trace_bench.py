"""bench/trace_cost.py from end to end, with few steps: it runs, and measures both sides."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_steps_are_measured_with_a_trace_and_without(tmp_path: Path) -> None:
    script = ROOT / "bench" / "trace_cost.py"
    command = [sys.executable, str(script), "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "must <= +5 %" in done.stdout
    (written,) = tmp_path.glob("trace-cost-*.json")
    (found,) = json.loads(written.read_text(encoding="utf-8"))["found"]
    assert len(found["on_s"]) == len(found["off_s"]) == 2
    assert all(time_s > 0 for time_s in found["on_s"] + found["off_s"])
