"""The scripts of docs/guides/frameworks.md run as they are shown."""

from __future__ import annotations

from pathlib import Path

import pytest
from environment import require, run_script

from support.pages import scripts_of

PAGE = "docs/guides/frameworks.md"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "modules", "env"),
    [
        ("keras", ["keras", "jax"], {"KERAS_BACKEND": "jax"}),
        ("tensorflow", ["tensorflow"], {}),
        ("jax", ["jax", "optax"], {}),
        ("lightning", ["lightning"], {}),
        ("accelerate", ["accelerate"], {}),
    ],
)
def test_a_script_runs(name: str, modules: list[str], env: dict[str, str], tmp_path: Path) -> None:
    require(*modules)
    script = tmp_path / f"train_{name}.py"
    script.write_text(scripts_of(PAGE)[script.name])
    ended = run_script(str(script), env=env, cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
