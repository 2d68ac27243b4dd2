"""Makes a fork of the template look like a fresh interpreter, and runs a script in it.

A script must not notice the difference. It is `__main__`, with its own arguments, search path,
environment, output, signals, session and exit status; its tracebacks begin with its own frames;
`ps` shows its command. ADR 39 lists the remaining differences: modules that are already imported,
one hash seed for all processes of a job, and variables that a library reads only at import.

If the script's directory has a module with the name of one that is already imported, the script
would get the wrong one: then a fresh interpreter replaces the fork (exec).
"""

from __future__ import annotations

import builtins
import ctypes
import fcntl
import importlib
import os
import pkgutil
import random
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
from paceline.runtime.config import adopt_environ, inherited_environ, requested_probe
from paceline.runtime.launch_context import PACELINE
from paceline.runtime.probe_spec import parse_probe

TEMPLATE, COORDINATOR = "template", "coordinator"  # kinds of processes that are no rank
COORDINATOR_MODULE = "paceline.runtime.coordinator_main"
KEPT_FD = 3  # the descriptor that such a process gets from the launcher


class Command(msgspec.Struct, frozen=True):
    """What a process runs; `kind` is "script", "module", "server", or a kind that is no rank."""

    kind: str
    target: str
    arguments: tuple[str, ...]
    with_horovod: bool = False  # `import horovod` finds paceline.horovod

    @property
    def argv(self) -> list[str]:
        """The command line of a fresh interpreter that runs the same."""
        if self.kind == "server":
            return [sys.executable, "-m", "paceline.runtime.server_main"]
        if self.kind == COORDINATOR:
            return [sys.executable, "-m", COORDINATOR_MODULE, *self.arguments]
        if self.kind == TEMPLATE:
            return ["paceline: template"]
        head = ["-m", self.target] if self.kind == "module" else [self.target]
        installer = ["-m", "paceline.horovod"] if self.with_horovod else []
        return [sys.executable, *installer, *head, *self.arguments]


def become(
    command: Command,
    environ: dict[str, str],
    outputs: Sequence[int],
    signals: Mapping[signal.Signals, Any],
    between: int,
    dies_with: int | None,
) -> None:
    """Leave the template: own session, output, environment and command, default signals."""
    os.setsid()
    while os.getppid() == between:  # it exits soon, and then the launcher is our parent
        time.sleep(0.0005)
    if dies_with is not None:
        die_with(dies_with)
    for number, handler in signals.items():
        signal.signal(number, handler)
    nothing = os.open(os.devnull, os.O_RDONLY)
    ends = [(nothing, 0), (outputs[0], 1), (outputs[1], 2)]
    ends += [(kept, KEPT_FD) for kept in outputs[3:]]
    # Copies first: the number that one of them gets may be the present number of another.
    copies = [(fcntl.fcntl(fd, fcntl.F_DUPFD, len(ends)), target) for fd, target in ends]
    for source, target in copies:
        os.dup2(source, target)
    os.closerange(len(ends), max(map(int, os.listdir("/proc/self/fd"))) + 1)
    threads = inherited_environ().get("OMP_NUM_THREADS")
    adopt_environ(environ)
    is_safe = command.kind not in ("script", "module") or environ.get("PYTHONSAFEPATH")
    if not is_safe and _hides_module(_first_path(command)):
        os.execve(sys.executable, command.argv, environ)
    show(command.argv, environ)
    _forget_state(environ, threads)


def _seed_all(seed: int) -> None:
    """Seed the generators of this process."""
    random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def _forget_state(environ: Mapping[str, str], template_threads: str | None) -> None:
    """Reset what libraries have read or drawn at import."""
    threads = environ.get("OMP_NUM_THREADS", "")
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        if threads != template_threads and threads.isdigit():
            torch.set_num_threads(int(threads))
        torch.default_generator.seed()  # or all processes would draw the same numbers
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    seed = parse_probe(requested_probe(environ)).seed
    if seed is not None:  # jobs that are compared begin with the same numbers
        _seed_all(seed + int(environ.get(PACELINE.rank, "0")))
    if "multiprocessing.process" in sys.modules:
        sys.modules["multiprocessing.process"].current_process().authkey = os.urandom(32)


def _first_path(command: Command) -> str:
    """Return where a fresh interpreter looks for modules first."""
    is_module = command.kind == "module"
    return os.getcwd() if is_module else os.path.dirname(os.path.realpath(command.target))


def _hides_module(directory: str) -> bool:
    """Return whether a module in the directory has the name of an imported one."""
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
    """Write command and environment to where the kernel shows them, if there is room.

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


def run(command: Command, environ: Mapping[str, str]) -> None:
    """Run the command as `__main__`; an exception ends the process as it ends an interpreter."""
    sys.orig_argv = command.argv
    if command.kind == "server":
        sys.argv = [command.target]
        sys.exit(importlib.import_module("paceline.runtime.server_main").main())
    if command.kind == COORDINATOR:
        sys.exit(importlib.import_module(COORDINATOR_MODULE).main(command.arguments))
    sys.argv = [command.target, *command.arguments]
    if not environ.get("PYTHONSAFEPATH"):
        sys.path.insert(0, _first_path(command))
    if command.with_horovod:
        importlib.import_module("paceline.horovod").install()
    try:
        _run_main(command)
    except SystemExit:
        raise
    except BaseException as error:
        error = error.with_traceback(_script_frames(error.__traceback__))
        # As the interpreter does, for exit handlers: `pl.shutdown` reads whether the script failed.
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        if sys.version_info >= (3, 12):
            sys.last_exc = error
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):  # as the interpreter does, for the exit status
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        sys.exit(1)


def _run_main(command: Command) -> None:
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    names: dict[str, Any] = main.__dict__
    names.update(__builtins__=builtins, __annotations__={})
    run_module_as_main = runpy._run_module_as_main  # type: ignore[attr-defined]  # what -m calls
    if command.kind == "module":
        run_module_as_main(command.target)
        return
    path = os.path.join(os.getcwd(), command.target)
    if pkgutil.get_importer(path) is not None:  # a zip file
        sys.path[0] = path
        run_module_as_main("__main__", alter_argv=False)
    else:
        is_compiled = path.endswith(".pyc")
        kind = SourcelessFileLoader if is_compiled else SourceFileLoader
        names.update(__file__=path, __cached__=None, __loader__=kind("__main__", path))
        (kind if is_compiled else _ScriptLoader)("__main__", path).exec_module(main)


class _ScriptLoader(SourceFileLoader):
    """Loads a script without keeping a compiled copy."""

    def get_code(self, fullname: str) -> types.CodeType:
        del fullname  # it is "__main__"
        return self.source_to_code(self.get_data(self.path), self.path)


def _script_frames(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """Return the traceback without frames above the script's; None if it did not compile."""
    above = (__file__, "<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>")
    while traceback is not None and traceback.tb_frame.f_code.co_filename in above:
        traceback = traceback.tb_next
    return traceback
