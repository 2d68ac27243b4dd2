"""Checks of `--pace auto` and `--max-wire` before any process starts."""

from __future__ import annotations

from paceline.errors import ConfigError
from paceline.pace.parse import Schedule
from paceline.planner.automatic.policy import require_planned
from paceline.planner.quantities import parse_rate
from paceline.runtime.mesh import Mesh


def check_planned(pace: Schedule | None, max_wire: str | None, mesh: Mesh | None) -> None:
    """Refuse what the planner cannot do in a job, before any process starts."""
    if max_wire is not None:
        parse_rate(max_wire, "--max-wire")
        if pace is not None and len(pace.phases) > 1:
            raise ConfigError(
                f"--max-wire and the schedule {pace}: a budget fits one pace; choose one, or auto"
            )
        if pace is not None and not pace.first.is_auto:
            require_planned(pace.first)
    is_planned = max_wire is not None or (pace is not None and pace.first.is_auto)
    if is_planned and mesh is not None and mesh.unit_size > 1:
        what = "--max-wire" if max_wire is not None else f"--pace {pace}"
        raise ConfigError(
            f"{what} and --mesh {mesh}: the planner chooses among paces of models that each worker"
            f" has whole; leave out {what}, or compare meshes with `paceline plan`"
        )
