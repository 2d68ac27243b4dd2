"""What the launcher itself costs while four workers train: with the live table, and without.

The launcher runs under a pseudo-terminal, so that it draws its table; or with its output in a pipe.
Its CPU time is read from /proc, of that process alone: not of the workers.
"""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

_WORKERS = 4
_TICKS = os.sysconf("SC_CLK_TCK")
_SETTLE_S = 3.0  # torch is imported, and the first steps are done
_SCRIPT = """
import sys, time
import torch
import paceline as pl
from telemetry_runs.small import SMALL

torch.set_num_threads(1)
pl.init()
model = SMALL.model()
model, optimizer = pl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01))
x, target = SMALL.make_batch(SMALL.batch)
print("training", flush=True)
end_s, step = time.monotonic() + float(sys.argv[1]), 0
flag = torch.zeros(1)
while not flag.item():
    loss = SMALL.loss(model(x), target)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    pl.report(loss=loss.item())
    if step % 100 == 0:  # alike on all workers
        flag[0] = float(time.monotonic() > end_s)
        pl.world().all_reduce(flag, "max")
"""


def launcher_share(seconds: float, *, on_terminal: bool) -> float:
    """Train for a while; return the share of one core that the launcher used."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as directory:
        script = Path(directory) / "train.py"
        script.write_text(_SCRIPT, encoding="utf-8")
        paths = [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
        environ = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "OMP_NUM_THREADS": "1",
            "TERM": "xterm",
            "COLUMNS": "120",
            "LINES": "40",
        }
        length_s = _SETTLE_S + seconds + 2.0
        command = [sys.executable, "-m", "paceline", "run", "-n", str(_WORKERS), str(script)]
        main, side = pty.openpty() if on_terminal else os.pipe()
        launcher = subprocess.Popen(
            [*command, str(length_s)],
            cwd=directory,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=side,
            stderr=side,
        )
        os.close(side)
        reader = _Reader(main)
        try:
            reader.wait_for("training")
            time.sleep(_SETTLE_S)
            before_s, start_s = _cpu_s(launcher.pid), time.monotonic()
            time.sleep(seconds)
            used_s, took_s = _cpu_s(launcher.pid) - before_s, time.monotonic() - start_s
            status = launcher.wait(timeout=60)
        finally:
            if launcher.poll() is None:
                launcher.terminate()
                launcher.wait()
            reader.close()
        if status:
            raise SystemExit(f"telemetry: the launcher ended with {status}:\n{reader.text}")
        return used_s / took_s


class _Reader:
    """Reads the output, so that the writer never waits for a full pipe."""

    def __init__(self, fd: int) -> None:
        self._fd, self.text = fd, ""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while data := os.read(self._fd, 1 << 16):
                self.text = (self.text + data.decode(errors="replace"))[-20_000:]
        except OSError:  # the kernel's way of saying that the far end is closed
            pass

    def wait_for(self, text: str) -> None:
        give_up_s = time.monotonic() + 120
        while text not in self.text:
            if time.monotonic() > give_up_s or not self._thread.is_alive():
                raise SystemExit(f"telemetry: the workers did not begin:\n{self.text}")
            time.sleep(0.1)

    def close(self) -> None:
        self._thread.join(timeout=10)
        os.close(self._fd)


def _cpu_s(pid: int) -> float:
    """Return what a process has computed so far, all of its threads, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS
