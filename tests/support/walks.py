"""Which files of ours one step goes through, from a hook to the applied update: a WALK.

Traced with sys.setprofile in a real process, on the thread that enters the block. (passages.py does
the same for calls that are made over and over.) C++ cannot be seen from here: a test lists those
files, and `cpp_problems` checks the list.

THE RULE. Every Python file that is entered counts. A C++ source file counts if it decides about the
request or passes it on. CPP_LEAVES do not count: they compute or look up something and return.
Headers do not count: they belong to their source file, or are leaves.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from support.passages import OWN

ROOT = Path(__file__).resolve().parents[2]
CPP_LEAVES = {
    "bindings/torch_tensor.cc": "reads and copies the memory of tensors",
    "paceline/transport/arena.cc": "finds memory of this process",
    "paceline/transport/local_link.cc": "finds memory of another process",
    "paceline/transport/segment.cc": "maps memory",
    "paceline/transport/private_view.cc": "asks the kernel which pages were written",
    "paceline/wire/frame.cc": "the bytes of a header",
    "paceline/wire/crc32c.cc": "a checksum",
    "paceline/reduce/dtype.cc": "sizes and names of element types",
    "paceline/reduce/kernels_avx2.cc": "the arithmetic of one instruction set",
    "paceline/reduce/kernels_portable.cc": "the same without one",
}


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
    """Return which of these files below cpp/ do not count (see above), are not there, or lack
    functions of those names."""
    problems = [f"{name} is a leaf: {why}" for name, why in CPP_LEAVES.items() if name in files]
    problems += [
        f"{name}: no such file" for name in CPP_LEAVES if not (ROOT / "cpp" / name).exists()
    ]
    for name, functions in files.items():
        path = ROOT / "cpp" / name
        text = path.read_text() if path.exists() else ""
        problems += [f"{name}: no {function}" for function in functions if function not in text]
    return problems
