"""Which files of ours a call goes through, again and again: traced with sys.setprofile.

A PASSAGE is everything of ours that is entered between the call and the return of one of some
functions, on the thread that enters the block. C++ cannot be seen from here: a test lists those
files by itself.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import paceline

OWN = Path(paceline.__file__).parent


class Passages:
    """The files that passages go through; `with passages:` records."""

    def __init__(self, *within: Callable[..., Any], keep: Callable[..., Any] | None = None) -> None:
        """`keep`: only passages count that call this function."""
        self.passages: list[list[str]] = []
        self._within = {function.__code__ for function in within}
        self._keep: CodeType | None = None if keep is None else keep.__code__
        self._depth = 0
        self._files: dict[str, None] = {}
        self._is_kept = False

    def __enter__(self) -> Passages:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def usual(self, count: int) -> list[str]:
        """Return the files of the last passages, in the order in which they were first entered.

        One that only a single passage went through is an accident of the machine, not of the walk:
        a wait that was long enough to be talked about.
        """
        entered = Counter(file for files in self.passages[-count:] for file in files)
        return [file for file, passages in entered.items() if passages > 1]

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call":
            if code in self._within:
                self._depth += 1
            if self._depth:
                self._enter(code)
        elif event == "return" and code in self._within:
            self._depth -= 1
            if not self._depth:
                self._end_passage()

    def _enter(self, code: CodeType) -> None:
        self._is_kept |= code is self._keep
        file = Path(code.co_filename)
        if file.is_relative_to(OWN):
            self._files[str(file.relative_to(OWN))] = None

    def _end_passage(self) -> None:
        if self._is_kept or self._keep is None:
            self.passages.append(list(self._files))
        self._files, self._is_kept = {}, False


def documented(page: Path, heading: str) -> Iterator[str]:
    """Yield the files in the first column of the table of files below a heading of a page."""
    text = page.read_text().split(f"\n{heading}\n", 1)[1]
    rows = [line for line in text.splitlines() if line.startswith("|")]
    start = next(n for n, row in enumerate(rows) if row.startswith("| file"))
    for row in rows[start + 2 :]:
        name = row.split("|")[1].strip()
        if not name.startswith("`"):
            return
        yield name.strip("`")
