"""Tables about slow workers: throughput, prediction, and time to a loss; and the same as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from servers.stragglers import PACES, TARGET_LOSS, Findings, Learning, Throughputs, median


def show(found: Findings) -> None:
    for title, table in (
        ("4 workers, one steadily 4 x slower", found.steady),
        ("4 workers, each step 4 x as long with a chance of 10 %", found.by_chance),
    ):
        if table:
            _show_throughputs(title, table)
    if found.learnings:
        _show_learning(found.learnings)


def _show_throughputs(title: str, table: Mapping[str, Throughputs]) -> None:
    print(f"\n{title}: steps/s of all workers, {len(table['ps'].measured)} rounds")
    head = f"{'pace':8} {'max':>7} {'median':>7}  {'x ps':>6}  {'predicted':>9} {'x ps':>6}"
    print(f"{head}  {'measured / predicted':>20}  {'/ as slept':>10}   (medians; least)")
    for pace, rates in table.items():
        text = f"{pace:8} {max(rates.measured):7.1f} {median(rates.measured):7.1f}"
        text += f"  {ratio(table, pace):6.2f}  {median(rates.predicted):9.1f}"
        text += f" {predicted_ratio(table, pace):6.2f}"
        shares = rates.shares(rates.predicted)
        text += f"  {median(shares):13.3f} {min(shares):6.3f}"
        print(f"{text}  {median(rates.shares(rates.replayed)):10.3f}", flush=True)


def ratio(table: Mapping[str, Throughputs], pace: str) -> float:
    """Return the median over rounds of the throughput beside that of ps with the same delays."""
    return median(table[pace].shares(table["ps"].measured))


def predicted_ratio(table: Mapping[str, Throughputs], pace: str) -> float:
    pairs = zip(table[pace].predicted, table["ps"].predicted, strict=True)
    return median([mine / theirs for mine, theirs in pairs])


def agreement(table: Mapping[str, Throughputs]) -> str:
    """Return measured against predicted throughput, for each pace."""
    shares = {pace: rates.shares(rates.predicted) for pace, rates in table.items()}
    return ", ".join(f"{pace} {median(found):.3f}" for pace, found in shares.items())


def best(learnings: list[Learning], pace: str) -> Learning | None:
    """Return the training of a pace that reached the target first, if any did."""
    reached = [one for one in learnings if one.pace == pace and one.reached_s is not None]
    return min(reached, key=lambda one: one.reached_s or 0.0, default=None)


def _show_learning(learnings: list[Learning]) -> None:
    rates = sorted({one.rate for one in learnings})
    print(f"\none steadily 4 x slower: seconds to a loss below {TARGET_LOSS} on the digits")
    print(f"{'pace':8} " + " ".join(f"{f'lr {rate:g}':>8}" for rate in rates) + f" {'best':>8}")
    for pace in PACES:
        times = {one.rate: one.reached_s for one in learnings if one.pace == pace}
        winner = best(learnings, pace)
        texts = [_seconds(times[rate]) if rate in times else "-" for rate in rates]
        texts.append(_seconds(winner.reached_s if winner else None))
        print(f"{pace:8} " + " ".join(f"{text:>8}" for text in texts), flush=True)


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.2f}"


def time_to_loss(learnings: list[Learning]) -> str:
    """Compare the paces, each at its best learning rate."""
    reported = []
    for pace in PACES:
        winner = best(learnings, pace)
        at = f" (lr {winner.rate:g})" if winner else ""
        reported.append(f"{pace} {_seconds(winner.reached_s if winner else None)}{at}")
    return ", ".join(reported)


def as_json(found: Findings) -> dict[str, Any]:
    return {
        "version": found.version,
        "steady": {pace: asdict(rates) for pace, rates in found.steady.items()},
        "by_chance": {pace: asdict(rates) for pace, rates in found.by_chance.items()},
        "target_loss": TARGET_LOSS,
        "learnings": [{**asdict(one), "reached_s": one.reached_s} for one in found.learnings],
    }
