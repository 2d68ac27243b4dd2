"""The parts of bench/paces.py: each starts its jobs, and returns what JSON can keep."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness.switch import Switch

from pace_runs import jobs, plans
from pace_runs.figures import sent_per_step, steps_per_s
from pace_runs.plans import NUM_WORKERS, Sizes
from pace_runs.table import REFERENCE, Row

Part = dict[str, Any]
Lines = Callable[[Row], list[dict[str, Any]]]


def loss(rows: Sequence[Row], sizes: Sizes, seeds: int, scratch: Path) -> Part:
    """Final losses with the same number of samples, 4 workers on this host, nothing delayed."""

    def lines(row: Row) -> list[dict[str, Any]]:
        is_reference = row.label == REFERENCE
        return plans.losses(row, sizes, seeds if is_reference else min(seeds, sizes.pace_seeds))

    reference = next(row for row in rows if row.label == REFERENCE)
    reported = _here(rows, lines, scratch)
    alone = plans.one_process(sizes, seeds, reference)
    told_alone = jobs.carry_out(jobs.alone(), alone, scratch)
    tasks = {}
    for task in plans.BATCHES:
        found = {row.label: _seeds_of(reported, f"{task}/{row.label}/") for row in rows}
        found["one process"] = _seeds_of(told_alone, f"{task}/{REFERENCE}/")
        tasks[task] = found
    steps = {"book": sizes.book_steps, "digits": sizes.digits_steps}
    notes = {row.label: row.note for row in rows if row.note}
    sizes_told = {"steps": steps, "batch": plans.BATCHES, "workers": NUM_WORKERS}
    return {"tasks": tasks, "notes": notes, **sizes_told}


def stragglers(rows: Sequence[Row], sizes: Sizes, scratch: Path) -> Part:
    """Loss over time with one steadily slow worker, and with random stalls."""
    found = {}
    for name, delays in plans.scenarios(sizes).items():
        reported = _here(rows, lambda row, d=delays: [plans.timed(row, sizes, d)], scratch)
        found[name] = _by_label(reported, rows)
    return {"scenarios": found, "sleep_s": sizes.sleep_s, "steps": sizes.timed_steps}


def links(rows: Sequence[Row], sizes: Sizes, rates_mbit: Sequence[int], scratch: Path) -> Part:
    """Loss over time between four hosts, at each rate of their links."""
    rows = [row for row in rows if not row.one_host]
    delays = plans.one_slow(NUM_WORKERS, sizes.sleep_s, 1.0)
    found = {}
    with Switch(NUM_WORKERS) as switch:
        for rate_mbit in rates_mbit:
            switch.shape(rate_mbit)
            reported = {}
            for group in _groups(rows):
                num_servers = 1 if group[0].one_server else NUM_WORKERS
                num_servers = num_servers if group[0].servers else 0
                start = jobs.on_hosts(switch, scratch, num_servers)
                runs = [plans.timed(row, sizes, delays) for row in group]
                reported |= jobs.carry_out(start, runs, scratch)
            found[str(rate_mbit)] = _by_label(reported, rows)
    return {"rates_mbit": found, "sleep_s": sizes.sleep_s, "steps": sizes.timed_steps}


def throughput(rows: Sequence[Row], sizes: Sizes, scratch: Path) -> Part:
    """Steps and bytes on the slowest link, compared with independent processes."""
    rows = [row for row in rows if row.label in plans.STREAMING]
    found: dict[str, list[jobs.Result]] = {row.label: [] for row in rows}
    found["independent"] = []
    with Switch(NUM_WORKERS) as switch:
        switch.shape(min(plans.RATES_MBIT))
        together = jobs.on_hosts(switch, scratch, num_servers=0)
        apart = jobs.independent([switch.enter(host) for host in range(NUM_WORKERS)])
        for number in range(sizes.rounds):
            shift = number % max(1, len(rows))
            in_turn = [*rows[shift:], *rows[:shift]]
            runs = [plans.throughput(row, sizes) for row in in_turn]
            reported = _by_label(jobs.carry_out(together, runs, scratch), rows)
            for label, result in reported.items():
                found[label].append(result)
            place = str(scratch / f"meeting{number}")
            run = plans.throughput(next(r for r in rows if r.label == REFERENCE), sizes, place)
            found["independent"] += jobs.carry_out(apart, [run], scratch).values()
    summaries = {label: _summary(results) for label, results in found.items()}
    return {"rows": summaries, "sleep_s": sizes.throughput_sleep_s, "steps": sizes.throughput_steps}


def _groups(rows: Sequence[Row]) -> list[list[Row]]:
    """Divide by the servers that they need: a job has them or not."""
    kinds = dict.fromkeys((row.servers, row.one_server) for row in rows)
    return [[row for row in rows if (row.servers, row.one_server) == kind] for kind in kinds]


def _here(rows: Sequence[Row], lines: Lines, scratch: Path) -> dict[str, jobs.Result]:
    reported: dict[str, jobs.Result] = {}
    for group in _groups(rows):
        start = jobs.on_this_host(NUM_WORKERS, 1 if group[0].servers else 0)
        reported |= jobs.carry_out(start, [run for row in group for run in lines(row)], scratch)
    return reported


def _seeds_of(reported: dict[str, jobs.Result], begin: str) -> list[jobs.Result]:
    return [result for name, result in reported.items() if name.startswith(begin)]


def _by_label(reported: dict[str, jobs.Result], rows: Sequence[Row]) -> dict[str, jobs.Result]:
    return {row.label: reported[f"book/{row.label}/0"] for row in rows}


def _summary(results: Sequence[jobs.Result]) -> Part:
    """Return the medians over the rounds, of those that did not fail."""
    done = [result for result in results if "failed" not in result]
    if not done:
        return {"failed": results[0]["failed"] if results else "it was not run"}
    return {
        "steps_per_s": statistics.median(steps_per_s(r["steps"], r["s"]) for r in done),
        "sent_per_step": statistics.median(sent_per_step(r["steps"], r["sent"]) for r in done),
        "rounds": [steps_per_s(r["steps"], r["s"]) for r in done],
    }
