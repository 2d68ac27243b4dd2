"""`paceline doctor --device` measures the device that PyTorch has here."""

from __future__ import annotations

import os

from paceline.cli import doctor
from support.devices import device_path


def test_the_doctor_describes_the_device(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import laggard\n")
    environ = device_path({**os.environ, "PYTHONPATH": str(tmp_path)})
    monkeypatch.setenv("PYTHONPATH", environ["PYTHONPATH"])
    checks = {check.name: check for check in doctor.device()}
    assert not any(check.broken for check in checks.values()), checks
    assert checks["accelerator"].found == "2 x laggard"
    assert checks["collectives"].found == "lagcomm"
    assert checks["order of copies"].found == "20 round trips are right"
    assert checks["engine memory"].found == "registered as pinned"
    assert "GB/s to the host" in checks["copies, pinned"].found
    assert {"copies, pageable", "overlap", "laggard:1"} <= checks.keys()


def test_a_check_that_fails_is_broken(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import torch\ndel torch.accelerator\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    [check] = doctor.device()
    assert check.broken and "AttributeError" in check.found
    assert check.advice == "run it yourself: -m paceline.cli.device_check"
