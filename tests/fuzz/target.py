"""A fuzz target: a function that takes any bytes, and raises only what its decoder documents.

The CORPUS of a target is a zip file of inputs in corpus/: seeds from real messages, inputs that
reached new code, and every input that ever failed. Searching adds to a directory below build/.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
CORPUS = Path(__file__).parent / "corpus"
WORK = ROOT / "build" / "fuzz"
_DATE = (2026, 1, 1, 0, 0, 0)  # the same inputs make the same file


@dataclass(frozen=True)
class Target:
    """A decoder of Python code."""

    name: str
    run: Callable[[bytes], object]
    refusals: tuple[type[BaseException], ...]  # what it may raise; anything else is a finding
    form: str = ""  # "msgpack" or "json": how inputs are changed as trees; "": as bytes only

    def try_one(self, data: bytes) -> bool:
        """Return whether the decoder accepts this input."""
        try:
            self.run(data)
        except self.refusals:
            return False
        return True


TARGETS: dict[str, Target] = {}


def target(
    *refusals: type[BaseException], form: str = ""
) -> Callable[[Callable[[bytes], object]], Callable[[bytes], object]]:
    """Register the decorated function as a target with its name."""

    def register(run: Callable[[bytes], object]) -> Callable[[bytes], object]:
        TARGETS[run.__name__] = Target(run.__name__, run, refusals, form)
        return run

    return register


def load_all() -> dict[str, Target]:
    """Return all Python targets by name."""
    from fuzz import control_targets, data_targets, file_targets, server_targets, tls_targets

    assert all((control_targets, data_targets, file_targets, server_targets, tls_targets))
    return TARGETS


def read_corpus(name: str) -> list[bytes]:
    """Return the inputs that are kept for a target."""
    path = CORPUS / f"{name}.zip"
    if not path.exists():
        return []
    with zipfile.ZipFile(path) as kept:
        return [kept.read(entry) for entry in sorted(kept.namelist())]


def write_corpus(name: str, inputs: Iterable[bytes]) -> None:
    """Keep these inputs for a target."""
    CORPUS.mkdir(exist_ok=True)
    named = {hashlib.sha256(data).hexdigest()[:16]: data for data in inputs}
    with zipfile.ZipFile(
        CORPUS / f"{name}.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=9
    ) as kept:
        for entry in sorted(named):
            kept.writestr(zipfile.ZipInfo(entry, _DATE), named[entry], zipfile.ZIP_DEFLATED, 9)


def unpack_corpus(name: str, directory: Path) -> Path:
    """Write the kept inputs as files, as libFuzzer reads them; return the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    for data in read_corpus(name):
        (directory / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
    return directory
