"""Functions on their way from a test into a rank, and what they may call there.

A body may be written inside the test that uses it: its code travels as it is, and so do the values
that it closes over (pickled, so that numbers, tensors and module-level functions work). Names of
its module are looked up in that module, which the fork server imports.
"""

from __future__ import annotations

import builtins
import importlib
import marshal
import pickle
import sys
import types
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

_to_test: Connection | None = None  # in a rank: the way to the test that started it


def report(thing: object) -> None:
    """In a rank: send something to the test."""
    assert _to_test is not None, "only a rank can report"
    _to_test.send(("reported", thing))


def receive() -> Any:
    """In a rank: wait for what the test sends."""
    assert _to_test is not None, "only a rank can receive"
    return _to_test.recv()


def connect_to_test(connection: Connection) -> None:
    global _to_test
    _to_test = connection


def pack(function: Callable[..., Any]) -> dict[str, Any]:
    """Turn a plain function into bytes and names."""
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    return {
        "module": function.__module__,
        "path": list(sys.path),
        "code": marshal.dumps(function.__code__),
        "values": pickle.dumps((function.__defaults__, function.__kwdefaults__, cells)),
    }


def unpack(packed: dict[str, Any]) -> Callable[..., Any]:
    """Make the function again, among the names of its module."""
    sys.path[:] = packed["path"]
    module = importlib.import_module(packed["module"])
    names = vars(module)
    # pytest rewrote the assertions in the code; these are the names that they use.
    names["@py_builtins"] = builtins
    names["@pytest_ar"] = importlib.import_module("_pytest.assertion.rewrite")
    code = marshal.loads(packed["code"])
    defaults, keyword_defaults, values = pickle.loads(packed["values"])
    cells = tuple(types.CellType(value) for value in values)
    function = types.FunctionType(code, names, code.co_name, defaults, cells)
    function.__kwdefaults__ = keyword_defaults
    return function
