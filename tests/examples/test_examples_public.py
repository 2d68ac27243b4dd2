"""The examples use public names only, and those that extend Paceline are well typed."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import paceline
import paceline.horovod.torch

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))
PUBLIC = {
    "paceline": set(paceline.__all__),
    "paceline.errors": set(vars(paceline.errors)),
    "paceline.extend": set(paceline.extend.__all__),
    # Their names are not checked here: TensorFlow and Keras are not installed.
    **{f"paceline.horovod.{name}": set() for name in ("keras", "tensorflow", "tensorflow.keras")},
    "paceline.horovod.torch": set(vars(paceline.horovod.torch)),
    "paceline.ps": set(paceline.ps.__all__),
}


def imported(path: Path) -> set[tuple[str, str]]:
    """The modules of Paceline that a script imports, with the names that it takes from them."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {(node.module or "", alias.name) for alias in node.names}
    return {(module, name) for module, name in found if module.split(".")[0] == "paceline"}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_examples_import_public_names_only(path: Path) -> None:
    for module, name in imported(path):
        assert module in PUBLIC and (not name or name in PUBLIC[module]), f"{module}.{name}"


def test_own_paces_and_codecs_are_well_typed(tmp_path: Path) -> None:
    """As a user's checker sees them: without our settings, from the package that is installed."""
    scripts = [ROOT / "examples" / name for name in ("own_pace.py", "own_codec.py")]
    assert all(("paceline", "") in imported(script) for script in scripts)
    cache = ROOT / ".mypy_cache" / "examples"  # a second run takes 2 s instead of 15
    command = [sys.executable, "-m", "mypy", "--strict", f"--cache-dir={cache}", *map(str, scripts)]
    (tmp_path / "mypy.ini").write_text("[mypy]\n")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
