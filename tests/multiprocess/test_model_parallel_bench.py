"""bench/model_parallel.py from end to end with a tiny model: it runs, and it measures everybody."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONTENDERS = {
    "tp": {"one", "tp-gloo", "tp-gloo-kept", "tp-paceline", "tp-ours"},
    "pp": {"one", "pp-gloo", "pp-gloo-kept", "alone", "alone-kept"}
    | {"pp-paceline", "pp-ours", "pp-ours-zero", "pp-ours-interleaved"},
    "fsdp": {"fsdp-gloo", "fsdp-gloo-kept", "fsdp-ours", "dp-gloo", "dp-ours"},
}


@pytest.mark.parametrize(
    "part",
    ["tp", *(pytest.param(part, marks=pytest.mark.slow) for part in ("pp", "fsdp"))],
)
def test_every_contender_is_measured_and_computes_the_same(part: str, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "bench" / "model_parallel.py"), "--quick"]
    done = subprocess.run(
        [*command, "--only", part, "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (written,) = tmp_path.glob("model-parallel-*.json")
    (table,) = json.loads(written.read_text(encoding="utf-8"))["parts"][part]["tables"]
    measured = {row["contender"] for row in table["rows"] if row["steps_s"]}
    assert measured == CONTENDERS[part], done.stdout
    assert "differ" not in done.stdout, done.stdout
