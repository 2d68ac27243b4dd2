"""How long training stands still when a process is killed.

    python bench/resume.py                          # workers under all-reduce, servers under ps
    python bench/resume.py --kills 20 --roles server --pace ssp:3

A small model trains (bench/chaos_runs/train.py); every few seconds a random process of one role is
killed with SIGKILL and replaced. For each kill: the time from the kill to the end of the longest
pause between two steps that follows, on the survivor for which that took longest. So a step that
was almost done when the kill came does not count as the first one after it.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from chaos_runs.victims import Killer

HERE = Path(__file__).resolve().parent
TRAIN = HERE / "chaos_runs" / "train.py"
WAYS = {"worker": "allreduce", "server": "ps"}
_WINDOW_S = 2.5  # a pause that begins later has another cause


def resume_s(diaries: list[list[float]], kill_s: float) -> float | None:
    """Return how long after a kill all survivors resumed; None if no worker survived it."""
    found = []
    for times in diaries:
        if not times or times[0] > kill_s - 0.5 or times[-1] < kill_s + _WINDOW_S:
            continue  # not there before, or the victim
        pauses = [
            (b - a, b - kill_s)
            for a, b in zip(times, times[1:], strict=False)
            if b > kill_s and a < kill_s + _WINDOW_S
        ]
        found.append(max(pauses)[1])
    return max(found, default=None)


def run(role: str, pace: str, arguments: argparse.Namespace) -> list[float]:
    """Train while processes of a role are killed; return the resume time of each kill."""
    with tempfile.TemporaryDirectory(prefix="paceline-resume-") as directory:
        diary = Path(directory)
        command = [sys.executable, "-m", "paceline", "run", "-n", str(arguments.workers)]
        command += ["--min", "1", "--pace", pace]
        command += ["-s", "2", "--replicas", "2"] if pace != "allreduce" else []
        command += [str(TRAIN), "--steps", "1000000", "--batch", "16", "--width", "128"]
        log = diary / "output.log"
        with log.open("wb") as output:
            job = subprocess.Popen(
                [*command, "--diary", directory], stdout=output, stderr=subprocess.STDOUT
            )
        try:
            kills = kill_often(job, diary, role, arguments)
        finally:
            job.send_signal(signal.SIGTERM)
            job.wait(timeout=30)
        diaries = [
            [float(line.split()[0]) for line in path.read_text().splitlines() if " step " in line]
            for path in diary.glob("*.txt")
        ]
        if len(kills) < arguments.kills:
            sys.stdout.write(log.read_text(errors="replace")[-4000:])
        times = [resume_s(diaries, at_s) for at_s in kills]
        return [found_s for found_s in times if found_s is not None]


def kill_often(
    job: subprocess.Popen[bytes], diary: Path, role: str, arguments: argparse.Namespace
) -> list[float]:
    """Kill one process after the other, each when the last one has been replaced."""
    while not (diary / "job.json").exists() or not list(diary.glob("*.txt")):
        if job.poll() is not None:
            return []
        time.sleep(0.05)
    time.sleep(8.0)  # until all is warm
    chance, killer = random.Random(arguments.seed), Killer(diary, arguments.seed, (role,), job.pid)
    deadline_s = time.monotonic() + 20 * arguments.kills
    try:
        while len(killer.kills) < arguments.kills and time.monotonic() < deadline_s:
            killer.kill()
            time.sleep(_WINDOW_S + chance.random())
            if job.poll() is not None:
                break
    finally:
        killer.close()
    return [at_s for at_s, *_ in killer.kills]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--roles", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--pace", help="instead of all-reduce for workers, ps for servers")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    found = {}
    for role in arguments.roles:
        pace = arguments.pace or WAYS[role]
        times = sorted(run(role, pace, arguments))
        p50, p99 = statistics.median(times), times[int(0.99 * (len(times) - 1))]
        print(
            f"{role} under {pace}: {len(times)} kills, resume p50 {p50:.2f} s, p99 {p99:.2f} s,"
            f" most {times[-1]:.2f} s",
            flush=True,
        )
        found[f"{role} {pace}"] = times
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / "resume.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
