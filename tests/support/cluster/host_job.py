"""A training job over test hosts: `paceline run` on one of them, and what it has printed so far."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from paceline.launcher.engines.agent_command import AGENT_MODULE
from support.cluster.host import HostProcess
from support.cluster.host_group import HostGroup

# Each worker prints its steps, so that a test sees which worker continues.
TRAIN = """
import os, time
import torch, paceline as pl
pl.init()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
model, optimizer = pl.distribute(model, torch.optim.SGD(model.parameters(), 0.01))
for step in pl.steps(int(os.environ.get("STEPS", "80"))):
    model(torch.randn(8, 4)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    print("step", step, flush=True)
    time.sleep(0.05)
print("done", pl.rank(), flush=True)
"""


class HostJob:
    """One job; its own registry hides the jobs of other tests."""

    def __init__(
        self,
        cluster: HostGroup,
        directory: Path,
        *options: str,
        on: str = "a",
        before: tuple[str, ...] = (),
        script: str = TRAIN,
    ) -> None:
        (directory / "train.py").write_text(script)
        self.cluster, self.host = cluster, cluster[on]
        self.environ = {"XDG_RUNTIME_DIR": str(directory), **getattr(cluster, "environ", {})}
        command = [*before, sys.executable, "-m", "paceline", "run", *options, "train.py"]
        self._process = self.host.popen(
            command,
            cwd=str(directory),
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as printed:
            self.lines.extend(printed)

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def wait_for(self, text: str, timeout_s: float = 60, after: int = 0) -> float:
        """Wait until the job has printed a text (after so many lines); return how long it took."""
        began_s = time.monotonic()
        while not any(text in line for line in self.lines[after:]):
            is_waiting = self._reader.is_alive() and time.monotonic() < began_s + timeout_s
            assert is_waiting, f"no {text!r} in\n{self.output}"
            time.sleep(0.02)
        return time.monotonic() - began_s

    def result(self, timeout_s: float = 120) -> int:
        """Wait for the end of the job; return its exit code."""
        self._reader.join(timeout_s)
        if self._reader.is_alive():
            os.kill(self.host.pid_of(self._process), signal.SIGKILL)
        return self._process.wait()

    # -- what it says -----------------------------------------------------------------------------

    @property
    def losses(self) -> list[str]:
        """The lines that announce a loss, once each."""
        return [
            line for line in self.lines if ") lost: " in line and "replacement (pid" not in line
        ]

    # -- its processes ----------------------------------------------------------------------------

    def worker(self, rank: int) -> HostProcess:
        """Return the process of a rank, on whichever host it runs."""
        (found,) = (
            process
            for host in self.cluster.hosts
            for process in host.processes()
            if process.environ.get("RANK") == str(rank)
        )
        return found

    def agent(self, host: str) -> HostProcess:
        """Return the agent on a host."""
        (found,) = (p for p in self.cluster[host].processes() if p.command.endswith(AGENT_MODULE))
        return found

    def wait_until_gone(self, host: str, within_s: float = 10) -> None:
        """Wait until a host has no process of the job. sshd may not know that its peer is gone."""
        deadline_s = time.monotonic() + within_s
        while left := [p for p in self.cluster[host].processes() if "python" in p.command]:
            assert time.monotonic() < deadline_s, f"left on {host}: {left}"
            time.sleep(0.05)

    def paceline(self, *words: str, on: str = "a") -> subprocess.CompletedProcess[str]:
        """Run another command of Paceline on a host."""
        return self.cluster[on].run([sys.executable, "-m", "paceline", *words], env=self.environ)

    def interrupt(self) -> None:
        """Interrupt the launcher, as Ctrl-C does."""
        os.kill(self.host.pid_of(self._process), signal.SIGINT)

    def signal(self, process: HostProcess, number: signal.Signals) -> None:
        os.kill(process.pid, number)
