"""Where our code orders work on devices, and what each place becomes when it is removed.

A mutant is one file with one change:

    record   an event is not recorded           `event.record(stream)`, `mark(device)`
             a gradient's stream is not noted   `streams.note()`, `ReadyHook(..., streams)`
    stream   a stream does not wait             `stream.wait_event(e)`, `bucket.join_streams()`
    host     a host thread does not wait        `event.synchronize()`, `errand.wait()`; of
                                                `start().wait()` the first call stays
    query    an event is said to be complete    `event.query()`, `copied.done()`
    hold     a reference is not held            `x.record_stream(s)`, `Copied(..., memory)`

Places are found in the syntax tree of the modules that know devices, of all that import them, and
of the reducer, which orders streams through its buckets.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src"
# These modules are about devices: every method of these names counts in them.
ABOUT_DEVICES = ("device", "host_route", "through_host")

ALSO = ("paceline/data_parallel/reducer.py",)
STREAM_WAITS = {"wait_event", "wait_stream", "wait_on_stream", "join_streams"}
HOST_WAITS = {"synchronize", "wait_on_host", "wait_until_started", "arrive"}
# In other modules a receiver has to be named like one that belongs to a device.
EVENT_NAMES = ("event", "ready", "done", "mark")
ROUTE_NAMES = ("route",)
RELEASES = {"_release", "release_averages", "release_params"}
ERRAND_NAMES = ("errand", "arrival", "copied", "snapshot")
STREAMS_NAMES = ("streams",)  # of a bucket
HOLDERS = {"Copied", "StreamResult"}  # classes whose last argument is memory that they hold


@dataclass(frozen=True)
class Mutant:
    """One change of one file: the text between two offsets is replaced."""

    path: Path
    where: str  # the class and function
    kind: str
    text: str  # what is removed
    number: int  # among the same in that function
    begin: int
    end: int
    replacement: str

    @property
    def name(self) -> str:
        """Return a name that lives longer than line numbers."""
        module = self.path.stem if not self.path.is_relative_to(SOURCE) else _module_of(self.path)
        again = f" #{self.number}" if self.number > 1 else ""
        return f"{module}:{self.where} {self.kind} `{self.text}`{again}"

    def source(self) -> str:
        """Return the changed file."""
        original = self.path.read_text()
        return original[: self.begin] + self.replacement + original[self.end :]

    @property
    def line(self) -> int:
        return self.path.read_text()[: self.begin].count("\n") + 1


def _module_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts)


@cache
def files() -> tuple[Path, ...]:
    """Return the modules that know devices, and those that import them."""
    everything = sorted(SOURCE.glob("paceline/**/*.py"))
    about = {_module_of(p) for p in everything if _is_about_devices(p)}
    # Choosing a device and checking a machine order nothing.
    return tuple(p for p in everything if "cli" not in p.parts and _knows_devices(p, about))


def all_mutants() -> list[Mutant]:
    """Return the mutants of all files, in order."""
    return [mutant for path in files() for mutant in mutants_of(path)]


def _knows_devices(path: Path, about: set[str]) -> bool:
    """`about`: the modules about devices."""
    if _is_about_devices(path) or _is_also(path):
        return True
    imported = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            imported |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return bool(imported & about)


def _is_about_devices(path: Path) -> bool:
    return any(word in part for word in ABOUT_DEVICES for part in path.relative_to(SOURCE).parts)


def _is_also(path: Path) -> bool:
    return path.is_relative_to(SOURCE) and path.relative_to(SOURCE).as_posix() in ALSO


def mutants_of(path: Path) -> list[Mutant]:
    """Return the mutants of one file, in its order."""
    text = path.read_text()
    tree = ast.parse(text)
    is_device_module = not path.is_relative_to(SOURCE) or _is_about_devices(path)
    names = (*ERRAND_NAMES, "work") if _is_also(path) else ERRAND_NAMES
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    raw = text.encode()

    def offset(line: int, column: int) -> int:
        return len(raw[: starts[line - 1] + column].decode())

    found: list[Mutant] = []
    for where, node in _calls(tree, ()):
        for kind, target, replacement in _changes(node, is_device_module, names):
            assert target.end_lineno is not None and target.end_col_offset is not None
            begin = offset(target.lineno, target.col_offset)
            end = offset(target.end_lineno, target.end_col_offset)
            short = " ".join(ast.unparse(target).split())
            if target is not node:
                short = f"{short} of {ast.unparse(node.func)}"
            same = [m for m in found if (m.where, m.kind, m.text) == (where, kind, short)]
            found.append(Mutant(path, where, kind, short, len(same) + 1, begin, end, replacement))
    return found


def _calls(node: ast.AST, where: tuple[str, ...]) -> Iterator[tuple[str, ast.Call]]:
    for child in ast.iter_child_nodes(node):
        inside = where
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            inside = (*where, child.name)
        if isinstance(child, ast.Call):
            yield ".".join(where) or "module", child
        yield from _calls(child, inside)


def _changes(
    node: ast.Call, is_device_module: bool, names: Sequence[str]
) -> Iterator[tuple[str, ast.expr, str]]:
    """`names`: of receivers in this module whose `wait` may be for a device."""
    name, receiver = _called(node)
    first = ast.unparse(node.args[0]) if node.args else ""
    if name == "mark" and not receiver:
        yield "record", node, f"__import__('torch').Event({first})"
    elif (
        name == "note"
        and _is_like(receiver, STREAMS_NAMES)
        or name == "record"
        and (is_device_module or _is_like(receiver, EVENT_NAMES))
    ):
        yield "record", node, "None"
    elif name in STREAM_WAITS or (name == "join" and _is_like(receiver, STREAMS_NAMES)):
        yield "stream", node, _without_the_wait(node)
    elif _is_host_wait(name, receiver, is_device_module):
        yield "host", node, _without_the_wait(node)
    elif name == "wait" and (is_device_module or _is_like(receiver, names)):
        is_asked = receiver.endswith("_ended")  # whether the wait came to an end in time
        yield "host", node, "(True)" if is_asked else _without_the_wait(node)
    elif name == "query" or (
        name == "done" and receiver and (is_device_module or _is_like(receiver, ERRAND_NAMES))
    ):
        yield "query", node, "True"
    elif name == "record_stream" or (name == "append" and "in_flight" in receiver):
        yield "hold", node, "None"
    elif name == "ReadyHook":
        yield "record", node.args[-1], "None"
    elif name in HOLDERS and len(node.args) > 1:
        yield from _memory_of(node.args[-1])


def _is_host_wait(name: str, receiver: str, is_device_module: bool) -> bool:
    """Return whether a call blocks a host thread until a device is done."""
    if name in HOST_WAITS:
        of_device = _is_like(receiver, (*EVENT_NAMES, *ERRAND_NAMES))
        return is_device_module or not receiver or of_device
    of_route = name in ("settle", "wait_for") and _is_like(receiver, ROUTE_NAMES)
    return name in RELEASES or of_route


def _without_the_wait(node: ast.Call) -> str:
    """Return what stays of a call that waits: what starts the operation that it waits for."""
    receiver = node.func.value if isinstance(node.func, ast.Attribute) else None
    starts = receiver is not None and any(isinstance(n, ast.Call) for n in ast.walk(receiver))
    return f"({ast.unparse(receiver)})" if starts and receiver is not None else "None"


def _memory_of(memory: ast.expr) -> Iterator[tuple[str, ast.expr, str]]:
    """Drop each reference that a copy holds."""
    if isinstance(memory, ast.Tuple):
        for element in memory.elts:
            yield "hold", element, "None"
    else:
        yield "hold", memory, "None"


def _called(node: ast.Call) -> tuple[str, str]:
    """Return the name of the function, and the receiver if it is a method."""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr, ast.unparse(node.func.value)
    return (node.func.id, "") if isinstance(node.func, ast.Name) else ("", "")


def _is_like(receiver: str, names: tuple[str, ...]) -> bool:
    last = receiver.rsplit(".", 1)[-1].lower()
    return any(name in last for name in names)
