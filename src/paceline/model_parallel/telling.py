"""What a person is told of a model in parts."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.model_parallel.meshed import Meshed


def describe(meshed: Meshed) -> Iterator[str]:
    """Say how the model is cut, in lines."""
    cut, mesh = meshed.cut, meshed.unit.mesh
    here = sum(held.param.numel() for _, held in cut.holding)
    whole = cut.num_elements
    yield (
        f"mesh {mesh}: the first process holds {here:,} of {whole:,} parameters"
        f" ({100 * here / max(whole, 1):.0f} %)"
    )
    if cut.starts:
        yield f"stages begin at {', '.join(['the inputs', *cut.starts])}"
    if cut.plan is not None:
        yield f"tensor plan\n{cut.plan.table()}"
