"""What a second template imports of a script: its leading imports, and no code of the user."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.launcher.processes.imports_ahead import FirstImport
from paceline.launcher.template_imports import leading_imports

_IMPORTS = '''"""A script."""
from __future__ import annotations
import os, torch
from sklearn.datasets import load_digits, make_blobs
import yaml as y
'''
_FOUND = (
    FirstImport("__future__", ("annotations",)),
    FirstImport("os"),
    FirstImport("torch"),
    FirstImport("sklearn.datasets", ("load_digits", "make_blobs")),
    FirstImport("yaml"),
)


@pytest.mark.parametrize(
    "rest",
    [
        "",
        "os.environ['KERAS_BACKEND'] = 'torch'\nimport keras",
        "if True:\n    import keras",
        "try:\n    import keras\nexcept ImportError:\n    pass",
        "import mine\nimport keras",
        "from pack.inner import value\nimport keras",
        "from . import other\nimport keras",
        "import horovod.torch as hvd\nimport keras",
    ],
)
def test_imports_end_where_only_the_script_may_go_on(tmp_path: Path, rest: str) -> None:
    (tmp_path / "mine.py").touch()
    (tmp_path / "pack").mkdir()
    script = tmp_path / "train.py"
    script.write_text(_IMPORTS + rest)
    assert leading_imports(script, tmp_path) == _FOUND


@pytest.mark.parametrize(
    "text", ["import os, torch\nimport paceline as pl\n", "import", "x = 1\nimport yaml"]
)
def test_a_script_without_other_imports_needs_no_second_template(tmp_path: Path, text: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    assert leading_imports(script, tmp_path) == ()
    assert leading_imports(tmp_path / "missing.py", tmp_path) == ()
