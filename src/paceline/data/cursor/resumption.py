"""Where the data is between two steps, for checkpoints; and how another run goes on from there.

Each worker tells its own STATE: the loops of pl.steps and pl.epochs, and for every loader how many
passes have begun and what is left of those under way. In lockstep the states say the same; where
everybody runs free, workers may be at different batches. A run with as many workers takes them over
by number. Any other run takes the state of the SLOWEST: nothing is left out, and in lockstep
nothing comes again; else what the others had done beyond it comes again.

The script of a resumed run begins at its top. Loops and passes that are over give nothing, and the
rest goes on from there (ledger.py), as for a newcomer of an elastic job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.data.cursor.ledger import ledger_of
from paceline.errors import DataError
from paceline.runtime.job import Job
from paceline.state import protocol

FORMAT = 1

State = Mapping[str, Any]


def data_state(job: Job) -> dict[str, Any]:
    """Return where this worker's data is, as plain data (JSON). To be called between two steps: all
    batches that were handed out have counted. Not collective."""
    number, workers = job.env.number, len(job.fabric.membership.workers)
    ledger = ledger_of(job)
    state = ledger.state().counts
    lines = {key: line for key, line in state["lines"].items() if not ledger.is_gone(key)}
    return {"format": FORMAT, "workers": workers, "number": number, **state, "lines": lines}


def resume_data(job: Job, states: Sequence[State], *, is_lockstep: bool) -> list[str]:
    """Go on from a checkpoint: `states` are those of all workers of the run that made it, in the
    order of their numbers. To be called on every worker before any loop begins. Returns what there
    is to say about it, in lines. Not collective; DataError where the states cannot be continued,
    and later from pl.shard where a loader is not what it was."""
    if job.elastic.is_candidate:
        return []  # hears from the others
    _require_whole(states)
    workers = len(job.fabric.membership.workers)
    is_same = workers == len(states)
    positions = _positions(states)
    slowest = states[positions.index(min(positions))]
    are_apart = any(position != positions[0] for position in positions)
    chosen = dict(states[_place_of(job)] if is_same else slowest)
    if are_apart or not is_same:
        chosen = _mapped(chosen, states, workers)
    how = {"is_same": is_same, "is_alone": are_apart and is_same}
    ledger_of(job).load(protocol.State({**chosen, **how}), None)
    return _said(chosen, states, workers, is_lockstep=is_lockstep)


def _require_whole(states: Sequence[State]) -> None:
    if not states:
        raise DataError("the checkpoint has the data of no worker; expected that of at least one")
    for place, state in enumerate(states):
        found = state.get("format")
        if found != FORMAT:
            raise DataError(
                f"the data of worker {place} in the checkpoint has format {found!r}, expected"
                f" {FORMAT}; use the version of Paceline that made it, or a newer one"
            )
        if state["workers"] != len(states):
            raise DataError(
                f"the checkpoint was made by {state['workers']} workers, but has the data of"
                f" {len(states)}; it is not complete"
            )


def _place_of(job: Job) -> int:
    """Return this worker's place among the workers, which are ordered by number."""
    return job.fabric.membership.workers.index(job.env.rank)


def _positions(states: Sequence[State]) -> list[list[tuple[int, int]]]:
    """Return how far each worker was with the loaders that all of them still had."""
    keys = sorted(set.intersection(*(set(state["lines"]) for state in states)))
    return [[_progress(state["lines"][key]) for key in keys] for state in states]


def _progress(line: State) -> tuple[int, int]:
    """Return the pass that a line is in, and the batch."""
    if line["open"]:
        index, passage = line["open"][0]
        return index, passage["batch"]
    return line["passes"], 0


def _mapped(chosen: dict[str, Any], states: Sequence[State], workers: int) -> dict[str, Any]:
    """Return a state that knows of each sampler what any worker had been told; for another number
    of workers, where each of them begins, and how much of what others had done comes again."""
    is_same, lines = workers == len(states), {}
    for key, line in chosen["lines"].items():
        passages = []
        for index, passage in line["open"]:
            order = _longest(passage["order"], key, index, states)
            batch, again = passage["batch"], 0
            if not is_same:
                batch = _first_batch(passage, len(states), workers)
                again = 0 if _is_own(passage) else _again(key, index, batch, states)
            counts = {**passage["counts"], "repeated": again}
            told = {**passage, "batch": batch, "order": order, "counts": counts}
            passages.append([index, told])
        lines[key] = {**line, "open": passages}
    return {**chosen, "lines": lines}


def _first_batch(passage: State, before: int, now: int) -> int:
    """Return the batch with which each worker goes on, if there were others before."""
    batch: int = passage["batch"]
    if _is_own(passage):
        return batch * before // now
    return batch if passage["course"] else 0  # nobody knows what each of them had


def _is_own(passage: State) -> bool:
    return bool(passage["facts"].get("presharded"))


def _longest(mine: Any, key: str, index: int, states: Sequence[State]) -> Any:
    if mine is None:
        return None
    lines = [state["lines"][key] for state in states if key in state["lines"]]
    found = [p["order"] for line in lines for i, p in line["open"] if i == index and p["order"]]
    best = max(found, key=lambda order: order["start"] + len(order["kept"]))
    draws = next((order["draws"] for order in found if order["draws"]), None)
    missing = max(0, best["start"] - mine["start"])
    kept = [*mine["kept"][:missing], *best["kept"]] if missing else best["kept"]
    return {**best, "start": best["start"] - missing, "kept": kept, "draws": draws}


def _said(chosen: State, states: Sequence[State], workers: int, *, is_lockstep: bool) -> list[str]:
    is_same, lines = workers == len(states), list[str]()
    under_way = [
        (key, passage) for key, line in chosen["lines"].items() for _, passage in line["open"]
    ]
    if is_same:
        return lines
    if not under_way:
        return [f"data: {len(states)} -> {workers} workers, between two epochs"]
    for key, passage in under_way:
        lines.append(
            f"data: {len(states)} -> {workers} workers in the middle of epoch"
            f" {passage['epoch']} ({key}): {_how(passage)}"
        )
        again = passage["counts"]["repeated"]
        if again and passage["course"]:
            why = "they" if is_lockstep else "at this pace they"
            lines.append(
                f"data: {key}: the workers were at different batches, as {why} may be; goes on from"
                f" the slowest, so that at most {again:,} samples come again"
            )
    return lines


def _how(passage: State) -> str:
    if _is_own(passage):
        return (
            f"each worker leaves out {passage['batch']} batches of its own data; which samples that"
            " leaves out or repeats is up to the loader (presharded=True)"
        )
    if not passage["course"]:
        again = passage["counts"]["repeated"]
        return (
            "each had data of its own, which is shared out anew from the beginning of the epoch;"
            f" nothing is left out, and at most {again:,} samples come again"
        )
    return f"what is left behind batch {passage['batch']} is cut among them"


def _again(key: str, index: int, batch: int, states: Sequence[State]) -> int:
    """Return how many samples the workers had beyond a batch, at most."""
    total = 0
    for state in states:
        line = state["lines"].get(key)
        if line is None:
            continue
        had = [(i, p["batch"], p["counts"]["largest"]) for i, p in line["open"]]
        had += [tuple(line["ended"])] if line["ended"] else []
        for i, batches, largest in had:
            if i >= index:
                total += (batches - (batch if i == index else 0)) * largest
    return total
