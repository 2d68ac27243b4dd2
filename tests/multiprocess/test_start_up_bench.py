"""bench/start_up.py from end to end, with two workers: it runs, and measures both ways."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_starts_are_measured_with_a_template_and_without(tmp_path: Path) -> None:
    script = ROOT / "bench" / "start_up.py"
    command = [sys.executable, str(script), "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "start_up.json").read_text())
    assert list(rows) == ["init, 1 worker", "init, 2 workers", "init, 2 workers, --no-template"]
    assert all(row["min_s"] > 0 and row["memory_mb"] > 0 for row in rows.values())
    # Two fresh interpreters import twice; this is processor time, which a busy machine lets be.
    assert rows["init, 2 workers"]["busy_s"] < rows["init, 2 workers, --no-template"]["busy_s"]
