"""The spawner: starts processes on this host, forked from the template or as fresh interpreters.

The template (template.py) is started at once, and imports while the launcher sets up the job. There
is none when it would be of no use, when the user forbids it (--no-template, PACELINE_TEMPLATE=off),
and when a module has done something at its import that a fork breaks.

The template imports as much as the script's text shows a use for. torch and Paceline take two
seconds, and what an optimizer imports when it is made (torch._dynamo) takes as long again. A script
that uses neither should wait for neither. So the source is read, not run: its imports, and whether
it names what needs the rest. In doubt everything is imported: each process would otherwise do it by
itself.

Threads: used in the launcher's loop only.
"""

from __future__ import annotations

import ast
import importlib.machinery
import os
import re
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from paceline.launcher.processes.pipes import Outlet
from paceline.launcher.processes.process import RankProcess
from paceline.launcher.processes.template import Template, adopt_orphans
from paceline.launcher.spec import RunSpec
from paceline.runtime.process_names import Seat

_MOST_TEMPLATES = 3  # one that is killed is replaced, but not for ever
_ALWAYS = ("numpy", "torch", "paceline.runtime.job")
_TRAINING = ("torch._dynamo", "paceline.data.shard", "paceline.model_parallel.distribute")
_SERVER = ("torch._dynamo", "paceline.runtime.server_main")
_OWN = {"torch", "numpy", "paceline"}
_TRAINS = re.compile(r"optim|distribute|compile|Trainer|shard|Checkpoint|ps\.")


class Spawner:
    """Starts the processes of one job; `say` shows a line."""

    def __init__(self, spec: RunSpec, say: Callable[[str], None]) -> None:
        self._spec, self._say = spec, say
        self._template: Template | None = None
        self._environ: Mapping[str, str] = {}
        self._num_templates = 0

    @property
    def template_pid(self) -> int | None:
        return None if self._template is None else self._template.pid

    def warm_up(self, environ: Mapping[str, str]) -> None:
        """Start the template, with the environment of a worker without rank, if it is of use."""
        modules = _modules_for(self._spec) if self._spec.uses_template_in(environ) else ()
        if not modules:
            return
        self._environ = environ
        adopt_orphans()
        commands = (self._spec.program(seat).argv for seat in self._spec.seats)
        longest = max(sum(len(os.fsencode(word)) + 1 for word in argv) for argv in commands)
        try:
            self._template = Template(environ, modules, self._say, longest)
            self._num_templates += 1
        except OSError as error:
            self._say(f"no template: {error.strerror}; every process imports torch by itself")

    async def start(self, seat: Seat, environ: dict[str, str], outlet: Outlet) -> RankProcess:
        """Start a process; raises LaunchError."""
        program, dies = self._spec.program(seat), not self._spec.is_detached
        template = self._template
        if template is not None and await template.is_ready():
            process = await template.fork(seat, program, environ, outlet, dies=dies)
            if process is not None:
                return process
        if template is not None and template is self._template:
            self._lose_template(template)
        return RankProcess.start(seat, program.argv, environ, outlet, dies_with_launcher=dies)

    def _lose_template(self, template: Template) -> None:
        """Go on without a template; one that could be forked from is replaced by another."""
        self._say(f"no template: {template.why_not}; processes import torch by themselves")
        self._template = None
        template.end()
        if template.has_forked and self._num_templates < _MOST_TEMPLATES:
            self.warm_up(self._environ)

    def reap_orphans(self, known: Collection[int | None]) -> None:
        """Reap what ended below us and is nobody's: helpers that a lost process left behind."""
        if self._template is None or self._template.is_asked:
            return  # one of them may be a process whose pid we are about to learn
        path = f"/proc/self/task/{threading.get_native_id()}/children"
        with suppress(OSError), open(path, encoding="ascii") as children:
            for pid in map(int, children.read().split()):
                if pid not in known and pid != self._template.pid:
                    with suppress(ChildProcessError):
                        os.waitpid(pid, os.WNOHANG)

    def close(self) -> None:
        """End the template; no further process is expected."""
        if self._template is not None:
            self._template.end()
            self._template = None


# -- what the template imports --------------------------------------------------------------------


def _modules_for(spec: RunSpec) -> tuple[str, ...]:
    """Return the modules that a template should import; none: it would be of no use."""
    if len(spec.seats) == 1 and spec.elastic is None:
        return ()  # nobody would share the imports
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
        return ()  # a fresh interpreter says best what is wrong
    if not used:
        return ()
    return (*_ALWAYS, *_TRAINING) if used - _OWN or _TRAINS.search(text) else _ALWAYS


def _imported(tree: ast.Module) -> Iterator[str]:
    """Yield the top-level names of what is imported; "" for what lies beside a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "" if node.level else (node.module or "").partition(".")[0]


def _module_file(name: str) -> Path | None:
    """Find a module's file without importing anything; None when that takes an import."""
    path: list[str] | None = [os.getcwd(), *sys.path]
    spec = None
    words = name.split(".")
    for count in range(1, len(words) + 1):
        spec = importlib.machinery.PathFinder.find_spec(".".join(words[:count]), path)
        if spec is None:
            return None
        path = spec.submodule_search_locations
    return None if spec is None or not spec.origin or path else Path(spec.origin)
