"""What is true where no framework is installed: imports are light, errors name the extra."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from environment import quiet_environ, run_script

CALLS = {
    "keras": "import paceline.keras as k; k.distribute(None)",
    "tensorflow": "import paceline.tensorflow as t; t.mean([])",
    "jax": "import paceline.jax as j; j.mean({})",
    "lightning": "import paceline.lightning",
}


def run(code: str, path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env=quiet_environ(PYTHONPATH=str(path)),
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_missing_framework_and_another_version_are_named(tmp_path: Path) -> None:
    """One process tries all of them: first without, then with modules of another version."""
    lines = [
        "import importlib, sys",
        "import importlib.util as u",
        "own = u.find_spec",
        "u.find_spec = lambda name, *a: None if name in hidden else own(name, *a)",
        f"hidden = set({list(CALLS)!r})",
        "def attempt(code):",
        "    try: exec(code)",
        "    except Exception as error: print(type(error).__name__, error)",
        f"calls = {list(CALLS.values())!r}",
        "for code in calls: attempt(code)",
        "hidden = set()",
        "for code in calls: attempt(code)",
    ]
    for name in CALLS:
        (tmp_path / f"{name}.py").write_text("__version__ = '17.2.0'\n")
    ended = run("\n".join(lines), tmp_path)
    found = ended.stdout.splitlines()
    assert ended.returncode == 0 and len(found) == 8, ended.stdout + ended.stderr
    for name, missing, other in zip(CALLS, found[:4], found[4:], strict=True):
        assert missing.startswith("FrameworkMissing") and f"paceline[{name}]" in missing, missing
        assert other.startswith("FrameworkMissing") and f"{name} 17.2.0" in other, other


def test_horovods_modules_name_the_extra(tmp_path: Path) -> None:
    (tmp_path / "keras.py").write_text("__version__ = '2.15.0'\n")
    lines = [
        "import importlib, paceline.horovod",
        "paceline.horovod.install()",
        "for name in ('keras', 'tensorflow.keras', 'mxnet'):",
        "    try: importlib.import_module('horovod.' + name)",
        "    except Exception as error: print(type(error).__name__, error)",
    ]
    ended = run("\n".join(lines), tmp_path)
    found = ended.stdout.splitlines()
    assert len(found) == 3, ended.stdout + ended.stderr
    assert all(line.startswith("FrameworkMissing keras 2.15.0 is installed") for line in found[:2])
    assert found[2].startswith("ModuleNotFoundError horovod.mxnet is not part of")


@pytest.mark.parametrize("module", ["keras", "jax", "tensorflow", "frameworks.twin"])
def test_importing_our_package_does_not_import_the_framework(module: str, tmp_path: Path) -> None:
    code = (
        f"import sys, paceline.{module}; print({{'keras', 'jax', 'tensorflow'}} & set(sys.modules))"
    )
    ended = run(code, tmp_path)
    assert ended.stdout.strip() == "set()", ended.stdout + ended.stderr


def test_gloo_is_ours_if_asked_for() -> None:
    ended = run_script("as_gloo.py", python=Path(sys.executable), env={"PACELINE_AS_GLOO": "1"})
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("paceline cpu:paceline 3.0") == 2, ended.stdout
