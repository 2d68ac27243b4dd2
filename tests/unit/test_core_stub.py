"""The types of the extension (_core.pyi) are those that the C++ code was bound with.

`stubtest`, in `make check`, cannot look into functions of nanobind; they carry their signatures,
which are compared here: names, order, types and defaults of all parameters, and what is returned.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paceline
from paceline import _core

STUB = ast.parse(Path(paceline.__file__).with_name("_core.pyi").read_text())
ALIASES = {node.targets[0].id: node.value for node in STUB.body if isinstance(node, ast.Assign)}
# What the binding knows less about than the stub says.
VAGUE = {"object", "list", "collections.abc.Sequence", "numpy.ndarray[dtype=uint8, shape=(*)]"}


def bound(thing: object, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in vars(thing).items():
        if hasattr(value, "__nb_signature__"):
            yield prefix + name, value
        elif isinstance(value, type) and value.__module__ == "paceline._core":
            yield from bound(value, f"{name}.")


def stubbed(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in body:
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from stubbed(node.body, f"{node.name}.")


class Written(ast.NodeTransformer):
    """Writes types in one way: no aliases, and nothing about where a name comes from."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.visit(ALIASES[node.id]) if node.id in ALIASES else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        return ast.Name(node.attr)


def written(annotation: ast.expr | None) -> str:
    return "" if annotation is None else ast.unparse(Written().visit(annotation))


def test_every_name_has_its_types() -> None:
    public = {name for name in vars(_core) if not name.startswith("__")}
    nodes = [node for node in STUB.body if isinstance(node, ast.AnnAssign)]
    constants = {node.target.id for node in nodes if isinstance(node.target, ast.Name)}
    classes = {node.name for node in STUB.body if isinstance(node, ast.ClassDef)}
    functions = {name for name, _ in stubbed(STUB.body) if "." not in name}
    assert public == constants | classes | functions
    assert {name for name, _ in bound(_core)} == {name for name, _ in stubbed(STUB.body)}


def test_signatures_are_those_of_the_binding() -> None:
    stubs = dict(stubbed(STUB.body))
    for name, function in bound(_core):
        [(text, _, defaults)] = function.__nb_signature__
        values = iter(defaults or ())
        head, _, result = text.rpartition(" -> ")
        # A default stands as a backslash and its number; an array's shape is no Python.
        [real] = ast.parse(head.replace("\\", "0x") + ": ...").body
        stub = stubs[name]
        assert isinstance(real, ast.FunctionDef)
        assert [a.arg for a in real.args.args] == [a.arg for a in stub.args.args], name
        for mine, theirs in zip(real.args.args, stub.args.args, strict=True):
            is_vague = mine.annotation and ast.unparse(mine.annotation) in VAGUE
            expected = written(mine.annotation)
            assert is_vague or expected == written(theirs.annotation), f"{name}: {mine.arg}"
        assert len(real.args.defaults) == len(stub.args.defaults), name
        for given in stub.args.defaults:
            value = next(values)
            assert ast.literal_eval(given) == value, f"{name}: {value}"
        if result not in VAGUE:
            assert written(ast.parse(result, mode="eval").body) == written(stub.returns), name
