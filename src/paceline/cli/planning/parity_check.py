"""Compare the first steps of a job with those of one process: what differs first, and why.

Both were recorded by data_parallel/probe/step_record.py. The difference of two tensors is the
largest one of their elements, relative to the largest element. A tensor that is tiny beside the
others of its kind (a bias whose true gradient is 0) holds nothing but rounding, so it is measured
against a hundredth of the largest element of its kind.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

_SMALL = 0.01  # of the largest element of a kind
_KINDS = ("gradient", "parameter", "buffer")
Tensors = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Difference:
    """One thing that differs by more than the tolerance."""

    step: int  # 0: before the first one
    kind: str  # samples, loss, gradient, parameter, buffer or workers
    name: str  # of the tensor
    relative: float = 0.0
    ulp: float = 0.0  # units in the last place
    text: str = ""  # for what is no tensor


@dataclass
class StepResult:
    """One step of both runs."""

    step: int
    loss: float | None = None  # of the job: the weighted mean of its workers
    reference: float | None = None
    worst: dict[str, float] = field(default_factory=dict)  # by kind: the largest difference
    ulp: float = 0.0  # the largest
    differences: list[Difference] = field(default_factory=list)


@dataclass
class Parity:
    """The comparison of two runs."""

    num_workers: int
    facts: dict[str, Any]
    start: list[Difference] = field(default_factory=list)
    steps: list[StepResult] = field(default_factory=list)
    samples: tuple[int, int] = (0, 0)  # of a step: all workers, one process

    @property
    def first(self) -> list[Difference]:
        """What differs in the first step that differs, in the order of its computation."""
        return self.start or next((s.differences for s in self.steps if s.differences), [])


def compare_runs(job: Path, reference: Path, num_workers: int, tolerance: float) -> Parity:
    """Compare two records, as many steps as both have."""
    parity = Parity(num_workers, json.loads((job / "facts.json").read_text(encoding="utf-8")))
    begin, expected = _load(job / "start.npz"), _load(reference / "start.npz")
    parity.start = _tensor_differences(0, begin, expected, tolerance, StepResult(0))
    workers = [_lines(job / f"worker-{rank}.jsonl") for rank in range(num_workers)]
    alone = _lines(reference / "worker-0.jsonl")
    for step in range(1, min(len(alone), *(len(one) for one in workers)) + 1):
        lines = [one[step - 1] for one in workers]
        found = StepResult(step)
        if step == 1:
            parity.samples = (len(_samples(lines)), len(alone[0]["samples"]))
        found.differences += _other_differences(found, lines, alone[step - 1], tolerance)
        name = f"step-{step}.npz"
        found.differences += _tensor_differences(
            step, _load(job / name), _load(reference / name), tolerance, found
        )
        parity.steps.append(found)
    return parity


def _load(path: Path) -> Tensors:
    with np.load(path) as file:
        return {name: file[name] for name in file.files}


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _samples(lines: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the samples of all workers; a batch of weight 0 repeats one of another worker."""
    return [one for line in lines if line["weight"] > 0 for one in line["samples"]]


def _other_differences(
    found: StepResult,
    lines: Sequence[Mapping[str, Any]],
    alone: Mapping[str, Any],
    tolerance: float,
) -> list[Difference]:
    """Return what differs besides tensors: the samples, the loss, the workers among each other."""
    made, step = [], found.step
    mine, others = Counter(_samples(lines)), Counter(alone["samples"])
    missing = (others - mine).total() + (mine - others).total()
    if missing:
        total = max(mine.total(), others.total())
        lost, more = (others - mine).total(), (mine - others).total()
        text = f"{lost} of the {others.total()} samples of one process are not among those of the"
        text += f" workers, and {more} of the {mine.total()} of the workers not among its own"
        made.append(Difference(step, "samples", "", missing / max(total, 1), text=text))
    if alone["loss"] is not None and all(line["loss"] is not None for line in lines):
        found.loss = sum(line["loss"] * line["weight"] for line in lines) / len(lines)
        found.reference = alone["loss"]
        relative = abs(found.loss - found.reference) / max(abs(found.reference), 1e-12)
        if not relative <= tolerance:
            text = f"{found.loss:.7g} against {found.reference:.7g}"
            made.append(Difference(step, "loss", "", relative, text=text))
    for rank, line in enumerate(lines[1:], 1):
        apart = [
            name
            for name, checksum in line["sums"].items()
            if name.startswith("parameter") and checksum != lines[0]["sums"].get(name)
        ]
        if apart:
            text = f"worker {rank} and worker 0 have other values of {apart[0]}"
            made.append(Difference(step, "workers", apart[0], text=text))
            break
    return made


def _tensor_differences(
    step: int, mine: Tensors, others: Tensors, tolerance: float, found: StepResult
) -> list[Difference]:
    made = []
    for kind in _KINDS:
        names = [name for name in others if name.startswith(kind) and name in mine]
        floor = _SMALL * max((_largest(others[name]) for name in names), default=0.0)
        for name in names:
            relative, ulp = _difference(mine[name], others[name], floor)
            found.worst[kind] = max(found.worst.get(kind, 0.0), relative)
            if relative <= tolerance:
                found.ulp = max(found.ulp, ulp)
            else:  # also NaN
                made.append(Difference(step, kind, name.partition(" ")[2], relative, ulp))
    return made


def _largest(values: np.ndarray) -> float:
    return float(np.abs(values.astype(np.float64)).max()) if values.size else 0.0


def _difference(mine: np.ndarray, others: np.ndarray, floor: float) -> tuple[float, float]:
    """Return the largest difference, relative and in units in the last place.

    Both refer to the largest element, or to `floor` if that is larger.
    """
    if mine.shape != others.shape:
        return float("inf"), float("inf")
    if mine.tobytes() == others.tobytes() or not mine.size:
        return 0.0, 0.0
    apart = _largest(mine.astype(np.float64) - others.astype(np.float64))
    size = max(_largest(others), floor)
    is_float = np.issubdtype(others.dtype, np.floating)
    unit = float(np.spacing(others.dtype.type(size))) if is_float and size else 1.0
    return (apart / size if size else float("inf")), apart / unit


def causes(parity: Parity) -> list[str]:
    """Return likely causes of the first difference, those that the record shows first."""
    first, facts, count = parity.first, parity.facts, parity.num_workers
    kinds = {one.kind for one in first}
    if parity.start:
        return [
            "the models differ before the first step: the script draws its initial values from a"
            " seed that depends on the rank or the number of workers; seed alike on all ranks"
        ]
    found = []
    if parity.samples[0] != parity.samples[1]:
        found.append(
            f"unequal batches: the workers had {parity.samples[0]} samples in the first step, one"
            f" process {parity.samples[1]}. Only pl.shard (mode 'shard') can give one process the"
            " global batch; other scripts split the data themselves"
        )
    elif "samples" in kinds:
        found.append(
            "data order: the samples are not the same. The order must come from pl.shard"
            " (shuffle=True of the DataLoader), not from a generator seeded by rank or time;"
            " random augmentations count as other samples, too"
        )
    loss = next((s for s in parity.steps if s.differences), None)
    if loss is not None and loss.loss and loss.reference:
        ratio = loss.reference / loss.loss
        if abs(ratio / count - 1) < 0.05:
            found.append(
                f"loss not a mean: one process has {ratio:.2f} times the loss of {count} workers."
                " Use a mean over the batch (reduction='mean'); gradients of workers are averaged"
            )
    if facts["norms"]:
        found.append(
            f"batch norm: {facts['norms']} module(s) use statistics of each worker's own batch;"
            " pl.distribute(..., batchnorm='global') uses those of the global batch"
        )
    if facts["dropouts"]:
        found.append(
            f"dropout seeds: the model has {facts['dropouts']} dropout module(s), and each worker"
            " draws masks of its own. Compare with p = 0; both runs are right"
        )
    if kinds and kinds <= {"parameter"}:
        found.append(
            f"the optimizer ({facts['optimizer']}): the gradients are equal. Adam and its relatives"
            " divide by the size of the gradient, so rounding of a gradient near 0 becomes a whole"
            " step; compare with SGD"
        )
    return found or [
        "nothing that the record shows. Usual causes: functional dropout or other random numbers in"
        " forward, a loss that is no mean over the batch, state outside of the model, sums in"
        " 16-bit precision"
    ]
