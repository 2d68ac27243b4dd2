"""The planner's predictions beside measurements: step times, intervals, rank order, regret.

    sudo python bench/planner.py --seconds 280      measure the next part; again until all is done
    python bench/planner.py --report                tables from what has been measured so far
    python bench/planner.py --fit                   constants from the calibration configurations

bench/planner_runs/split.json fixes the configurations, and which of them calibrate: it was written
before anything was measured. Each worker has a network namespace of its own, a link shaped with
tbf, and a server beside it.

The rule of a series: all configurations, profiles and links are measured three times, in rounds
over the whole list, and the median counts. A result during which other programs or machines took
more than 5 % of the processors does not count and is measured again (it stays in the file, as
"disturbed"). Nothing else is left out. Results are kept in bench/planner_runs/measured.json after
each job, so that the measurement can be stopped and resumed. `--file` names another series,
`--only` chooses configurations by a part of their names.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from harness.namespaces import can_shape
from harness.other_load import MOST_OTHERS, OtherLoad, wait_until_alone
from harness.report import machine
from harness.switch import Switch
from pace_runs.jobs import _end, on_hosts
from planner_runs import score

from paceline.cli.planning.profiling import measure_script
from paceline.planner.cluster import WIRE_CPU_S_PER_BYTE
from paceline.planner.copy_rate import copy_bytes_per_s
from paceline.planner.step_costs import ON_MEASURED_LINKS

RUNS = Path(__file__).resolve().parent / "planner_runs"
TRAIN = RUNS / "train.py"
MEASURED = RUNS / "measured.json"
_JOB_S = 150.0  # a job that takes longer has failed
_TURN_S = 2.0
_PATIENCE_S = 5.0  # before each job, for a moment without other programs

State = dict[str, Any]
Configs = Sequence[Mapping[str, Any]]


def load(file: Path) -> tuple[list[Mapping[str, Any]], State]:
    configs = json.loads((RUNS / "split.json").read_text(encoding="utf-8"))["configurations"]
    empty: State = {"profiles": {}, "links": {}, "measured": {}, "failed": {}, "cores": 2}
    if file.is_file():
        return configs, json.loads(file.read_text(encoding="utf-8"))
    return configs, empty


def measure(file: Path, seconds: float, rounds: int, only: str) -> None:
    """Measure what is missing, job by job, until the time is used up."""
    configs, state = load(file)
    configs = [one for one in configs if only in one["id"]]
    until_s = time.monotonic() + seconds
    os.environ["PLANNER_BENCH"] = str(os.getpid())
    scratch = Path(tempfile.mkdtemp(prefix="planner-"))

    def keep() -> None:
        text = json.dumps(state, indent=1, sort_keys=True)
        file.write_text(text + "\n", encoding="utf-8")

    try:
        if "copy_bytes_per_s" not in state:
            state.update(copy_bytes_per_s=copy_bytes_per_s(), cores=os.cpu_count())
            state["machine"] = machine()
        settings = sorted({(c["model"], c["workers"], c["link_mbit"]) for c in configs})
        while any(_counted(state, one) < rounds for one in configs):
            turn = min(_counted(state, one) for one in configs)
            for setting in settings:
                if time.monotonic() > until_s:
                    return
                _measure_setting(configs, state, scratch, setting, turn)
                keep()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        done = sum(_counted(state, one) >= rounds for one in configs)
        print(f"{done} of {len(configs)} configurations are measured {rounds} times", flush=True)


def _counted(state: State, config: Mapping[str, Any]) -> int:
    if config["id"] in state["failed"]:
        return 10**9
    return len(state["measured"].get(config["id"], []))


def _measure_setting(
    configs: Configs, state: State, scratch: Path, setting: tuple[str, int, int], turn: int
) -> None:
    model, workers, link = setting
    wanted = [
        one
        for one in configs
        if (one["model"], one["workers"], one["link_mbit"]) == setting
        and _counted(state, one) <= turn
    ]
    if not wanted:
        return
    compute_s = _profiled(state, scratch, model, workers, turn)
    if compute_s is None:  # a slow worker is one that takes so many times as long
        wanted = [one for one in wanted if not one["slow"]]
    with Switch(workers) as switch:
        if link:
            switch.shape(link)
        if len(state["links"].setdefault(str(link), [])) <= turn:
            _probe(switch, state, scratch, link)
        # Jobs with servers and without: a pace without servers must not have idle ones beside it.
        for has_servers in (False, True):
            jobs = [
                {**one, "compute_s": compute_s, "turn_s": _TURN_S}
                for one in wanted
                if (one["pace"].split(":")[0] in ("ps", "ssp", "async")) == has_servers
            ]
            if jobs:
                wait_until_alone(os.getpid(), _PATIENCE_S)
                _run(switch, scratch, state, model, jobs, workers if has_servers else 0)


def _profiled(state: State, scratch: Path, model: str, workers: int, turn: int) -> float | None:
    """Return a step's computation in the profile of a round; None if others disturbed it."""
    key = f"{model} {workers}"
    profiles = state["profiles"].setdefault(key, [])
    while len(profiles) <= turn:  # also of earlier rounds in which others disturbed it
        os.environ["PYTHONPATH"] = str(TRAIN.parent.parent)
        wait_until_alone(os.getpid(), _PATIENCE_S)
        others = OtherLoad(os.getpid())
        copies = scratch / secrets.token_hex(4)
        found = measure_script([str(TRAIN), model], copies, copies=workers, threads=1)
        share = others.share()
        print(f"profile of {key}: {found.compute_s * 1e3:.1f} ms, others {share:.1%}", flush=True)
        if share > MOST_OTHERS:
            return None
        profiles.append(msgspec.to_builtins(found))
    return float(profiles[turn]["forward_s"] + profiles[turn]["backward_s"])


def _probe(switch: Switch, state: State, scratch: Path, link: int) -> None:
    out = scratch / f"link-{link}.json"
    _finish(
        on_hosts(switch, scratch, 0)(
            ["-m", "paceline.cli.planning.link_probe", str(out)], _log(scratch)
        )
    )
    first = json.loads(out.read_text(encoding="utf-8"))[0]
    state["links"][str(link)].append(first[2:4])
    print(f"link {link or 'unshaped'}: {first[2] * 8e-6:.0f} Mbit/s, {first[3] * 1e6:.0f} us")


def _run(
    switch: Switch,
    scratch: Path,
    state: State,
    model: str,
    jobs: Sequence[Mapping[str, Any]],
    servers: int,
) -> None:
    plan, out = scratch / "plan", scratch / "out"
    plan.write_text("".join(json.dumps(job) + "\n" for job in jobs), encoding="utf-8")
    out.unlink(missing_ok=True)
    arguments = [str(TRAIN), model, str(plan), str(out)]
    problem = _finish(on_hosts(switch, scratch, servers)(arguments, _log(scratch)))
    lines = out.read_text(encoding="utf-8").splitlines() if out.is_file() else []
    for line in lines:
        found = json.loads(line)
        kind = "disturbed" if found["others"] > MOST_OTHERS else "measured"
        state.setdefault(kind, {}).setdefault(found["id"], []).append(found)
        print(
            f"  {found['id']:60} {found['step_s'] * 1e3:9.1f} ms, others {found['others']:.1%}",
            flush=True,
        )
    done = {json.loads(line)["id"] for line in lines}
    if problem and len(done) < len(jobs):
        failed = next(job["id"] for job in jobs if job["id"] not in done)
        printed = _log(scratch).read_text(encoding="utf-8", errors="replace")[-1500:]
        state["failed"][failed] = problem
        print(f"  {failed}: {problem}\n{printed}", flush=True)


def _log(scratch: Path) -> Path:
    return scratch / "log"


def _finish(processes: Sequence[Any]) -> str:
    """Wait for the workers of a job; return what went wrong."""
    give_up_s = time.monotonic() + _JOB_S
    try:
        while any(one.poll() is None for one in processes):
            if any(one.poll() for one in processes):
                return "a process failed"
            if time.monotonic() > give_up_s:
                return f"no end after {_JOB_S:.0f} s"
            time.sleep(0.05)
        return "a process failed" if any(one.returncode for one in processes) else ""
    finally:
        _end(processes)


def show(file: Path, fits: bool) -> None:
    """Print both tables with the planner's constants; `fits`: fit them, calibration table only."""
    configs, state = load(file)
    state = score.medians(state)
    seen = set(json.loads((RUNS / "seen.json").read_text(encoding="utf-8"))["seen"])
    calibration = [one for one in configs if one["use"] == "calibration"]
    held_out = [one for one in configs if one["use"] == "held-out"]
    if fits:  # without the held-out table: the model is not finished yet
        constants, wire = score.fit(configs, state)
        print(constants, f"wire_cpu_s_per_byte={wire:g}")
        scored = score.score(calibration, state, constants, wire)
        print(score.report(scored, "calibration configurations, fitted"))
        return
    constants, wire = ON_MEASURED_LINKS, WIRE_CPU_S_PER_BYTE
    unseen = [one for one in held_out if one["id"] not in seen]
    for title, chosen in (
        ("calibration configurations", calibration),
        ("held-out configurations", held_out),
        ("held-out configurations, without those seen before (seen.json)", unseen),
        ("all configurations", configs),
    ):
        print(score.report(score.score(chosen, state, constants, wire), title))
    missing = [one["id"] for one in configs if one["id"] not in state["measured"]]
    print(f"\nnot measured: {len(missing)} of {len(configs)} {missing}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=280.0, help="start no job after this")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="a part of the names of configurations")
    parser.add_argument("--file", type=Path, default=MEASURED, help="the series")
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--fit", action="store_true")
    options = parser.parse_args()
    if options.report or options.fit:
        show(options.file, options.fit)
        return
    if why := can_shape():
        raise SystemExit(f"planner: links cannot be shaped here: {why}")
    measure(options.file, options.seconds, options.rounds, options.only)


if __name__ == "__main__":
    main()
