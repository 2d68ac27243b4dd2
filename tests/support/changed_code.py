"""Give functions of a module the code that they have in a changed source, in a running process.

A rank is forked from a process that has imported everything, so importing a changed module comes
too late, and importing everything again takes longer than most tests. Only code inside of functions
may differ, and no line may move.

CHANGED_CODE in the environment of a rank: a directory with changed modules by their dotted names.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

_seen: set[tuple[str, str]] = set()


def apply(directory: Path) -> list[str]:
    """Change all modules that have a file there; return the functions that were changed."""
    changed = []
    for file in sorted(directory.glob("*.py")):
        module = importlib.import_module(file.stem)
        code = compile(file.read_text(), str(module.__file__), "exec")
        for function, new in _pairs(vars(module), code):
            if function.__code__ != new:
                function.__code__ = new
                changed.append(f"{file.stem}:{function.__qualname__}")
    return changed


def _pairs(names: Any, code: CodeType) -> Iterator[tuple[FunctionType, CodeType]]:
    """Yield the functions of a module or class, each with its code in the changed source."""
    for new in (one for one in code.co_consts if isinstance(one, CodeType)):
        found = names.get(new.co_name)
        if isinstance(found, type):
            yield from _pairs(vars(found), new)
        for function in _functions_of(found):
            if function.__code__.co_firstlineno == new.co_firstlineno:
                yield function, new


def _functions_of(thing: Any) -> Iterator[FunctionType]:
    if isinstance(thing, property):
        yield from (f for f in (thing.fget, thing.fset) if isinstance(f, FunctionType))
    while thing is not None:
        if isinstance(thing, FunctionType):
            yield thing
        thing = getattr(thing, "__wrapped__", None) or getattr(thing, "__func__", None)


def reached(place: str) -> None:
    """Note in CHANGED_CODE that the running test has come to a place."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
    if test and (test, place) not in _seen:
        _seen.add((test, place))
        with open(os.path.join(os.environ["CHANGED_CODE"], "reached"), "a") as file:
            file.write(f"{place}\t{test}\n")
