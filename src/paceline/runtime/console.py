"""Lines that Paceline prints for the user: one function, one prefix, on top of `logging`.

    paceline: rank 0 of 2 (paceline)

Every line is a record of the logger "paceline": INFO for facts, WARNING for what needs attention.
Paceline's handler writes it to the present `sys.stderr`, with one write and one flush. An
application may replace the handler, before or after it imports Paceline:

    logging.getLogger("paceline").handlers = [mine]       # redirected
    logging.getLogger("paceline").setLevel("ERROR")       # silenced
    logging.getLogger("paceline").propagate = True        # also to the handlers of the root logger

The logger does not propagate by default, so that an application that sets up the root logger does
not see every line twice. Forked processes inherit the application's settings.
"""

from __future__ import annotations

import logging
import sys

PREFIX = "paceline: "

logger = logging.getLogger("paceline")


def say(text: str, level: int = logging.INFO) -> None:
    """Print one line for the user."""
    logger.log(level, "%s", text)


def warn(text: str) -> None:
    """Print one line that needs the user's attention."""
    say(text, logging.WARNING)


def set_prefix(prefix: str) -> None:
    """Change the prefix of this process's lines, for example if the launcher adds "paceline: "."""
    _own.setFormatter(logging.Formatter(f"{prefix}%(message)s"))


class _OnStderr(logging.Handler):
    """Writes to the present `sys.stderr`: scripts, notebooks and tests replace it."""

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stderr is None:
            return
        try:
            sys.stderr.write(f"{self.format(record)}\n")
            sys.stderr.flush()
        except Exception:  # if the reader is gone, the line is lost, and training continues
            self.handleError(record)


_own = _OnStderr()
set_prefix(PREFIX)
if not logger.handlers:
    logger.addHandler(_own)
if logger.level == logging.NOTSET:
    logger.setLevel(logging.INFO)
logger.propagate = False
