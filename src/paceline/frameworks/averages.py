"""Means and broadcasts of plain arrays, in a group of their own: they never meet other operations.

Threads: one at a time for each use; a framework may call from any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from paceline.comm.group import Group
from paceline.errors import UsageError
from paceline.runtime.job import Job, current

_groups: dict[str, tuple[Job, Group]] = {}


def group_for(use: str) -> Group:
    """Return the group of all workers for one use; the first call of a job is collective."""
    job = current()
    known = _groups.get(use)
    if known is None or known[0] is not job:
        _groups[use] = known = (job, job.worker_group(f"frameworks {use}"))
    return known[1]


def mean_into(group: Group, sources: Sequence[np.ndarray], targets: Sequence[np.ndarray]) -> None:
    """Write the means over all workers into `targets`, which may be the sources. Blocks."""
    works = []
    for source, target in zip(sources, targets, strict=True):
        if source.size:
            tensor, out = as_torch(source), as_torch(target)
            works.append(group.all_reduce(tensor, "mean", out=out, async_op=True))
    for work in works:
        work.wait()  # type: ignore[union-attr]


def mean_values(group: Group, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the means of floating-point arrays over all workers, in new memory. Blocks."""
    copies = [np.array(array, order="C") for array in arrays]
    mean_into(group, copies, copies)
    return copies


def broadcast_values(group: Group, arrays: Sequence[np.ndarray], root: int = 0) -> list[np.ndarray]:
    """Return the arrays of `root`, in new memory. Collective, blocks."""
    copies = [np.array(array, order="C") for array in arrays]
    full = [copy for copy in copies if copy.size]
    for work in [group.broadcast(as_torch(copy), root, async_op=True) for copy in full]:
        work.wait()  # type: ignore[union-attr]
    return copies


def as_torch(array: np.ndarray) -> torch.Tensor:
    """Return a tensor over an array's memory; numpy's bfloat16 is that of ml_dtypes.

    Frameworks hand out read-only views. torch would warn about those, so they are unlocked here:
    the caller of this function must not write to what it only borrowed.
    """
    if not array.flags.c_contiguous:
        array = np.ascontiguousarray(array)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(_unlocked(array.view(np.uint16))).view(torch.bfloat16)
    return torch.from_numpy(_unlocked(array))


class _Memory:
    def __init__(self, array: np.ndarray) -> None:
        self.keep = array
        self.__array_interface__ = {
            **array.__array_interface__,
            "data": (array.ctypes.data, False),
        }


def _unlocked(array: np.ndarray) -> np.ndarray:
    return array if array.flags.writeable else np.asarray(_Memory(array))


def require_floating(dtypes: Sequence[Any], what: str) -> None:
    """Raise UsageError for numbers that have no mean."""
    for position, dtype in enumerate(dtypes):
        name = np.dtype(dtype).name
        if np.dtype(dtype).kind != "f" and name != "bfloat16":
            raise UsageError(
                f"{what}: array {position} has dtype {name}, and only floating-point numbers are"
                " averaged; leave it out, or convert it"
            )
