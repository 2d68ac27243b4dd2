"""Which files of ours a call goes through: traced with sys.setprofile, in a real process.

A WALK records every function of ours that is entered between the call and the return of some
functions, on the thread that enters the block. Each outermost call of one of them is a PASSAGE.
C++ cannot be seen from here: a test lists those files by itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import paceline

OWN = Path(paceline.__file__).parent


class Walk:
    """The files that passages go through; `with walk:` records."""

    def __init__(self, *within: Callable[..., Any], keep: Callable[..., Any] | None = None) -> None:
        """`keep`: only passages count that call this function, and none of its kind."""
        self.passages: list[list[str]] = []
        self._within = {function.__code__ for function in within}
        self._keep: CodeType | None = None if keep is None else keep.__code__
        self._depth = 0
        self._files: dict[str, None] = {}
        self._is_kept = False

    def __enter__(self) -> Walk:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def last(self, count: int) -> list[str]:
        """Return the files of the last passages, in the order in which they were first entered."""
        return list(dict.fromkeys(file for files in self.passages[-count:] for file in files))

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
