"""What the user asks the planner for, and what it cannot do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import UsageError
from paceline.pace.parse import PaceSpec, Schedule
from paceline.pace.registry import KNOWN
from paceline.planner.automatic.policy import require_planned
from paceline.planner.candidates import PLANNED
from paceline.runtime.job import Job


@dataclass(frozen=True)
class AutoRequest:
    """What the user asked for."""

    allow: str = ""  # of pace=auto
    pace: PaceSpec | None = None  # a given pace, of which the budget may choose a variant
    max_wire: float | None = None  # bytes per second of a host

    @property
    def word(self) -> str:
        """What the lines of the planner begin with."""
        return "auto" if self.pace is None else "max-wire"


def refuse_unplanned(
    asked: Schedule, given: Mapping[str, object], job: Job, *, is_own: bool
) -> None:
    """Raise UsageError for what cannot be planned, or contradicts it.

    `is_own`: the script itself chose the pace, so that its keywords are meant for it.
    """
    what = f"pace {asked}" if asked.first.is_auto else "--max-wire"
    if len(asked.phases) > 1:
        raise UsageError(
            f"--max-wire and the schedule {asked}: a budget fits one pace; choose one, or auto"
        )
    if job.mesh is not None and job.mesh.unit_size > 1:
        raise UsageError(
            f"{what} on the mesh {job.mesh}: the planner chooses among paces of models that each"
            " worker has whole; choose a pace, or compare meshes with `paceline plan`"
        )
    if job.device.type != "cpu":
        raise UsageError(
            f"{what} on {job.device}: the cost model covers CPUs only, so a choice would be a"
            " guess; choose a pace with --pace (docs/choosing-a-pace.md)"
        )
    if not asked.first.is_auto:
        require_planned(asked.first)
        return
    if "compress" in given:
        raise UsageError(
            f"compress={given['compress']} contradicts {what}, which chooses the codec; leave out"
            f" compress, or use pace=allreduce with compress={given['compress']}"
        )
    for name in given:
        if is_own and not any(KNOWN[pace].option(name) for pace in PLANNED):
            raise UsageError(
                f"{what}: no pace that can be chosen has an option {name!r}; leave it out"
            )
