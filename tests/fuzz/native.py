"""The C++ targets (cpp/fuzz): built with clang, libFuzzer, ASan and UBSan, and run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from fuzz.target import ROOT, WORK

BUILD = WORK / "native"
NAMES = tuple(sorted(path.stem for path in (ROOT / "cpp" / "fuzz").glob("*_fuzz.cc")))


def compiler() -> str | None:
    """Return a clang that has libFuzzer; None if there is none here."""
    for name in (
        os.environ.get("CXX", ""),
        "clang++",
        *(f"clang++-{n}" for n in range(21, 13, -1)),
    ):
        found = shutil.which(name) if "clang" in name else None
        if found and _has_fuzzer(found):
            return found
    return None


def _has_fuzzer(clang: str) -> bool:
    source = b'extern "C" int LLVMFuzzerTestOneInput(const void*, unsigned long) { return 0; }'
    command = [clang, "-x", "c++", "-", "-fsanitize=fuzzer,address", "-o", os.devnull]
    return subprocess.run(command, input=source, capture_output=True, check=False).returncode == 0


def build(clang: str) -> Path:
    """Build all targets; return their directory."""
    options = ["-DPACELINE_PYTHON=OFF", "-DPACELINE_FUZZ=ON", "-DCMAKE_BUILD_TYPE=RelWithDebInfo"]
    options += ["-DPACELINE_SANITIZE=fuzzer-no-link,address,undefined", "-G", "Ninja"]
    options += ["-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O1", f"-DCMAKE_MAKE_PROGRAM={_tool('ninja')}"]
    options += [f"-DCMAKE_CXX_COMPILER={clang}"]
    for command in (
        [_tool("cmake"), "-S", ROOT, "-B", BUILD, *options],
        [_tool("cmake"), "--build", BUILD, "--parallel", "2"],
    ):
        out = subprocess.run(command, capture_output=True, text=True, check=False)
        if out.returncode:
            raise SystemExit(f"fuzz: the C++ targets cannot be built: {out.stdout[-3000:]}")
    return BUILD


def _tool(name: str) -> str:
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if not found:
        raise SystemExit(f"fuzz: {name} is missing: pip install '.[dev]'")
    return found
