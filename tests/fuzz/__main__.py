"""Runs fuzz targets: python -m fuzz [--seconds N] [--runs N] [--keep] [TARGET ...]

Each target runs for that many seconds, or inputs. Without atheris or clang its corpus is replayed
instead, and a line says which tool is missing. `--keep` adds what a search has found to the corpus.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from fuzz import native
from fuzz.target import ROOT, WORK, load_all, read_corpus, unpack_corpus, write_corpus

INSTALL = {
    "atheris": "pip install atheris (CPython 3.11 to 3.13)",
    "clang": "install clang with its runtime (Debian: apt install clang libclang-rt-dev)",
}
_KEPT_BYTES = 24 << 10  # of one target's corpus
_UNIT_S = 20  # an input that takes longer hangs
_MEMORY_MB = 3000


def has_atheris() -> bool:
    return importlib.util.find_spec("atheris") is not None


def replay(name: str) -> int:
    """Give the kept inputs to a Python target; return how many there are."""
    inputs = read_corpus(name)
    for data in inputs:
        load_all()[name].try_one(data)
    return len(inputs)


def command_of(name: str, built: Path | None) -> list[str]:
    """Return the command that searches with one target."""
    if name in native.NAMES:
        assert built is not None
        return [str(built / name)]
    return [sys.executable, "-m", "fuzz.search", name]


def search(name: str, command: list[str], limits: list[str], seconds: float) -> str:
    """Search with one target; return a line about it. Raises SystemExit if an input has failed."""
    work, found = WORK / "work" / name, WORK / "found"
    unpack_corpus(name, work)
    found.mkdir(parents=True, exist_ok=True)
    flags = [f"-artifact_prefix={found}/{name}-", f"-timeout={_UNIT_S}", "-print_final_stats=1"]
    flags += [f"-rss_limit_mb={_MEMORY_MB}", f"-max_total_time={max(1, round(seconds))}", *limits]
    out = subprocess.run(
        [*command, *flags, str(work)], capture_output=True, check=False, cwd=ROOT / "tests"
    )
    text = out.stderr.decode(errors="replace") + out.stdout.decode(errors="replace")
    count = re.findall(r"number_of_executed_units: (\d+)", text) or re.findall(
        r"Done (\d+) runs", text
    )
    if out.returncode:
        raise SystemExit(f"fuzz: {name} has failed; its input is in {found}\n{text[-5000:]}")
    size = len(list(work.iterdir()))
    return f"{name}: {count[-1] if count else '?'} inputs, {size} of them worth keeping"


def keep(name: str, command: list[str]) -> None:
    """Keep the smallest inputs that together reach all code that the search has reached."""
    work = WORK / "work" / name
    with tempfile.TemporaryDirectory() as merged:
        subprocess.run(
            [*command, "-merge=1", merged, str(work)],
            capture_output=True,
            check=True,
            cwd=ROOT / "tests",
        )
        inputs = sorted((path.read_bytes() for path in Path(merged).iterdir()), key=len)
    kept, size = list(read_corpus(name)), sum(map(len, read_corpus(name)))
    for data in inputs:
        size += len(data)
        if size > _KEPT_BYTES:
            break
        kept.append(data)
    write_corpus(name, kept)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make fuzz")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each target")
    parser.add_argument("--runs", type=int, default=0, help="stop each target after so many inputs")
    parser.add_argument("--keep", action="store_true", help="add what was found to the corpus")
    parser.add_argument("targets", nargs="*")
    chosen = parser.parse_args()
    known = [*native.NAMES, *load_all()]
    for name in chosen.targets:
        if name not in known:
            parser.error(f"no target {name!r}; there are {', '.join(known)}")
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    )
    clang = native.compiler()
    built = native.build(clang) if clang else None
    limits = [f"-runs={chosen.runs}"] if chosen.runs else []
    for tool, is_there in (("clang", clang), ("atheris", has_atheris())):
        if not is_there:
            print(f"fuzz: {tool} is missing, the corpus is only replayed; {INSTALL[tool]}")
    for name in chosen.targets or known:
        if name in native.NAMES and built is None:
            print(f"{name}: replayed by tests/test_cpp.py")
        elif name not in native.NAMES and not has_atheris():
            print(f"{name}: {replay(name)} inputs replayed", flush=True)
        else:
            command = command_of(name, built)
            print(search(name, command, limits, chosen.seconds), flush=True)
            if chosen.keep:
                keep(name, command)
    return 0


if __name__ == "__main__":
    sys.exit(main())
