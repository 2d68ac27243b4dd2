"""Check Paceline on a real accelerator, in five minutes, with one device or more:

    python tests/gpu_check.py > report.md

The report fits into an issue: the machine, every pace on the device compared with the CPU, copies
compared with the bus, how much of the copies a training step hides, and waits of the script for the
device. It has no paths and no names of hosts. Two workers share a device if there is only one.

`--devices cpu` checks the script itself; `--load laggard` runs it on the test device.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

STEPS = 12
LIMIT_S = 240
# With these a run gives the same numbers each time; the others depend on who comes first.
EXACT = (
    *("allreduce", "allreduce[via=host]", "ps", "local:4", "post_local:4", "bmuf:4", "diloco:4"),
    *("bitmap", "allreduce[compress=int8]", "allreduce[compress=topk:0.1]"),
    "allreduce[compress=int8(feedback=yes)]",
)
FREE = (
    "async",
    "ssp:3",
    "backup:0",
    "easgd:4",
    "eamsgd:4",
    "gossip:ring",
    "partial:0.5",
    "hogwild",
)
SERVED = ("ps", "async", "ssp:3", "backup:0")  # need a parameter server; the others refuse one
TOLERANCE = 2e-3  # relative, of losses after some steps: other kernels round in another way


# -- in a worker ----------------------------------------------------------------------------------


def batches(rank: int, device: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the same numbers on every device."""
    import torch

    random = torch.Generator().manual_seed(100 + rank)
    for _ in range(STEPS):
        x = torch.randn(32, 64, generator=random)
        yield x.to(device), x[:, :8].argmax(1).to(device)


def train(pace: str) -> dict[str, Any]:
    """Train a small model at one pace; return its losses and how long a step took."""
    import torch

    import paceline as pl

    torch.manual_seed(0)
    device = pl.device()
    layers = [torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)]
    model = torch.nn.Sequential(*layers).to(device)
    rate = 1e-3 if pace == "bitmap" else 0.1
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    model, optimizer = pl.distribute(model, optimizer, pace=pace)
    losses, began_s = [], time.perf_counter()
    for x, y in batches(pl.rank(), device):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    found = [float(loss) for loss in losses]
    step_ms = (time.perf_counter() - began_s) / STEPS * 1e3
    return {"losses": found, "step_ms": step_ms, "device": str(device)}


def large_step(pace: str) -> Any:
    """Return a function that does one training step of an MLP with 4 MB buckets."""
    import torch

    import paceline as pl

    torch.manual_seed(0)
    device = pl.device()
    layers: list[Any] = []
    for _ in range(6):
        layers += [torch.nn.Linear(1024, 1024), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer = pl.distribute(model, optimizer, pace=pace)
    x = torch.randn(512, 1024, device=device)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    for _ in range(3):
        step()
    torch.accelerator.synchronize(device)
    return step


def overlap(pace: str) -> dict[str, Any]:
    """Profile some steps; return how much of the copies runs beside kernels."""
    step = large_step(pace)
    copies, kernels = spans_of(step)
    total = sum(end - begin for begin, end in copies)
    hidden = sum(overlapped(copy, kernels) for copy in copies)
    return {"copies": len(copies), "copy_ms": total, "hidden": hidden / total if total else 0.0}


def spans_of(step: Any) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Return when copies and kernels of a step ran (ms)."""
    import torch

    if "laggard" in sys.modules:
        import laggard

        with laggard.simulated_time(tera_flops=0.5):
            step()
        found = [(s.op, s.begin_ms, s.end_ms) for s in laggard.take_timeline()]
        names = ("copy device to host", "copy host to device")
    else:
        activities = [torch.profiler.ProfilerActivity.CPU]
        kind = torch.accelerator.current_accelerator().type.upper()
        activities.append(getattr(torch.profiler.ProfilerActivity, kind))
        with torch.profiler.profile(activities=activities) as profiler:
            step()
            torch.accelerator.synchronize()
        names = ("Memcpy DtoH", "Memcpy HtoD")
        on_device = [e for e in profiler.events() if e.device_type.name != "CPU"]
        found = [(e.name, e.time_range.start / 1e3, e.time_range.end / 1e3) for e in on_device]
    copies = [(begin, end) for name, begin, end in found if name.startswith(names)]
    others = [(begin, end) for name, begin, end in found if not name.startswith(names)]
    return copies, others


def overlapped(one: tuple[float, float], others: Sequence[tuple[float, float]]) -> float:
    """Return for how long some other span covers this one."""
    covered, reached = 0.0, one[0]
    for begin, end in sorted(others):
        begin, end = max(begin, reached), min(end, one[1])
        if end > begin:
            covered, reached = covered + end - begin, end
    return covered


def waits(pace: str) -> dict[str, Any]:
    """Count operations in a step that let the script wait for the device."""
    import torch

    step = large_step(pace)
    if "laggard" in sys.modules:
        import laggard

        laggard.take_synchronizations()
        step()
        mine = threading.get_ident()
        found = [s.reason for s in laggard.take_synchronizations() if s.thread == mine]
        return {"waits": found}
    if torch.accelerator.current_accelerator().type != "cuda":
        return {"skipped": "only CUDA and laggard count waits"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        step()
        torch.cuda.set_sync_debug_mode("default")
    return {"waits": [str(warning.message) for warning in caught]}


def work(trials: list[str]) -> None:
    """Be one worker: do all trials, and print a line for each."""
    import torch

    import paceline as pl
    from paceline.errors import ConfigError, UsageError

    torch.set_num_threads(1)
    pl.init()
    actions = {"train": train, "overlap": overlap, "waits": waits}
    for trial in trials:
        kind, _, pace = trial.partition(" ")
        tell({"begins": trial})
        try:
            found = actions[kind](pace)
        except (ConfigError, UsageError) as error:  # refused on all workers alike
            found = {"refused": str(error)}
        tell({"trial": trial, **found})
        pl.world().barrier()


def tell(thing: dict[str, Any]) -> None:
    import paceline as pl

    if pl.rank() == 0:
        print(f"FOUND {json.dumps(thing)}", flush=True)


# -- the report -----------------------------------------------------------------------------------


def run_trials(trials: list[str], devices: str, load: str) -> dict[str, dict[str, Any]]:
    """Run trials in two jobs: with a parameter server and without."""
    served = [trial for trial in trials if trial.partition(" ")[2] in SERVED]
    others = [trial for trial in trials if trial not in served]
    return run_job(served, 1, devices, load) | run_job(others, 0, devices, load)


def run_job(trials: list[str], servers: int, devices: str, load: str) -> dict[str, dict[str, Any]]:
    """Run trials in a job of two workers; the rest of a job that ended early has another."""
    results: dict[str, dict[str, Any]] = {}
    left = list(trials)
    while left:
        command = [sys.executable, "-m", "paceline", "run", "-n", "2", "-s", str(servers)]
        command += ["--devices", devices, __file__, "--load", load, "--work", *left]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
            output, errors, why = ended.stdout, ended.stderr, f"ended with {ended.returncode}"
        except subprocess.TimeoutExpired as late:
            output, errors = _text(late.stdout), _text(late.stderr)
            why = f"no end within {LIMIT_S} s"
        current = left[0]
        for line in output.splitlines():
            if "FOUND " not in line:
                continue
            found = json.loads(line.partition("FOUND ")[2])
            current = found.get("begins", current)
            if "trial" in found:
                results[found["trial"]] = found
        left = [trial for trial in left if trial not in results]
        if left:
            last = [line for line in errors.splitlines() if line.strip()][-3:]
            results[current] = {"error": f"{why}: {' / '.join(last)}"}
            left = [trial for trial in left if trial != current]
    return results


def _text(output: Any) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def verdict(pace: str, there: dict[str, Any], here: dict[str, Any]) -> tuple[str, str]:
    """Return "ok", "WRONG" or another word, and the detail, for one pace."""
    if "losses" not in there:
        return ("refused", there["refused"]) if "refused" in there else ("FAILED", there["error"])
    losses, step = there["losses"], f"{there['step_ms']:.1f} ms per step on {there['device']}"
    if not all(loss == loss and abs(loss) < 1e6 for loss in losses):
        return "WRONG", f"losses are not finite; {step}"
    if pace in EXACT:
        if "losses" not in here:
            return "FAILED", f"on the CPU: {here.get('error') or here.get('refused')}"
        worst = max(abs(a - b) / abs(b) for a, b in zip(losses, here["losses"], strict=True))
        word = "ok" if worst <= TOLERANCE else "WRONG"
        return word, f"losses differ from the CPU's by {worst:.1e} at most; {step}"
    word = "ok" if losses[-1] < losses[0] else "WRONG"
    return word, f"loss {losses[0]:.3f} to {losses[-1]:.3f}; {step}"


def bus() -> str:
    """Return the speed of the bus, if nvidia-smi knows it."""
    fields = "pcie.link.gen.current,pcie.link.width.current"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.split(
            "\n"
        )
        generation, width = (int(word) for word in found[0].split(","))
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired):
        return "unknown"
    gb_s = 0.25 * 2 ** (generation - 1) * width * (0.985 if generation >= 3 else 0.8) / 0.985
    return f"PCIe {generation} x{width}, about {gb_s:.1f} GB/s in each direction"


def doctor(load: str) -> list[str]:
    """Return the lines of `paceline doctor --device`'s own part."""
    code = f"import importlib; {load and f'importlib.import_module({load!r});'}"
    code += "from paceline.cli import device_check; device_check.main()"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=180
    )
    lines = [line.split("\t") for line in ended.stdout.splitlines()]
    found = [f"- {name.removeprefix('!')}: {what}" for name, what, _ in lines]
    if ended.returncode:
        found.append(f"- FAILED: {ended.stderr.strip().splitlines()[-1]}")
    return found


def report(devices: str, load: str) -> int:
    """Print the report; return 1 if something is wrong."""
    import torch

    import paceline as pl

    began_s = time.monotonic()
    print(f"# Device check: paceline {pl.__version__}, torch {torch.__version__}\n")
    print(f"- python {platform.python_version()}, {platform.system()} {platform.machine()}")
    print("\n".join(doctor(load)))
    print(f"- bus: {bus()}\n\n| trial | result | detail |\n|---|---|---|", flush=True)
    trials = [f"train {pace}" for pace in (*EXACT, *FREE)]
    extra = [] if devices == "cpu" else ["overlap allreduce[via=host]", "waits allreduce[via=host]"]
    there = run_trials([*trials, *extra], devices, load)
    here = there if devices == "cpu" else run_trials(trials[: len(EXACT)], "cpu", load)
    words = []
    for trial in trials:
        pace = trial.partition(" ")[2]
        word, detail = verdict(pace, there[trial], here.get(trial, {}))
        words.append(word)
        print(f"| {pace} | {word} | {detail} |", flush=True)
    for trial in extra:
        word, detail = _figure(there[trial])
        words.append(word)
        print(f"| {trial} | {word} | {detail} |")
    bad = [word for word in words if word in ("WRONG", "FAILED")]
    end = "everything is right" if not bad else f"{len(bad)} trials are wrong"
    print(f"\n{end}, {words.count('refused')} refused, {time.monotonic() - began_s:.0f} s")
    return 1 if bad else 0


def _figure(found: dict[str, Any]) -> tuple[str, str]:
    if "error" in found or "refused" in found:
        return "FAILED", found.get("error") or found["refused"]
    if "skipped" in found:
        return "skipped", found["skipped"]
    if "waits" in found:
        return ("ok" if not found["waits"] else "WRONG"), "; ".join(found["waits"]) or "no wait"
    word = "ok" if found["hidden"] > 0.5 else "look"
    share = f"{100 * found['hidden']:.0f} % of {found['copies']} copies"
    return word, f"{share}, {found['copy_ms']:.1f} ms, run beside kernels"


def choose_devices(load: str) -> str:
    """Return two devices of this machine, or the only one twice."""
    import torch

    if load:
        importlib.import_module(load)
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        sys.exit("gpu_check.py: PyTorch finds no accelerator here; --devices cpu checks the script")
    return f"{found.type}:{'0,1' if torch.accelerator.device_count() > 1 else '0,0'}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Check Paceline on an accelerator.")
    parser.add_argument("--devices", help="as in `paceline run`, for two workers")
    parser.add_argument("--load", default="", help="a module that registers the device")
    parser.add_argument("--work", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        if options.load:
            importlib.import_module(options.load)
        work(options.work)
        return 0
    if options.load == "laggard":
        found = str(Path(__file__).resolve().parents[1] / "testing" / "laggard")
        sys.path.insert(0, found)
        os.environ["PYTHONPATH"] = os.pathsep.join([found, os.environ.get("PYTHONPATH", "")])
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("PACELINE_LOG_DIR", "none")
    return report(options.devices or choose_devices(options.load), options.load)


if __name__ == "__main__":
    sys.exit(main())
