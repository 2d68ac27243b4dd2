"""`pl.ray`: run a function on the workers of a Ray cluster. Importing this does not import Ray.

    this process -- paceline run --on ray --> workers on Ray's nodes --> function(*args)

The launcher is a child of this process, and ends with it. The function, its arguments and its
results are shipped by Ray's own serialisation, inside of Ray's trust boundary (SECURITY.md).
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from paceline.errors import LaunchError, UsageError
from paceline.launcher.engines.ray.batches import RayBatches, batches
from paceline.launcher.engines.ray.connection import import_ray
from paceline.launcher.engines.ray.function import DIRECTORY_VARIABLE, FUNCTION_FILE
from paceline.launcher.engines.ray.request import DEFAULT_WAIT_S, RayRequest
from paceline.launcher.processes.process import die_with
from paceline.runtime.config import inherited_environ

__all__ = ["RayBatches", "RayResult", "batches", "run"]

_MODULE = "paceline.launcher.engines.ray.function_main"
_KEEP_LINES = 60


@dataclass(frozen=True)
class RayResult:
    """What a job returned. `values` has what the function returned, by rank."""

    values: Mapping[int, Any]
    run_directory: Path  # logs, events and TensorBoard files
    checkpoint: Path | None  # the last one that the job saved or resumed from

    @property
    def value(self) -> Any:
        """What the function returned on the lowest rank."""
        return self.values[min(self.values)]


def run(
    function: Callable[..., Any],
    *args: Any,
    workers: int | tuple[int, int] = 2,
    servers: int = 0,
    replicas: int = 1,
    pace: str | None = None,
    mesh: str | None = None,
    resources: Mapping[str, float] | None = None,
    placement: str = "pack",
    on_loss: str | None = None,
    env: Mapping[str, str] | None = None,
    log_dir: str | Path | None = None,
    address: str | None = None,
    wait_s: float = DEFAULT_WAIT_S,
    options: Sequence[str] = (),
) -> RayResult:
    """Call `function(*args)` on workers of a Ray cluster; return what they returned.

    The function does what a script does, beginning with `pl.init()`. `workers` is a number, or the
    least and the most: the job starts with the least, and takes more as Ray has room. Servers with
    `replicas` copies are spread over the nodes. `resources` is what each worker and each server
    needs; default: one CPU. `placement`: workers on few nodes ("pack") or on many ("spread").
    `address` is the head of the cluster; default: that of this process's Ray, else as Ray finds it.
    `options` are further words for `paceline run`, such as ("--precision", "bf16").

    If a worker fails, LaunchError has the report. A function that Ray cannot ship is a UsageError.
    """
    low, high = workers if isinstance(workers, tuple) else (workers, workers)
    asked = RayRequest(
        resources={"CPU": 1.0} if resources is None else dict(resources),
        strategy=placement,
        wait_s=wait_s,
    )
    ray = import_ray()
    data = _shipped(ray, function, args)
    directory = Path("runs") / _run_name(function) if log_dir is None else Path(log_dir)
    each = ",".join(f"{name}={amount:g}" for name, amount in asked.resources.items())
    words = ["--on", _engine(ray, address), "-n", str(low), "--log-dir", str(directory)]
    words += [f"--resources={each}", f"--placement={placement}", f"--wait={wait_s:g}"]
    words += ["--min", str(low), "--max", str(high)] if high != low else []
    words += ["-s", str(servers)] if servers else []
    words += ["--replicas", str(replicas)] if replicas != 1 else []
    for option, value in (("pace", pace), ("mesh", mesh), ("on-loss", on_loss)):
        words += [] if value is None else [f"--{option}={value}"]
    for name, value in (env or {}).items():
        words += ["--env", f"{name}={value}"]
    with tempfile.TemporaryDirectory(prefix="paceline-ray-") as shared:  # mode 0700
        (Path(shared) / FUNCTION_FILE).write_bytes(data)
        _run_launcher([*words, *options, "-m", _MODULE], shared)
        return _result(ray, Path(shared), directory.absolute())


def _shipped(ray: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Return the function and its arguments as Ray ships them; raises UsageError."""
    name = getattr(function, "__qualname__", repr(function))
    if not callable(function):
        raise UsageError(f"pl.ray.run({name:.60}): expected a function")
    try:
        return bytes(ray.cloudpickle.dumps((function, args)))
    except Exception as error:  # Ray's serialisation raises many kinds
        raise UsageError(
            f"pl.ray.run: {name} or its arguments cannot be shipped to the nodes ({error}); create"
            " locks, sockets, files and models inside of the function, not around it"
        ) from None


def _run_name(function: Callable[..., Any]) -> str:
    name = re.sub(r"[^\w.+-]", "_", getattr(function, "__name__", "function"))[:60]
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{name}-{os.urandom(2).hex()}"


def _engine(ray: Any, address: str | None) -> str:
    """Return the value of --on: the given address, or the cluster that this process uses."""
    if address is None and ray.is_initialized():
        address = ray.get_runtime_context().gcs_address
    return "ray" if address is None else f"ray://{address}"


def _run_launcher(words: list[str], shared: str) -> None:
    """Run `paceline run`, and show what it prints; raises LaunchError if the job failed."""
    caller = os.getpid()
    launcher = subprocess.Popen(
        [sys.executable, "-m", "paceline", "run", *words],
        env={**inherited_environ(), DIRECTORY_VARIABLE: shared},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for this process, which passes it on
        preexec_fn=lambda: die_with(caller),
    )
    last: deque[str] = deque(maxlen=_KEEP_LINES)
    readers = [
        threading.Thread(target=_show, args=(launcher.stdout, lambda: sys.stdout, None)),
        threading.Thread(target=_show, args=(launcher.stderr, lambda: sys.stderr, last)),
    ]
    for reader in readers:
        reader.start()
    try:
        code = launcher.wait()
    except BaseException:  # KeyboardInterrupt, and what tests and notebooks raise
        launcher.send_signal(signal.SIGINT)
        launcher.wait()
        raise
    finally:
        for reader in readers:
            reader.join()
    if code != 0:
        raise LaunchError(f"the job on Ray ended with exit code {code}\n{_report(last)}")


def _show(stream: IO[bytes], target: Callable[[], IO[str]], last: deque[str] | None) -> None:
    """Copy lines to Python's own stream, which a notebook or Ray's driver shows."""
    with stream:
        for line in stream:
            text = line.decode(errors="replace")
            target().write(text)
            target().flush()
            if last is not None:
                last.append(text.rstrip())


def _report(lines: Sequence[str]) -> str:
    """Return the launcher's report: from the first cause on, else the last lines."""
    kept = list(lines)
    for index, line in enumerate(kept):
        if " failed first: " in line or "paceline: error: " in line or "the job ended: " in line:
            return "\n".join(kept[index:])
    return "\n".join(kept[-5:])


def _result(ray: Any, shared: Path, run_directory: Path) -> RayResult:
    values: dict[int, Any] = {}
    saved: list[str] = []
    for path in shared.glob("result-*"):
        rank = int(path.name.partition("-")[2])
        values[rank], checkpoint = ray.cloudpickle.loads(path.read_bytes())
        saved += [checkpoint] if checkpoint else []
    if not values:
        raise LaunchError("the job ended without a result: all its workers were removed from it")
    newest = max(saved, default=None, key=lambda name: (len(name), name))
    return RayResult(dict(sorted(values.items())), run_directory, Path(newest) if newest else None)
