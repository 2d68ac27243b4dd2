"""A rank's side of its line to the controller (ranks.py): it introduces itself and takes turns."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

Message = dict[str, Any]


def take_turns(
    socket_path: str,
    introduction: Message,
    turn: Callable[[Message], Message],
    at_end: Callable[[], object] = lambda: None,
) -> None:
    """Answer every request with `turn(request)`; ends this process when the controller hangs up."""
    with socket.socket(socket.AF_UNIX) as controller:
        controller.connect(socket_path)
        lines = controller.makefile("rw", encoding="utf-8")
        _answer(lines, introduction)
        for line in lines:
            _answer(lines, turn(json.loads(line)))
    at_end()
    sys.stderr.flush()
    os._exit(0)  # the run is over, and some libraries wait for peers that are gone already


def _answer(lines: Any, message: Message) -> None:
    lines.write(json.dumps(message) + "\n")
    lines.flush()
