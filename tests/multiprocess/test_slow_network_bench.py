"""bench/slow_network.py from end to end, with a small model: it runs, and it counts bytes right."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = ["--quick", "--model", "stack", "--rates", "100", "--rounds", "1", "--turn-s", "0.1"]
WHO = ["--others", "independent", "--paces", "allreduce", "local:8", "allreduce[compress=lzma]"]
PARAMETER_BYTES = 250 * (64 * 64 + 64) * 4


@pytest.mark.root
def test_a_run_ends_with_what_each_contender_sent(tmp_path: Path) -> None:
    if os.geteuid() != 0 or shutil.which("tc") is None:
        pytest.skip("only root can make network namespaces, and tc shapes them")
    command = [sys.executable, str(ROOT / "bench" / "slow_network.py"), *SMALL, *WHO]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "allreduce[compress=lzma]: left out:" in done.stdout
    (written,) = tmp_path.glob("slow-network-*.json")
    (link,) = json.loads(written.read_text(encoding="utf-8"))["links"]
    sent = {row["contender"]: row["sent_bytes_per_step"] for row in link["rows"]}
    assert link["failed"] == [], done.stdout
    # Two ranks send each other all of it in a step, or in every eighth; headers come on top.
    assert PARAMETER_BYTES < sent["paceline allreduce"] < 1.15 * PARAMETER_BYTES
    assert PARAMETER_BYTES / 8 < sent["paceline local:8"] < 1.25 * PARAMETER_BYTES / 8
    assert sent["independent"] < PARAMETER_BYTES / 100
