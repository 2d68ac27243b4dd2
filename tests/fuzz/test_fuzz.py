"""Every fuzz target: its corpus in plain Python, and a short search where the tools are there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fuzz import native
from fuzz.__main__ import INSTALL, has_atheris, replay
from fuzz.mutation import mutate
from fuzz.target import ROOT, load_all, read_corpus, unpack_corpus

TARGETS = tuple(load_all())
_FLAGS = ("-timeout=20", "-rss_limit_mb=3000")


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus_in_plain_python(name: str) -> None:
    replay(name)


@pytest.mark.parametrize("name", [name for name in TARGETS if load_all()[name].form])
def test_changed_messages_in_plain_python(name: str) -> None:
    """A few changes of each seed, the same ones in each run: no tool is needed for them."""
    target = load_all()[name]
    for data in read_corpus(name):
        for seed in range(10):
            changed = mutate(data, target.form, seed)
            if changed is not None:
                target.try_one(changed)


def _search(command: list[str], seconds: int, corpus: Path, found: Path) -> None:
    flags = [f"-max_total_time={seconds}", f"-artifact_prefix={found}/", *_FLAGS]
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    out = subprocess.run(
        [*command, *flags, corpus],
        capture_output=True,
        cwd=ROOT / "tests",
        env=environ,
        check=False,
        timeout=240,
    )
    text = out.stderr.decode(errors="replace")
    inputs = {path.name: path.read_bytes() for path in found.iterdir()}
    assert out.returncode == 0, f"{inputs}\n{text[-4000:]}"


def test_all_python_targets_for_20_seconds(tmp_path: Path) -> None:
    if not has_atheris():
        print(f"atheris is missing, only the corpus was replayed; {INSTALL['atheris']}")
        return
    corpus, found = tmp_path / "corpus", tmp_path / "found"
    found.mkdir()
    corpus.mkdir()
    for number, name in enumerate(TARGETS):
        for count, data in enumerate(read_corpus(name)):
            (corpus / f"{name}-{count}").write_bytes(bytes([number]) + data)
    _search([sys.executable, "-m", "fuzz.search", "all"], 20, corpus, found)


@pytest.mark.timeout(900)  # the first run builds them
def test_each_native_target_for_2_seconds(tmp_path: Path) -> None:
    clang = native.compiler()
    if clang is None:
        print(f"clang is missing, tests/test_cpp.py replays the corpus; {INSTALL['clang']}")
        return
    built = native.build(clang)
    for name in native.NAMES:
        found = tmp_path / f"{name}-found"
        found.mkdir()
        _search([str(built / name)], 2, unpack_corpus(name, tmp_path / name), found)
