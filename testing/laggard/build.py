"""Build the device in place: python testing/laggard/build.py

Objects are kept in build/laggard of the repository, so only what changed is compiled again. If
several processes call it, one builds and the others wait. Where the device cannot be built, the
script prints the reason and ends with status 3.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

HERE = Path(__file__).resolve().parent
OBJECTS = HERE.parent.parent / "build" / "laggard"
TORCH = "2.13."
IMPOSSIBLE = 3


def torch_version() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return "none"


def tool(name: str) -> str | None:
    """Find a build tool beside this Python, else on the PATH."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name)


def compiler() -> str | None:
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), "c++", "g++"))), None)


def reason_against() -> str | None:
    """Return why the device cannot be built here; None if it can."""
    if sys.platform != "linux":
        return f"laggard needs Linux (memory files), this is {sys.platform}"
    if not torch_version().startswith(TORCH):
        return f"laggard uses internals of torch {TORCH}x; found torch {torch_version()}"
    if compiler() is None:
        return "laggard needs a C++20 compiler; found none (Debian: apt install g++)"
    if missing := [name for name in ("cmake", "ninja") if tool(name) is None]:
        return f"laggard needs {' and '.join(missing)} to be built: pip install {' '.join(missing)}"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "laggard needs Python's headers (Debian: apt install python3-dev)"
    return None


def library() -> Path:
    return HERE / "laggard" / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"


def fingerprint() -> str:
    """Return a hash of all that the library is made from."""
    digest = hashlib.sha256(f"{torch_version()} {sys.version} {sys.prefix}".encode())
    for file in sorted([HERE / "CMakeLists.txt", *HERE.glob("cpp/**/*.*")]):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def is_built() -> bool:
    stamp = OBJECTS / "built.txt"
    return library().exists() and stamp.exists() and stamp.read_text() == fingerprint()


def build() -> None:
    """Build what changed; wait if another process is building."""
    OBJECTS.mkdir(parents=True, exist_ok=True)
    with (OBJECTS / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_built():
            return
        made = fingerprint()
        cmake = str(tool("cmake"))
        subprocess.run(
            [
                cmake,
                *("-S", HERE, "-B", OBJECTS, "-G", "Ninja", "--log-level=WARNING"),
                f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
                f"-DCMAKE_CXX_COMPILER={compiler()}",
                f"-DPython_EXECUTABLE={sys.executable}",
            ],
            check=True,
        )
        subprocess.run([cmake, "--build", OBJECTS, "--parallel", "2"], check=True)
        (OBJECTS / "built.txt").write_text(made)


def main() -> int:
    if is_built():
        return 0
    if reason := reason_against():
        sys.stdout.write(f"{reason}\n")
        return IMPOSSIBLE
    build()
    return 0


if __name__ == "__main__":
    sys.exit(main())
