"""The spawner: starts processes on this host, forked from the template or as fresh interpreters.

The template (template.py) is started at once, and imports modules while the launcher sets up the
job. If there is no template, or it has died, processes start as fresh interpreters, which takes
seconds longer. There is none if it would be of no use, if the user forbids it (--no-template,
PACELINE_TEMPLATE=off), and if the import of a module did something that a fork breaks.

A second template, forked from the first, imports what the script imports first (`prepare`).
Replacements of workers are forked from it, without repeating these imports (ADR 92).

Threads: used in the launcher's loop only; one request to the template is under way at a time.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

from paceline.launcher.processes.forked_child import ForkedChild
from paceline.launcher.processes.imports_ahead import FirstImport
from paceline.launcher.processes.process import ProcessOutput, RankProcess
from paceline.launcher.processes.run_script import Command
from paceline.launcher.processes.template import Template
from paceline.runtime.process_names import ProcessName

_MAX_TEMPLATES = 3  # a template that is killed is replaced, but not for ever
_PR_SET_CHILD_SUBREAPER = 36
_MIN_COMMAND_BYTES = 2048  # also the coordinator shows its command


class Spawner:
    """Starts the processes of one job; `log` prints a line."""

    def __init__(self, log: Callable[[str], None], *, dies_with_launcher: bool = True) -> None:
        self._log, self._dies = log, dies_with_launcher
        self._template: Template | None = None
        self._prepared: Template | None = None  # for newcomers
        self._is_preparing, self._may_prepare = False, _MAX_TEMPLATES
        self._modules: Sequence[str] = ()
        self._environ: Mapping[str, str] = {}
        self._command_bytes = 0
        self._num_templates = 0

    def start_template(
        self, modules: Sequence[str], environ: Mapping[str, str], commands: Sequence[Command]
    ) -> None:
        """Start the template with the environment of a worker without rank."""
        self._modules, self._environ = modules, environ
        lengths = [sum(len(os.fsencode(word)) + 1 for word in c.argv) for c in commands]
        self._command_bytes = max(*lengths, _MIN_COMMAND_BYTES)
        adopt_orphans()
        self._start_template()

    def _start_template(self) -> None:
        try:
            self._template = Template.start(
                self._environ, self._modules, self._log, self._command_bytes
            )
            self._num_templates += 1
        except OSError as error:
            self._log(f"no template: {error.strerror}; every process imports torch itself")

    async def start(
        self, name: ProcessName, command: Command, environ: dict[str, str], output: ProcessOutput
    ) -> RankProcess:
        """Start a process; raises LaunchError."""
        prepared, template = self._prepared, self._template
        if name.is_newcomer and name.is_worker and prepared is not None:
            if not prepared.is_importing and not prepared.why_not:
                process = await prepared.fork(name, command, environ, output, dies=self._dies)
                if process is not None:
                    return process
            if prepared.why_not and prepared is self._prepared:
                self._drop_prepared(prepared)
        if template is not None and await template.is_ready():
            process = await template.fork(name, command, environ, output, dies=self._dies)
            if process is not None:
                return process
        if template is not None and template is self._template:
            self._replace_template(template)
        return RankProcess.start(name, command.argv, environ, output, dies_with_launcher=self._dies)

    async def prepare(self, first: Sequence[FirstImport]) -> None:
        """Fork the second template, for newcomers, unless there is one; raises LaunchError."""
        template = self._template
        if not first or template is None or template.is_importing or template.why_not:
            return
        if self._prepared is None and not self._is_preparing and self._may_prepare > 0:
            self._is_preparing = True
            self._may_prepare -= 1
            try:
                self._prepared = await template.fork_template(first)
            finally:
                self._is_preparing = False

    def _drop_prepared(self, prepared: Template) -> None:
        """Do without the second template; one that could be forked from and has died may be
        replaced."""
        if not prepared.has_forked:
            self._may_prepare = 0
        self._log(f"replacements import the script's modules themselves: {prepared.why_not}")
        self._prepared = None
        prepared.end()

    async def fork_child(
        self, command: Command, environ: Mapping[str, str], outputs: tuple[int, int], kept_fd: int
    ) -> ForkedChild | None:
        """Fork a process that is no rank, see `Template.fork_child`; None: there is no template."""
        template = self._template
        if template is None or template.is_importing or template.why_not:
            return None
        return await template.fork_child(command, environ, outputs, kept_fd)

    def _replace_template(self, template: Template) -> None:
        """Replace a template that has died; do without one that could never be forked from."""
        self._log(f"no template: {template.why_not}; processes import torch themselves")
        self._template = None
        template.end()
        if template.has_forked and self._num_templates < _MAX_TEMPLATES:
            self._start_template()

    def reap_orphans(self, known: Collection[int | None]) -> None:
        """Reap ended descendants that no code waits for: helpers of a lost process."""
        templates = [one for one in (self._template, self._prepared) if one is not None]
        if not templates or any(one.is_asked for one in templates):
            return  # an unknown child may be a process whose pid a template is about to send
        ours = {*known, *(one.pid for one in templates)}
        path = f"/proc/self/task/{threading.get_native_id()}/children"
        with suppress(OSError), open(path, encoding="ascii") as children:
            for pid in map(int, children.read().split()):
                if pid not in ours:
                    with suppress(ChildProcessError):
                        os.waitpid(pid, os.WNOHANG)

    def close(self) -> None:
        """End the templates; no further process is expected."""
        for template in (self._prepared, self._template):
            if template is not None:
                template.end()
        self._template = self._prepared = None


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants: of the processes that the template forks."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
