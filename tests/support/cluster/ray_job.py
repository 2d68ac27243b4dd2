"""Runs `paceline run --on ray` on a test cluster, and reads what it prints."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.cluster.ray_cluster import RayCluster

# STEPS steps, or for ever until a file `stop` is there. Every worker has the same batch.
TRAIN = """
import os, pathlib, socket, sys, time
import torch
import paceline as pl

pl.init()
torch.manual_seed(1)
model = torch.nn.Linear(8, 1)
model, optimizer = pl.distribute(model, torch.optim.SGD(model.parameters(), lr=1e-3))
print(f"worker on {socket.gethostname()} rank {pl.rank()}", flush=True)
steps = int(os.environ.get("STEPS", 100_000))
for step in pl.steps(steps):
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if steps == 100_000:
        time.sleep(0.02)
        if pathlib.Path("stop").exists():
            break
print(f"weights {sum(p.sum().item() for p in model.parameters()):.6f}", flush=True)
"""


class RayJob:
    """A directory with a script, and the launcher of one job on a host of the cluster."""

    def __init__(self, cluster: RayCluster, directory: Path) -> None:
        self.cluster, self.directory = cluster, directory
        (directory / "train.py").write_text(TRAIN)
        self.lines: list[str] = []
        self.job: subprocess.Popen[str] | None = None
        self.host = "a"
        self.own = {"XDG_RUNTIME_DIR": str(directory / "run")}
        (directory / "run").mkdir(mode=0o700)

    def start(
        self, *words: str, steps: int = 0, on: str = "a", env: dict[str, str] | None = None
    ) -> None:
        """Start `paceline run --on ray` with these words and the script."""
        command = [self.cluster.python, "-m", "paceline", "run", "--on", "ray", *words]
        command += ["--env", f"STEPS={steps}"] if steps else []
        self.start_command(*command, "train.py", on=on, env=env)

    def start_command(
        self, *command: str, on: str = "a", env: dict[str, str] | None = None
    ) -> None:
        environ = {**self.cluster.environ, **self.own, "PYTHONUNBUFFERED": "1", **(env or {})}
        self.lines, self.host = [], on
        self.job = self.cluster[on].popen(
            list(command),
            cwd=self.directory,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        threading.Thread(target=self._read, args=(self.job, self.lines), daemon=True).start()

    @staticmethod
    def _read(job: subprocess.Popen[str], lines: list[str]) -> None:
        assert job.stdout is not None
        with job.stdout:
            lines += (line.rstrip() for line in iter(job.stdout.readline, ""))

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def finish(self, within_s: float = 60) -> int:
        """Wait for the end of the job; return its exit code."""
        assert self.job is not None
        code = self.job.wait(timeout=within_s)
        time.sleep(0.2)  # for the last lines
        return code

    def run(self, *words: str, **options: Any) -> tuple[int, str]:
        self.start(*words, **options)
        return self.finish(), self.text

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the launcher."""
        assert self.job is not None
        os.kill(self.cluster[self.host].pid_of(self.job), number)

    def close(self) -> None:
        """Kill the launcher if it still runs, as a failed test leaves it."""
        if self.job is not None and self.job.poll() is None:
            self.send(signal.SIGKILL)
            self.job.wait()

    def stop(self) -> int:
        """Let the training loop end."""
        (self.directory / "stop").touch()
        return self.finish()

    def wait_for(self, is_true: Callable[[], bool], within_s: float = 60) -> None:
        deadline = time.monotonic() + within_s
        while not is_true():
            assert time.monotonic() < deadline, self.text
            assert self.job is not None and self.job.poll() is None, self.text
            time.sleep(0.05)

    def wait_for_line(self, text: str, within_s: float = 60) -> None:
        self.wait_for(lambda: text in self.text, within_s)

    def hosts_of_workers(self) -> list[str]:
        """Return the hosts on which workers have printed their line, sorted."""
        lines = [line for line in self.lines if "worker on" in line]
        return sorted(line.split("worker on ")[1].split()[0] for line in lines)

    def wait_for_idle(self, host: str, within_s: float = 20) -> None:
        """Wait until no process of a job is left on a host."""
        deadline = time.monotonic() + within_s
        while left := self.cluster[host].job_processes():
            assert time.monotonic() < deadline, f"left on {host}: {left}"
            time.sleep(0.1)
