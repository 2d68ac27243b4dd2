"""Training while processes are killed: how much of the work is useful, and what comes out.

    python bench/chaos.py                            # all-reduce and ps, both rates
    python bench/chaos.py --pace allreduce --mtbf 1.0 --steps 100
    python bench/chaos.py --coordinator-weight 0.1   # kills by role as in a cluster

Of every job (4 workers; with servers 2 of them, each value on both) random processes are killed
with SIGKILL, workers, servers and the coordinator alike, with a mean time between failures given in
multiples of the fault-free step. Reported for each: USEFUL SAMPLES, the share of all samples that
any process began to compute that were in a step that counts, as the workers that did it noted;
SPEED, samples that count per second against the fault-free run beside it; and the final loss on
held-out data against fault-free seeds.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from chaos_runs.victims import Killer

TRAIN = Path(__file__).resolve().parent / "chaos_runs" / "train.py"
RESULTS = Path(__file__).resolve().parent / "results"
ROLES = ("worker", "server", "coordinator")


@dataclass
class Run:
    """What the diaries of one run say."""

    computed: int  # samples
    useful: int
    steps: int
    step_s: float  # median time between two steps
    wall_s: float  # from the first step to the last
    losses: list[float]
    accuracies: list[float]

    @property
    def speed(self) -> float:
        return self.useful / self.wall_s


def read(diary: Path) -> Run:
    """Add up what all processes of a run have noted, the killed ones too."""
    computed, useful, done, ends = 0, 0, dict[int, float](), list[tuple[float, float]]()
    for path in diary.glob("*.txt"):
        for line in path.read_text().splitlines():
            at, kind, *rest = line.split()
            if kind == "batch":
                computed += int(rest[0])
            elif kind == "step":
                step = int(rest[0])
                useful += int(rest[1])
                done[step] = min(float(at), done.get(step, float("inf")))
            elif kind == "end":
                ends.append((float(rest[0]), float(rest[1])))
    times = [done[step] for step in sorted(done)]
    gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
    return Run(
        computed=computed,
        useful=useful,
        steps=len(done),
        step_s=statistics.median(gaps),
        wall_s=times[-1] - times[0],
        losses=[loss for loss, _ in ends],
        accuracies=[accuracy for _, accuracy in ends],
    )


def run(arguments: argparse.Namespace, pace: str, seed: int, mtbf: float | None, step_s: float):
    """Train once; with `mtbf`, while processes are killed. Returns (Run, kills by role)."""
    with tempfile.TemporaryDirectory(prefix="paceline-chaos-") as directory:
        diary = Path(directory)
        command = [sys.executable, "-m", "paceline", "run", "-n", str(arguments.workers)]
        command += ["--min", "1", "--pace", pace]
        if not pace.startswith("allreduce"):
            command += ["-s", "2", "--replicas", "2"]
        command += [str(TRAIN), "--steps", str(arguments.steps), "--batch", str(arguments.batch)]
        command += ["--width", str(arguments.width), "--seed", str(seed), "--diary", directory]
        log = Path(directory) / "output.log"
        with log.open("wb") as output:
            job = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
            try:
                kills = torment(job, diary, arguments, seed, mtbf, step_s) if mtbf else {}
                code = job.wait(timeout=arguments.limit_s)
            except BaseException:
                job.send_signal(signal.SIGTERM)
                job.wait(timeout=20)
                raise
        if arguments.show or code != 0:
            sys.stdout.write(log.read_text(errors="replace")[-6000:])
        if code != 0:
            raise SystemExit(f"the job ended with code {code}; killed: {kills}")
        return read(diary), kills


def torment(job, diary: Path, arguments, seed: int, mtbf: float, step_s: float) -> dict[str, int]:
    """Kill processes until the job ends; return how many of each role."""
    while not (diary / "job.json").exists() or not list(diary.glob("*.txt")):
        if job.poll() is not None:
            return {}
        time.sleep(0.05)
    time.sleep(2 * step_s)
    roles = ROLES if not arguments.roles else tuple(arguments.roles)
    killer = Killer(diary, seed, roles, job.pid, arguments.coordinator_weight)
    deadline_s = time.monotonic() + arguments.limit_s
    try:
        while time.monotonic() < deadline_s:
            try:
                job.wait(timeout=killer.pause(mtbf * step_s))
                break
            except subprocess.TimeoutExpired:
                killer.kill()
    finally:
        killer.close()
        for at_s, role, number, pid in killer.kills if arguments.show else ():
            print(f"{time.strftime('%H:%M:%S', time.localtime(at_s))} {role} {number} pid {pid}")
    return dict(killer.by_role)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--pace", nargs="+", default=["allreduce", "ps"])
    parser.add_argument("--mtbf", type=float, nargs="+", default=[5.5, 1.0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch", type=int, default=256, help="of each worker")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument(
        "--seeds", type=int, default=5, help="fault-free runs to compare the loss with"
    )
    parser.add_argument("--roles", nargs="+", choices=ROLES)
    parser.add_argument(
        "--coordinator-weight",
        type=float,
        default=1.0,
        help="how often the coordinator is killed, relative to a worker; as in a cluster: 0.1",
    )
    parser.add_argument("--limit-s", type=float, default=1200)
    parser.add_argument("--show", action="store_true", help="print what the jobs print")
    arguments = parser.parse_args()
    rows = []
    for pace in arguments.pace:
        quiet = [run(arguments, pace, seed, None, 0.0)[0] for seed in range(arguments.seeds)]
        step_s = statistics.median(r.step_s for r in quiet)
        losses = [r.losses[0] for r in quiet]
        mean, spread = statistics.mean(losses), statistics.stdev(losses) if len(losses) > 1 else 0.0
        speed = statistics.median(r.speed for r in quiet)
        print(
            f"{pace}: fault-free step {step_s:.3f} s, loss {mean:.4f} +- {spread:.4f}", flush=True
        )
        for mtbf in arguments.mtbf:
            chaotic, kills = run(arguments, pace, 0, mtbf, step_s)
            row = {
                "pace": pace,
                "mtbf_steps": mtbf,
                "step_s": step_s,
                "kills": sum(kills.values()),
                "by_role": kills,
                "useful_samples": chaotic.useful / chaotic.computed,
                "speed": chaotic.speed / speed,
                "loss": chaotic.losses[0],
                "loss_fault_free": [mean, spread],
                "losses_agree": len(set(chaotic.losses)) == 1,
            }
            rows.append(row)
            print(
                f"  MTBF {mtbf:g} steps: {row['kills']} kills {kills}, useful samples"
                f" {row['useful_samples']:.1%}, speed {row['speed']:.1%} of fault-free, loss"
                f" {row['loss']:.4f}",
                flush=True,
            )
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "chaos.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
