"""`paceline doctor --device` measures the device that PyTorch has here."""

from __future__ import annotations

import os
import subprocess
import sys

from support.devices import device_path


def test_the_doctor_describes_the_device(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import laggard\n")
    environ = device_path({**os.environ, "PYTHONPATH": str(tmp_path)})
    command = [sys.executable, "-m", "paceline", "doctor", "--device"]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = ended.stdout[ended.stdout.index("\ndevice\n") :]
    for line in (
        "accelerator      2 x laggard",
        "collectives      lagcomm",
        "order of copies  20 round trips are right",
        "engine memory    registered as pinned",
    ):
        assert f"  {line}\n" in report
    for measured in ("copies, pinned", "copies, pageable", "overlap"):
        assert f"  {measured}" in report
