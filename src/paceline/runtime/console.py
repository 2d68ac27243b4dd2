"""What Paceline prints to a person: one function, one prefix, and `logging` beneath.

    paceline: rank 0 of 2 (paceline)

Every line is a record of the logger "paceline": INFO for facts, WARNING for what needs a person.
A handler of ours writes it to the present `sys.stderr`, one write and one flush each. An
application may put others in its place, before or after it imports Paceline:

    logging.getLogger("paceline").handlers = [mine]       # redirected
    logging.getLogger("paceline").setLevel("ERROR")       # silenced
    logging.getLogger("paceline").propagate = True        # also to the handlers of the root logger

The logger does not propagate by default, so that an application that sets up the root logger does
not see every line twice. Processes that are forked inherit what the application has set.
"""

from __future__ import annotations

import logging
import sys

PREFIX = "paceline: "

logger = logging.getLogger("paceline")


def say(text: str, level: int = logging.INFO) -> None:
    """Print one line for a person."""
    logger.log(level, "%s", text)


def warn(text: str) -> None:
    """Print one line for a person that has to know or to do something."""
    say(text, logging.WARNING)


def set_prefix(prefix: str) -> None:
    """Begin the lines of this process with other words: the launcher reads them and adds ours."""
    _own.setFormatter(logging.Formatter(f"{prefix}%(message)s"))


class _OnStderr(logging.Handler):
    """Writes to the stderr of the moment: scripts, notebooks and tests put others in its place."""

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stderr is None:
            return
        try:
            sys.stderr.write(f"{self.format(record)}\n")
            sys.stderr.flush()
        except Exception:  # a reader that is gone costs the line, not the training
            self.handleError(record)


_own = _OnStderr()
set_prefix(PREFIX)
if not logger.handlers:
    logger.addHandler(_own)
if logger.level == logging.NOTSET:
    logger.setLevel(logging.INFO)
logger.propagate = False
