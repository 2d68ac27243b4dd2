"""Where the data is between two steps, for checkpoints; and how another run continues from there.

Each worker saves its own STATE: the loops of pl.steps and pl.epochs, and for every loader how many
passes have begun and what remains of those under way. In lockstep all states are equal; at a
free-running pace the workers may be at different batches. A run with as many workers assigns the
states by number. Any other run uses the state of the SLOWEST worker: no sample is left out. In
lockstep no sample is repeated; otherwise, what the other workers had done beyond it is repeated.

The script of a resumed run starts at its top. Loops and passes that are over yield nothing, and the
rest continues from the checkpoint (progress.py), as on a newcomer of an elastic job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.data.cursor.progress import data_progress_of
from paceline.errors import DataError
from paceline.runtime.job import Job
from paceline.state import protocol

FORMAT = 1

State = Mapping[str, Any]


def data_state(job: Job) -> dict[str, Any]:
    """Return the position of this worker's data as plain data (JSON). Call it between two steps,
    when all batches that were handed out have counted. Not collective."""
    number, workers = job.env.number, len(job.fabric.membership.workers)
    progress = data_progress_of(job)
    state = progress.state().counts
    lines = {key: one for key, one in state["lines"].items() if not progress.is_gone(key)}
    return {"format": FORMAT, "workers": workers, "number": number, **state, "lines": lines}


def resume_data(job: Job, states: Sequence[State], *, is_lockstep: bool) -> list[str]:
    """Continue from a checkpoint, given the states of all workers that saved it, by number. Call it
    on every worker before any loop begins. Returns lines to log. Not collective. Raises DataError
    if the states cannot be continued; pl.shard raises it later if a loader differs."""
    if job.elastic.is_joining:
        return []  # it receives the state of a peer
    _require_complete(states)
    workers = len(job.fabric.membership.workers)
    has_same_world_size = workers == len(states)
    positions = _positions(states)
    slowest = states[positions.index(min(positions))]
    are_apart = any(position != positions[0] for position in positions)
    chosen = dict(states[_index_of(job)] if has_same_world_size else slowest)
    if are_apart or not has_same_world_size:
        chosen = _mapped(chosen, states, workers)
    origin = {"is_same": has_same_world_size, "is_alone": are_apart and has_same_world_size}
    data_progress_of(job).load(protocol.State({**chosen, **origin}), None)
    return _messages(chosen, states, workers, is_lockstep=is_lockstep)


def _require_complete(states: Sequence[State]) -> None:
    if not states:
        raise DataError(
            "the checkpoint has the data state of 0 workers, expected at least 1; resume from"
            " another checkpoint"
        )
    for number, state in enumerate(states):
        found = state.get("format")
        if found != FORMAT:
            raise DataError(
                f"the data state of worker {number} in the checkpoint has format {found!r},"
                f" expected {FORMAT}; use the version of Paceline that saved it, or a newer one"
            )
        if state["workers"] != len(states):
            raise DataError(
                f"the checkpoint was saved by {state['workers']} workers, but has the data states"
                f" of {len(states)}: it is incomplete; resume from another checkpoint"
            )


def _index_of(job: Job) -> int:
    """Return this worker's index among the workers, ordered by number."""
    return job.fabric.membership.workers.index(job.env.rank)


def _positions(states: Sequence[State]) -> list[list[tuple[int, int]]]:
    """Return the progress of each worker in the loaders that all of them still had."""
    keys = sorted(set.intersection(*(set(state["lines"]) for state in states)))
    return [[_progress(state["lines"][key]) for key in keys] for state in states]


def _progress(loader: State) -> tuple[int, int]:
    """Return the current pass and batch of a loader."""
    if loader["open"]:
        index, one_pass = loader["open"][0]
        return index, one_pass["batch"]
    return loader["passes"], 0


def _mapped(chosen: dict[str, Any], states: Sequence[State], workers: int) -> dict[str, Any]:
    """Return a state in which each sampler has all indices that any worker had received. For
    another number of workers, also set the batch that each starts with, and how many samples are
    repeated."""
    has_same_world_size, lines = workers == len(states), {}
    for key, loader in chosen["lines"].items():
        passes = []
        for index, one_pass in loader["open"]:
            order = _longest_order(one_pass["order"], key, index, states)
            batch, again = one_pass["batch"], 0
            if not has_same_world_size:
                batch = _first_batch(one_pass, len(states), workers)
                again = 0 if _is_own(one_pass) else _num_repeated(key, index, batch, states)
            counts = {**one_pass["counts"], "repeated": again}
            changed = {"batch": batch, "order": order, "counts": counts}
            passes.append([index, {**one_pass, **changed}])
        lines[key] = {**loader, "open": passes}
    return {**chosen, "lines": lines}


def _first_batch(one_pass: State, before: int, now: int) -> int:
    """Return the batch with which each worker continues, after a change of their number."""
    batch: int = one_pass["batch"]
    if _is_own(one_pass):
        return batch * before // now
    return batch if one_pass["course"] else 0  # which samples each worker had is not known


def _is_own(one_pass: State) -> bool:
    return bool(one_pass["facts"].get("presharded"))


def _longest_order(mine: Any, key: str, index: int, states: Sequence[State]) -> Any:
    if mine is None:
        return None
    loaders = [state["lines"][key] for state in states if key in state["lines"]]
    found = [p["order"] for one in loaders for i, p in one["open"] if i == index and p["order"]]
    best = max(found, key=lambda order: order["start"] + len(order["kept"]))
    draws = next((order["draws"] for order in found if order["draws"]), None)
    missing = max(0, best["start"] - mine["start"])
    kept = [*mine["kept"][:missing], *best["kept"]] if missing else best["kept"]
    return {**best, "start": best["start"] - missing, "kept": kept, "draws": draws}


def _messages(
    chosen: State, states: Sequence[State], workers: int, *, is_lockstep: bool
) -> list[str]:
    has_same_world_size, lines = workers == len(states), list[str]()
    under_way = [
        (key, one_pass) for key, loader in chosen["lines"].items() for _, one_pass in loader["open"]
    ]
    if has_same_world_size:
        return lines
    if not under_way:
        return [f"data: {len(states)} -> {workers} workers, between two epochs"]
    for key, one_pass in under_way:
        lines.append(
            f"data: {len(states)} -> {workers} workers in the middle of epoch"
            f" {one_pass['epoch']} ({key}): {_describe(one_pass)}"
        )
        again = one_pass["counts"]["repeated"]
        if again and one_pass["course"]:
            why = "they" if is_lockstep else "at this pace they"
            lines.append(
                f"data: {key}: the workers were at different batches, as {why} may be; resuming"
                f" from the slowest, so that at most {again:,} samples are repeated"
            )
    return lines


def _describe(one_pass: State) -> str:
    if _is_own(one_pass):
        return (
            f"each worker skips {one_pass['batch']} batches of its own data; which samples that"
            " leaves out or repeats depends on the loader (presharded=True)"
        )
    if not one_pass["course"]:
        again = one_pass["counts"]["repeated"]
        return (
            "each had data of its own, which is divided again from the beginning of the epoch;"
            f" no sample is left out, and at most {again:,} samples are repeated"
        )
    return f"the data after batch {one_pass['batch']} is split among them"


def _num_repeated(key: str, index: int, batch: int, states: Sequence[State]) -> int:
    """Return an upper bound of the samples that the workers had beyond a batch."""
    total = 0
    for state in states:
        loader = state["lines"].get(key)
        if loader is None:
            continue
        had = [(i, p["batch"], p["counts"]["largest"]) for i, p in loader["open"]]
        had += [tuple(loader["ended"])] if loader["ended"] else []
        for i, batches, largest in had:
            if i >= index:
                total += (batches - (batch if i == index else 0)) * largest
    return total
