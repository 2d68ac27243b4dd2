"""How a fork of the template becomes what a fresh interpreter would be, and runs its script.

A script must not notice where it comes from. It is `__main__`, with its own arguments, search
path, environment, output, signals, session and exit status; its tracebacks begin with its own
frames; `ps` shows its command. What is left is written down in ADR 39: modules that are imported
already, one hash seed for all processes of a job, and variables that a library reads only while it
is imported.

A directory with a module that has the name of one of those that are imported already would get the
wrong one: then a fresh interpreter takes the fork's place (exec).
"""

from __future__ import annotations

import builtins
import ctypes
import importlib
import os
import pkgutil
import runpy
import signal
import sys
import time
import types
from collections.abc import Mapping, Sequence
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from typing import Any

import msgspec

from paceline.launcher.processes.process import die_with
from paceline.runtime.config import adopt_environ, inherited_environ


class Program(msgspec.Struct, frozen=True):
    """What a process runs. `kind` is "script", "module" or "server"."""

    kind: str
    target: str
    arguments: tuple[str, ...]

    @property
    def argv(self) -> list[str]:
        """The command of a fresh interpreter that runs the same."""
        if self.kind == "server":
            return [sys.executable, "-m", "paceline.runtime.server_main"]
        head = ["-m", self.target] if self.kind == "module" else [self.target]
        return [sys.executable, *head, *self.arguments]


def become(
    program: Program,
    environ: dict[str, str],
    outputs: Sequence[int],
    signals: Mapping[signal.Signals, Any],
    between: int,
    dies_with: int | None,
) -> None:
    """Forget the template: own session, output, environment and command, ordinary signals."""
    os.setsid()
    while os.getppid() == between:  # it is about to end, and then the launcher is our parent
        time.sleep(0.0005)
    if dies_with is not None:
        die_with(dies_with)
    for number, handler in signals.items():
        signal.signal(number, handler)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (outputs[0], 1), (outputs[1], 2)):
        os.dup2(source, target)
    os.closerange(3, max(map(int, os.listdir("/proc/self/fd"))) + 1)
    threads = inherited_environ().get("OMP_NUM_THREADS")
    adopt_environ(environ)
    is_safe = program.kind == "server" or environ.get("PYTHONSAFEPATH")
    if not is_safe and _hides_module(_first_path(program)):
        os.execve(sys.executable, program.argv, environ)
    show(program.argv, environ)
    _forget_state(environ.get("OMP_NUM_THREADS", ""), threads)


def _forget_state(threads: str, template_threads: str | None) -> None:
    """Set anew what libraries have read or drawn while they were imported."""
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        if threads != template_threads and threads.isdigit():
            torch.set_num_threads(int(threads))
        torch.default_generator.seed()  # else all would draw the same numbers
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "multiprocessing.process" in sys.modules:
        sys.modules["multiprocessing.process"].current_process().authkey = os.urandom(32)


def _first_path(program: Program) -> str:
    """Return where a fresh interpreter would look for modules first."""
    is_module = program.kind == "module"
    return os.getcwd() if is_module else os.path.dirname(os.path.realpath(program.target))


def _hides_module(directory: str) -> bool:
    """Tell whether the directory has a module that would be found instead of an imported one."""
    for entry in os.listdir(directory or "."):
        name, _, rest = entry.partition(".")
        module = sys.modules.get(name)
        if module is None or name == "__main__":
            continue
        path = os.path.join(directory, entry)
        found = os.path.join(path, "__init__.py") if not rest else path
        is_module = rest == "py" or rest.endswith("so") or (not rest and os.path.isfile(found))
        if is_module and os.path.realpath(getattr(module, "__file__", None) or "") != found:
            return True
    return False


def show(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> None:
    """Write command and environment to where the kernel shows them, as far as there is room.

    They lie at the bottom of the stack, and nothing points there any more: Python has copied the
    arguments, and `adopt_environ` has replaced the variables.
    """
    with open("/proc/self/stat", "rb") as stat:
        fields = stat.read().rpartition(b")")[2].split()
    arg_start, arg_end, env_start, env_end = map(int, fields[45:49])
    shown = [(arg_start, arg_end, argv)]
    if environ is not None:
        variables = [f"{name}={value}" for name, value in environ.items()]
        shown.append((env_start, env_end, variables))
    for start, end, words in shown:
        text = b"".join(os.fsencode(word) + b"\0" for word in words)
        if start and len(text) <= end - start:
            ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


# -- run ----------------------------------------------------------------------------------------


def run(program: Program, environ: Mapping[str, str]) -> None:
    """Run the program as `__main__`; an exception ends the process as it ends an interpreter."""
    sys.orig_argv = program.argv
    if program.kind == "server":
        sys.argv = [program.target]
        sys.exit(importlib.import_module("paceline.runtime.server_main").main())
    sys.argv = [program.target, *program.arguments]
    if not environ.get("PYTHONSAFEPATH"):
        sys.path.insert(0, _first_path(program))
    try:
        _run_main(program)
    except SystemExit:
        raise
    except BaseException as error:
        error = error.with_traceback(_of_the_script(error.__traceback__))
        # As the interpreter does, for what runs at exit: `pl.shutdown` asks whether it failed.
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        if sys.version_info >= (3, 12):
            sys.last_exc = error
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):  # as the interpreter does, for the exit status
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        sys.exit(1)


def _run_main(program: Program) -> None:
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    names: dict[str, Any] = main.__dict__
    names.update(__builtins__=builtins, __annotations__={})
    run_module_as_main = runpy._run_module_as_main  # type: ignore[attr-defined]  # what -m calls
    if program.kind == "module":
        run_module_as_main(program.target)
        return
    path = os.path.join(os.getcwd(), program.target)
    if pkgutil.get_importer(path) is not None:  # a zip file
        sys.path[0] = path
        run_module_as_main("__main__", alter_argv=False)
    else:
        is_compiled = path.endswith(".pyc")
        kind = SourcelessFileLoader if is_compiled else SourceFileLoader
        names.update(__file__=path, __cached__=None, __loader__=kind("__main__", path))
        (kind if is_compiled else _ScriptLoader)("__main__", path).exec_module(main)


class _ScriptLoader(SourceFileLoader):
    """Loads a script, of which no compiled copy is kept."""

    def get_code(self, fullname: str) -> types.CodeType:
        del fullname  # it is "__main__"
        return self.source_to_code(self.get_data(self.path), self.path)


def _of_the_script(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """Leave out the frames above the script's own; all of them when it was not even compiled."""
    above = (__file__, "<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>")
    while traceback is not None and traceback.tb_frame.f_code.co_filename in above:
        traceback = traceback.tb_next
    return traceback
