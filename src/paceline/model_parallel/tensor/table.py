"""The plan as people read it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from paceline.model_parallel.tensor.plan import Replicated, Row, TensorPlan

WIDTH = 100
AnyRow = TypeVar("AnyRow", "Row", "Replicated")


def table_of(plan: TensorPlan) -> str:
    """Return a table: cut modules, those that stay whole, sums. Equal layers share a line."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, title=f"tensor parallel, tp={plan.tp}", title_justify="left")
    table.add_column("module", overflow="fold", ratio=3)
    table.add_column("style", overflow="fold", ratio=4)
    for head in ("whole", "per rank", "forward", "backward"):
        table.add_column(head, justify="right", no_wrap=True)
    for name, rows in _folded(plan.rows, lambda row: row.style):
        before, after = sum(r.bytes_before for r in rows), sum(r.bytes_after for r in rows)
        table.add_row(name, rows[0].style, size(before), size(after), *_collectives(rows))
    table.add_section()
    for name, wholes in _folded(plan.replicated, lambda row: row.reason):
        num_bytes = sum(one.num_bytes for one in wholes)
        text = f"whole: {wholes[0].reason}"
        table.add_row(name, text, size(num_bytes), size(num_bytes), "", "")
    table.add_section()
    whole = sum(one.num_bytes for one in plan.replicated)
    before = sum(row.bytes_before for row in plan.rows) + whole
    after = sum(row.bytes_after for row in plan.rows) + whole
    table.add_row("all", "", size(before), size(after), *_collectives(plan.rows))
    console = Console(width=WIDTH, color_system=None, force_terminal=False, markup=False)
    with console.capture() as captured:
        console.print(table)
    lines = [line.rstrip() for line in captured.get().splitlines()]
    note = "forward, backward: collectives in one training step; sizes: parameters alone."
    return "\n".join([*lines, note, *([plan.note] if plan.note else [])])


def _collectives(rows: list[Row]) -> list[str]:
    """Return the sums, forward and backward; "?" if one of them is not known."""
    columns = ([row.num_forward for row in rows], [row.num_backward for row in rows])
    return ["?" if None in column else str(sum(n or 0 for n in column)) for column in columns]


def size(num_bytes: float) -> str:
    """Return a number of bytes for people."""
    for unit in ("B", "KB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} GB"


def _folded(rows: Sequence[AnyRow], key: Callable[[AnyRow], str]) -> list[tuple[str, list[AnyRow]]]:
    folded: dict[tuple[str, str], list[AnyRow]] = {}
    for row in rows:
        folded.setdefault((_pattern_of_layer(row.module), key(row)), []).append(row)
    return [(_title(name, [r.module for r in same]), same) for (name, _), same in folded.items()]


def _pattern_of_layer(name: str) -> str:
    """Put `*` for the first number of a name: the number of the layer."""
    steps = name.split(".")
    for place, step in enumerate(steps[:-1]):
        if step.isdigit():
            return ".".join([*steps[:place], "*", *steps[place + 1 :]])
    return name


def _title(key: str, names: list[str]) -> str:
    if len(names) == 1:
        return names[0] or "(the model itself)"
    return f"{key} (x{len(names)})"
