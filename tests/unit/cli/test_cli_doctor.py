"""The command line is light, and the doctor tells a healthy machine from a broken one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from paceline.cli import doctor
from paceline.cli.doctor import Check


def _python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout


def test_the_command_line_never_imports_torch() -> None:
    modules = "paceline.cli.main, paceline.cli.run, paceline.cli.doctor, paceline.launcher.job"
    out = _python(f"import sys, {modules}; print('torch' in sys.modules, 'numpy' in sys.modules)")
    assert out == "False False\n"


def test_asking_for_the_version_loads_no_verb() -> None:
    code = "import sys, paceline.cli.main; print(sorted(m for m in sys.modules if 'launch' in m))"
    assert _python(code) == "[]\n"


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["run", "--help"], []])
def test_questions_are_answered_with_code_0(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "paceline", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "paceline" in done.stdout and done.stderr == ""


def test_this_machine_passes_the_examinations_that_need_no_build() -> None:
    for examine in (doctor.cores_and_memory, doctor.shared_memory, doctor.network, doctor.limits):
        findings = list(examine())
        assert findings and not any(finding.broken for finding in findings)
    assert {"torch", "python"} <= {finding.name for finding in doctor.versions()}


@pytest.mark.parametrize(
    ("version", "wanted", "fits"),
    [
        ("2.13.0+cpu", ">=2.6,<2.14", True),
        ("2.14.0", ">=2.6,<2.14", False),
        ("2.5.1", ">=2.6,<2.14", False),
        ("15.0", ">=13", True),
        ("2.6", "", True),
    ],
)
def test_version_ranges(version: str, wanted: str, fits: bool) -> None:
    assert doctor._satisfies(version, wanted) is fits


def test_something_broken_means_code_1_and_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = Check("widget", "missing", "install the widget", broken=True)
    monkeypatch.setattr(doctor, "_SECTIONS", (("parts", lambda: iter([broken])),))
    assert doctor.doctor(run_self_test=False) == 1
    out = capsys.readouterr().out
    assert "! widget" in out and "broken: widget: missing. install the widget" in out
    monkeypatch.setattr(doctor, "_SECTIONS", (("parts", lambda: iter([Check("a", "b")])),))
    assert doctor.doctor(run_self_test=False) == 0
