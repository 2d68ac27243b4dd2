"""What the template imports for a script: as much as the script's text shows a use for.

torch and Paceline take two seconds to import, and what an optimizer imports when it is made
(torch._dynamo) takes as long again. A script that uses neither should wait for neither. So the
source is read, not run: its imports, and whether it names what needs the rest. In doubt the
template imports everything, because otherwise each process would do so itself.
"""

from __future__ import annotations

import ast
import importlib.machinery
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from paceline.launcher.processes.imports_ahead import FirstImport
from paceline.launcher.spec import RunSpec

_ALWAYS = ("numpy", "torch", "paceline.runtime.job")
_TRAINING = ("torch._dynamo", "paceline.data.shard", "paceline.model_parallel.distribute")
_SERVER = ("torch._dynamo", "paceline.runtime.server_main")
_OWN = {"torch", "numpy", "paceline"}
_TRAINS = re.compile(r"optim|distribute|compile|Trainer|shard|Checkpoint|ps\.")


def modules_to_import(spec: RunSpec) -> tuple[str, ...]:
    """Return the modules that a template should import; none if a template is of no use."""
    if len(spec.process_names) == 1 and spec.elastic is None:
        return ()  # no other process would share the imports
    found = _modules_of_script(spec)
    if found and spec.num_servers:
        found = (*found, *_SERVER)
    return tuple(dict.fromkeys(found))


def _modules_of_script(spec: RunSpec) -> tuple[str, ...]:
    path = _module_file(spec.target) if spec.is_module else Path(spec.target)
    if path is None or path.suffix != ".py":
        return (*_ALWAYS, *_TRAINING)
    try:
        text = path.read_text()
        used = set(_imported(ast.parse(text))) - sys.stdlib_module_names
    except (OSError, SyntaxError, ValueError):
        return ()  # a fresh interpreter reports best what is wrong
    if not used:
        return ()
    return (*_ALWAYS, *_TRAINING) if used - _OWN or _TRAINS.search(text) else _ALWAYS


def _imported(tree: ast.Module) -> Iterator[str]:
    """Yield the top-level names of imported modules; "" for a relative import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "" if node.level else (node.module or "").partition(".")[0]


def first_imports(spec: RunSpec) -> tuple[FirstImport, ...]:
    """Return the imports with which the script begins, if there is more than torch in them."""
    path = _module_file(spec.target) if spec.is_module else Path(spec.target)
    if path is None or path.suffix != ".py":
        return ()
    return leading_imports(path, Path.cwd() if spec.is_module else path.parent)


def leading_imports(path: Path, directory: Path) -> tuple[FirstImport, ...]:
    """Return the imports with which a script begins that finds its own modules in a directory.

    They end at the first other statement, which may decide what a later import does, and at the
    first of its own modules. None if they name nothing but what every template has imported.
    """
    try:
        body = ast.parse(path.read_text()).body
    except (OSError, SyntaxError, ValueError):
        return ()
    found = list[FirstImport]()
    for statement in body[bool(body and _is_docstring(body[0])) :]:
        if isinstance(statement, ast.Import):
            imports = [FirstImport(alias.name) for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom) and not statement.level and statement.module:
            names = tuple(alias.name for alias in statement.names)
            imports = [FirstImport(statement.module, names)]
        else:
            break
        if any(_is_own(one.module, directory) for one in imports):
            break
        found += imports
    known = _OWN | sys.stdlib_module_names
    is_more = any(one.module.partition(".")[0] not in known for one in found)
    return tuple(found) if is_more else ()


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _is_own(module: str, directory: Path) -> bool:
    """Return whether the script's process would import another module of this name."""
    top = module.partition(".")[0]
    is_here = (directory / f"{top}.py").exists() or (directory / top).is_dir()
    return is_here or top == "horovod"  # it may be paceline.horovod


def _module_file(name: str) -> Path | None:
    """Find a module's file without importing anything; None if that takes an import."""
    path: list[str] | None = [os.getcwd(), *sys.path]
    spec = None
    words = name.split(".")
    for count in range(1, len(words) + 1):
        spec = importlib.machinery.PathFinder.find_spec(".".join(words[:count]), path)
        if spec is None:
            return None
        path = spec.submodule_search_locations
    return None if spec is None or not spec.origin or path else Path(spec.origin)
