"""The error of an operation inside of a compiled step.

TensorFlow and XLA only show the text of what a Python function raises. `run` of elastic training
needs the error itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_last: list[Exception] = []


def keep_errors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Note what a function raises, and raise it."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            _last[:] = [error]
            raise

    return run


def take_error() -> Exception | None:
    """Return the last error, once."""
    return _last.pop() if _last else None


def run_with_errors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Raise an operation's own error in place of the framework's that shows its text."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        take_error()
        try:
            return function(*args, **kwargs)
        except Exception as error:
            kept = take_error()
            if kept is None or kept is error or str(kept) not in str(error):
                raise
            raise kept from kept.__cause__  # `elastic.run` asks for the loss that caused it

    return run
