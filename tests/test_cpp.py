"""The C++ tests, built with AddressSanitizer and UndefinedBehaviorSanitizer, and, where threads
meet, with ThreadSanitizer."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fuzz.native import NAMES
from fuzz.target import read_corpus, unpack_corpus

ROOT = Path(__file__).parent.parent
BUILD = ROOT / "build"
TESTS = (
    "wire_test",
    "encryption_test",
    "reduce_test",
    "bits_test",
    "codec_test",
    "arena_test",
    "group_test",
    "named_test",
    "peers_test",
    "limits_test",
    "many_test",
)


def tool(name: str) -> str:
    """Find a build tool beside this Python (the `dev` extra installs it), else on the PATH."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    assert found, f"{name} is missing: pip install '.[dev]'"
    return found


def build(directory: str, sanitizers: str) -> Path:
    cmake, where = tool("cmake"), BUILD / directory
    options = ["-DPACELINE_PYTHON=OFF", "-DPACELINE_TESTS=ON", "-DCMAKE_BUILD_TYPE=RelWithDebInfo"]
    options += [f"-DPACELINE_SANITIZE={sanitizers}", "-G", "Ninja"]
    # Half the time of -O2 -g, and reports name the same lines.
    options += ["-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O1"]
    options += [f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}"]
    for command in (
        [cmake, "-S", ROOT, "-B", where, *options],
        [cmake, "--build", where, "--parallel", "2"],
    ):
        out = subprocess.run(command, capture_output=True, text=True)
        assert out.returncode == 0, out.stdout[-3000:] + out.stderr[-3000:]
    return where


@pytest.fixture(scope="module")
def built() -> Path:
    return build("sanitize", "address,undefined")


@pytest.fixture(scope="module")
def built_for_threads() -> Path:
    return build("sanitize-threads", "thread")


@pytest.mark.timeout(600)  # the first run builds everything
@pytest.mark.parametrize("name", TESTS)
def test_core_under_sanitizers(built, name):
    out = subprocess.run([built / name], capture_output=True, text=True, timeout=180)
    assert out.returncode == 0, out.stdout[-3000:] + out.stderr[-3000:]
    assert "runtime error" not in out.stderr, out.stderr[-3000:]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NAMES)
def test_fuzz_corpus_under_sanitizers(built, name, tmp_path):
    corpus = unpack_corpus(name, tmp_path)
    out = subprocess.run([built / name, corpus], capture_output=True, text=True, timeout=180)
    assert out.returncode == 0, out.stdout[-3000:] + out.stderr[-3000:]
    assert f"{len(read_corpus(name))} inputs" in out.stdout
    assert "runtime error" not in out.stderr, out.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["group_test", "peers_test", "many_test"])
def test_threads_of_the_core(built_for_threads, name):
    out = subprocess.run([built_for_threads / name], capture_output=True, text=True, timeout=300)
    assert out.returncode == 0, out.stdout[-3000:] + out.stderr[-3000:]
    assert "ThreadSanitizer" not in out.stderr, out.stderr[-3000:]
