"""The command that starts an agent, and what it reads first.

The command is a fixed text. Shells on the way (the user's login shell on the host may be any) see
nothing else: no path, name or argument of the user. What differs between jobs comes over stdin, in
lines before the invitation:

    working directory       backslashes and newlines are escaped, in all of these lines
    interpreter
    activation line         run by bash (or sh) before the interpreter; may be empty
    module                  of the agent
    program                 a few lines of Python, which import the module
    invitation              for the agent, which reads the rest

A shell reads from a pipe byte by byte, so what follows its lines is left for the agent.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

AGENT_MODULE = "paceline.launcher.hosts.agent_main"

# Exit codes of the command, outside of those that Python, shells and ssh use.
NO_DIRECTORY, NO_INTERPRETER, NO_ACTIVATION, NO_PACELINE, NO_LINES = 90, 91, 92, 93, 94

_PYTHON = (
    "import importlib, sys\n"
    "name = sys.argv.pop(1)\n"
    "sys.path[:] = [p for p in sys.path if p]\n"  # the user's files are not modules of the agent
    "try:\n"
    "    module = importlib.import_module(name)\n"
    "except ImportError as error:\n"
    '    print(f"{type(error).__name__}: {error}", file=sys.stderr)\n'
    f"    sys.exit({NO_PACELINE})\n"
    "sys.exit(module.main())\n"
)
# One line, without ' and !: some login shells change those even inside of quotes.
_STEPS = (
    "IFS= read -r d && IFS= read -r p && IFS= read -r a && IFS= read -r m && IFS= read -r c"
    f" || exit {NO_LINES}",
    # The dot keeps newlines at the end, which $() removes.
    'd=$(printf %b. "$d") p=$(printf %b. "$p") a=$(printf %b. "$a") c=$(printf %b. "$c")',
    "d=${d%.} p=${p%.} a=${a%.} c=${c%.}",
    f'cd "$d" || exit {NO_DIRECTORY}',
    f'if [ -n "$a" ]; then eval "$a" >&2 </dev/null || exit {NO_ACTIVATION}; fi',
    f'command -v "$p" >/dev/null || exit {NO_INTERPRETER}',
    'exec "$p" -c "$c" "$m"',
)
_SHELL = 'exec "$(command -v bash || echo sh)" -c "$0"'
AGENT_COMMAND: tuple[str, ...] = ("sh", "-c", _SHELL, "; ".join(_STEPS))
# For ssh, which joins words with spaces and gives the text to a shell.
AGENT_COMMAND_TEXT = f"exec {shlex.join(AGENT_COMMAND)}"


@dataclass(frozen=True)
class AgentPlace:
    """Where an agent runs on a host, and with what."""

    directory: str  # the working directory of the agent and of the processes of the job
    python: str  # a path, or a name that the host finds in its PATH
    activation: str = ""  # such as `source /opt/conda/bin/activate env`
    module: str = AGENT_MODULE

    def stdin(self, invitation: bytes) -> bytes:
        """Return what the command reads: its own lines, then the invitation as one line."""
        values = (self.directory, self.python, self.activation, self.module, _PYTHON)
        return b"".join(_line(value) for value in values) + invitation.rstrip(b"\n") + b"\n"

    def explain(self, host: str, exit_code: int, errors: str) -> str | None:
        """Return why the command ended, and what to do; None if the agent itself ended."""
        last = (errors.strip().splitlines() or ["no reason given"])[-1].strip()
        words = {
            NO_DIRECTORY: f"host {host} has no directory {self.directory} that you can enter; make"
            " it there, share it between the hosts, or use --sync to copy this one",
            NO_INTERPRETER: f"host {host} has no Python at {self.python}; install the environment"
            " there, or name its interpreter with --python",
            NO_ACTIVATION: f"on host {host} the activation line failed: {self.activation!r}"
            f" ({last}); try it there in a shell",
            NO_PACELINE: f"on host {host}, {self.python} cannot import Paceline ({last});"
            " install the same version there as here, or name another interpreter with --python",
            NO_LINES: f"the agent on host {host} got no invitation: the connection ended too early;"
            " try again",
            127: f"host {host} has no `sh` in its PATH; Paceline needs a POSIX shell there",
        }
        return words.get(exit_code)


def _line(value: str) -> bytes:
    escaped = value.replace("\\", "\\\\").replace("\n", "\\n").replace("\0", "")
    return escaped.encode("utf-8", "surrogateescape") + b"\n"
