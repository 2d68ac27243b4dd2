"""Starts the jobs that train: on this host, on hosts of a switch, or independent processes.

A job goes through a list of trainings in a row (train.py), so that starting Python is paid for
once. If it fails, the training that was under way is marked with what was printed last, and another
job continues after it. All processes have ended when a function returns, or raises.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.switch import Switch

BENCH = Path(__file__).resolve().parent.parent
TRAIN = BENCH / "pace_runs" / "train.py"
_STILL_S = 300.0  # so long without a result, and a training has failed
_GRACE_S = 10.0  # for processes to end after SIGTERM

Run = dict[str, Any]
Result = dict[str, Any]
Start = Callable[[list[str], Path], "list[subprocess.Popen[bytes]]"]  # arguments, log


def carry_out(start: Start, runs: Sequence[Run], scratch: Path) -> dict[str, Result]:
    """Do all trainings; return by id what the workers reported, or {"failed": why}."""
    results: dict[str, Result] = {}
    left = list(runs)
    while left:
        out = scratch / secrets.token_hex(4)
        out.mkdir()
        plan, log = out / "plan", out / "log"
        plan.write_text("".join(json.dumps(run) + "\n" for run in left), encoding="utf-8")
        processes = start([str(TRAIN), str(plan), str(out)], log)
        is_stuck = _wait(processes, out)
        reported = gather(out, len(left[0]["steps"]))
        results |= {run["id"]: reported[run["id"]] for run in left if run["id"] in reported}
        left = [run for run in left if run["id"] not in reported]
        if left:
            why = f"no result for {_STILL_S:.0f} s" if is_stuck else "the job has failed"
            printed = log.read_text(encoding="utf-8", errors="replace")[-1500:]
            results[left[0]["id"]] = {"failed": f"{why}; it printed last:\n{printed}"}
            print(f"  {left[0]['id']}: {results[left[0]['id']]['failed']}", flush=True)
            left = left[1:]
    return results


def gather(out: Path, num_workers: int) -> dict[str, Result]:
    """Put together what the workers have written; only of trainings that all have ended."""
    by_run: dict[str, list[Result]] = {}
    for path in sorted(out.glob("*.jsonl"), key=lambda path: int(path.stem)):
        for line in path.read_text(encoding="utf-8").splitlines():
            reported = json.loads(line)
            by_run.setdefault(reported["run"], []).append(reported)
    return {
        run: {
            "steps": [reported["steps"] for reported in all_reported],
            "s": [reported["s"] for reported in all_reported],
            "sent": [reported["sent"] for reported in all_reported],
            "curve": all_reported[0]["curve"],
        }
        for run, all_reported in by_run.items()
        if len(all_reported) == num_workers
    }


def _wait(processes: Sequence[subprocess.Popen[bytes]], out: Path) -> bool:
    """Wait until all have ended, one has failed, or nothing happens; say whether it was that."""
    try:
        seen, since_s = -1, time.monotonic()
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):
                return False
            now = sum(path.stat().st_size for path in out.glob("*.jsonl"))
            if now != seen:
                seen, since_s = now, time.monotonic()
            if time.monotonic() - since_s > _STILL_S:
                return True
            time.sleep(0.1)
        return False
    finally:
        _end(processes)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End what is left: a launcher ends its own workers, so it gets the time for that."""
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    give_up_s = time.monotonic() + _GRACE_S
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=max(0.1, give_up_s - time.monotonic()))
        if process.poll() is None:
            process.kill()
            process.wait()


def on_this_host(num_workers: int, num_servers: int) -> Start:
    """Return how to start a job with `paceline run`."""
    command = [sys.executable, "-m", "paceline", "run", "-n", str(num_workers)]
    command += ["-s", str(num_servers)] if num_servers else []
    return lambda arguments, log: _start([([*command, *arguments], {})], log)


def alone() -> Start:
    """Return how to start one process without a job."""
    return independent([[]])


def independent(places: Sequence[list[str]]) -> Start:
    """Return how to start independent processes, each with the prefix of a command."""

    def start(arguments: list[str], log: Path) -> list[subprocess.Popen[bytes]]:
        return _start(
            [
                ([*place, sys.executable, *arguments], {"BENCH_RANK": str(rank)})
                for rank, place in enumerate(places)
            ],
            log,
        )

    return start


def on_hosts(switch: Switch, scratch: Path, num_servers: int) -> Start:
    """Return how to start a worker on each host, with a server beside each of the first ones."""

    def start(arguments: list[str], log: Path) -> list[subprocess.Popen[bytes]]:
        return _start(list(_commands(switch, scratch, arguments, num_servers)), log)

    return start


def _commands(
    switch: Switch, scratch: Path, arguments: list[str], num_servers: int
) -> Iterator[tuple[list[str], dict[str, str]]]:
    job, count = secrets.token_hex(6), len(switch.addresses)
    secret = scratch / f"{job}.secret"
    secret.touch(mode=0o600)
    secret.write_text(secrets.token_hex(32), encoding="ascii")
    shared = {
        "PACELINE_JOB": f"bench-{job}",
        "PACELINE_COORDINATOR": f"{switch.addresses[0]}:18600",
        "PACELINE_SECRET_FILE": str(secret),
        "PACELINE_SERVERS": str(num_servers),
    }
    for host, address in enumerate(switch.addresses):
        here = {**shared, "PACELINE_BIND": address}
        place = {"RANK": str(host), "WORLD_SIZE": str(count)}
        local = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        yield [*switch.enter(host), sys.executable, *arguments], {**here, **place, **local}
        if host < num_servers:
            numbers = {f"PACELINE_{name}": value for name, value in place.items()}
            server = [*switch.enter(host), sys.executable, "-m", "paceline.runtime.server_main"]
            yield server, {**here, **numbers, "PACELINE_ROLE": "server"}


def _start(
    commands: Sequence[tuple[list[str], Mapping[str, str]]], log: Path
) -> list[subprocess.Popen[bytes]]:
    path = os.pathsep.join(filter(None, [str(BENCH), os.environ.get("PYTHONPATH")]))
    # Eight processes that import torch on two cores at once may take their time.
    patience = {"PACELINE_JOIN_TIMEOUT_S": "240"}
    shared = {**os.environ, **patience, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    started: list[subprocess.Popen[bytes]] = []
    try:
        with log.open("ab") as output:
            for argv, env in commands:
                started.append(
                    subprocess.Popen(
                        argv,
                        env={**shared, **env},
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )
    except BaseException:
        _end(started)
        raise
    return started
