"""What a process prints when it is asked for its stacks, without the threads that are ours.

Python prints one block for each thread, the main thread last. Those of paceline itself (control,
checkpoints) and those of a pool with nothing to do would only hide the one block that matters.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_HEAD = re.compile(r"(Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$")
_FRAME = re.compile(r'  File "(.*)", line \d+ in ')
_IDLE = re.compile(r'  File ".*/concurrent/futures/thread.py", line \d+ in _worker$')


class StackBlocks:
    """Lines go in, lines come out; a block of one of our threads does not."""

    def __init__(self) -> None:
        self._block: list[str] = []  # held back until it is known whose it is

    def feed(self, line: str) -> Iterator[str]:
        """Take a line of stderr; yield what is to be shown by now."""
        head = _HEAD.match(line)
        if head is not None or (self._block and line and not line.startswith("  ")):
            yield from self.finish()
        if head is not None and head[1] == "Thread" or (self._block and line.startswith("  ")):
            self._block.append(line)
        elif line or not self._block:  # blank lines stand between blocks
            yield line

    @property
    def is_holding(self) -> bool:
        return bool(self._block)

    def finish(self) -> Iterator[str]:
        """End a block; yield it unless its thread is one of ours."""
        block, self._block = self._block, []
        if block and not _is_ours(block) and not _IDLE.match(block[1] if block[1:] else ""):
            yield from block


def _is_ours(block: list[str]) -> bool:
    """A thread that Python started, and whose function is paceline's."""
    files = [found[1] for line in block if (found := _FRAME.match(line))]
    outer = [file for file in files if not file.endswith("/threading.py")]
    return files[-1:] != outer[-1:] and bool(outer) and outer[-1].startswith(_OURS)
