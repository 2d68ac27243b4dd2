"""bench/many_clients.py and bench/many_processes.py from end to end: forty clients of one server,
and a host with so many processes that one of them introduces the others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def _run(tmp_path: Path, script: str, *options: str) -> list[dict[str, Any]]:
    command = [sys.executable, str(ROOT / "bench" / script), *options, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = tmp_path.glob("*.json")
    rows: list[dict[str, Any]] = json.loads(found.read_text())["rows"]
    return rows


def test_one_server_serves_all_of_many_tcp_clients(tmp_path: Path) -> None:
    options = ("--clients", "40", "--processes", "1", "--seconds", "1", "--rounds", "1")
    (row,) = _run(tmp_path, "many_clients.py", *options, "--encrypt", "on")
    assert row["clients"] == 40 and row["fewest"] > 0
    # One for each client, and few others: those to the coordinator, listeners, loops.
    assert 40 <= row["sockets"] < 60


def test_many_processes_of_a_host_reduce_together(tmp_path: Path) -> None:
    (row,) = _run(tmp_path, "many_processes.py", "--workers", "24", "--sleep", "0.5")
    assert row["workers"] == 24
    assert 23 <= row["sockets"]["best"] < 40  # one for each other process, and few others
