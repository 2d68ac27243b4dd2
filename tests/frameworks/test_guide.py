"""The scripts of the guides on frameworks and Horovod run as they are shown."""

from __future__ import annotations

from pathlib import Path

import pytest
from environment import ROOT, require, run_script

from support.pages import scripts_of

PAGES = ("docs/guides/frameworks.md", "docs/guides/from-horovod.md")
SCRIPTS = {title: text for page in PAGES for title, text in scripts_of(page).items()}
MXNET = ROOT / ".venv-mxnet" / "bin" / "python"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "modules", "env"),
    [
        ("keras", ["keras", "jax"], {"KERAS_BACKEND": "jax"}),
        ("tensorflow", ["tensorflow"], {}),
        ("jax", ["jax", "optax"], {}),
        ("lightning", ["lightning"], {}),
        ("accelerate", ["accelerate"], {}),
        ("horovod_keras", ["keras"], {"KERAS_BACKEND": "torch"}),
    ],
)
def test_a_script_runs(name: str, modules: list[str], env: dict[str, str], tmp_path: Path) -> None:
    require(*modules)
    script = tmp_path / f"train_{name}.py"
    script.write_text(SCRIPTS[script.name])
    ended = run_script(str(script), env=env, cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.slow
def test_the_recipe_for_mxnet_runs(tmp_path: Path) -> None:
    if not MXNET.exists():
        pytest.skip("make frameworks-test installs MXNet in .venv-mxnet")
    script = tmp_path / "train_mxnet.py"
    script.write_text(SCRIPTS[script.name])
    ended = run_script(str(script), python=MXNET, cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    shown = [line for line in ended.stdout.splitlines() if "[[" in line]
    assert len(shown) == 2 and len({line.split("[[")[1] for line in shown}) == 1, ended.stdout
