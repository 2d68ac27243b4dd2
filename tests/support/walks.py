"""Which files of ours one step goes through, from a hook to the applied update: a WALK.

Traced with sys.setprofile in a real process, on the thread that enters the block. (passages.py does
the same for calls that are made over and over.) C++ cannot be seen from here: a test lists those
files, and `cpp_problems` looks for their functions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from support.passages import OWN

ROOT = Path(__file__).resolve().parents[2]


class Walk:
    """The files from a function's first call to another one's return; `with walk:` records.

    Autograd calls hooks on the thread that calls backward(), as long as all is on the CPU.
    """

    def __init__(self, begin: str, end: Callable[..., Any]) -> None:
        """`begin`: the name of a function; `end`: a function or method."""
        self._begin, self._end = begin, end.__code__
        self._is_on = self._is_over = False
        self.files: list[str] = []  # in the order in which they are first entered
        self.later: list[str] = []  # the same, after the end

    def __enter__(self) -> Walk:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        code, file = frame.f_code, Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(OWN):
            self._is_on |= code.co_name == self._begin
            found, name = (self.later if self._is_over else self.files), str(file.relative_to(OWN))
            if self._is_on and name not in found:
                found.append(name)
        elif event == "return" and code is self._end:
            self._is_over = True


def cpp_problems(files: Mapping[str, Sequence[str]]) -> list[str]:
    """Return which of these files below cpp/ are not there, or lack functions of those names."""
    problems = []
    for name, functions in files.items():
        path = ROOT / "cpp" / name
        text = path.read_text() if path.exists() else ""
        problems += [f"{name}: no {function}" for function in functions if function not in text]
    return problems
