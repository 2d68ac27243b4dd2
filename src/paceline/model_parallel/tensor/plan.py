"""TensorPlan: which modules are cut, and how; made automatically, by hand, or one after the other.

It is a mapping from names of modules to styles that can be edited and given back:

    plan = tensor_plan(model, tp=2, example=(tokens,))
    plan["blocks.0.mix"] = "replicate"
    parallelize(model, device_mesh, plan)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from paceline.errors import UsageError
from paceline.model_parallel.parts.layout import Part
from paceline.model_parallel.tensor.styles import WORDS, Style, cut_class, indivisible
from paceline.runtime.formatting import data_size


@dataclass(frozen=True)
class Row:
    """What becomes of one module; collectives are those of one training step."""

    module: str
    style: str
    bytes_before: int
    bytes_after: int  # on each process
    num_forward: int | None  # None: nobody counts torch's own styles
    num_backward: int | None


@dataclass(frozen=True)
class Replicated:
    """A module whose parameters every process holds whole, and why."""

    module: str
    num_bytes: int
    reason: str


@dataclass
class TensorPlan(MutableMapping[str, Any]):
    """Styles by module. Rows and parts tell of the plan as it was made or carried out."""

    tp: int
    styles: dict[str, Any] = field(default_factory=dict)  # Style, or a ParallelStyle of torch
    rows: list[Row] = field(default_factory=list)
    replicated: list[Replicated] = field(default_factory=list)
    parts: dict[str, Part] = field(default_factory=dict)  # of cut parameters, by their names
    buffer_parts: dict[str, Part] = field(default_factory=dict)  # of cut buffers
    note: str = ""  # what should be known about how it was made

    def __getitem__(self, name: str) -> Any:
        return self.styles[name]

    def __setitem__(self, name: str, style: Any) -> None:
        self.styles[name] = _parsed(name, style)

    def __delitem__(self, name: str) -> None:
        del self.styles[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.styles)

    def __len__(self) -> int:
        return len(self.styles)

    def table(self) -> str:
        """Return the plan as a table of 100 columns."""
        from paceline.model_parallel.tensor.plan import table_of

        return table_of(self)

    def __str__(self) -> str:
        return self.table()


def resolve(model: nn.Module, plan: Mapping[str, Any], tp: int) -> dict[str, Any]:
    """Return the style of each named module; patterns may have `*` for a step of the name."""
    modules, found = dict(model.named_modules()), dict[str, Any]()
    for pattern, given in plan.items():
        style = _parsed(pattern, given)
        names = [name for name in modules if _matches(name, pattern)]
        if not names:
            raise UsageError(
                f"tensor plan: {pattern!r} is no module of the model; its modules are"
                f" {', '.join(list(modules)[1:9])} ..."
            )
        for name in names:
            if isinstance(style, Style) and style.word != "replicate":
                _require(name, modules[name], style, tp)
            _require_torch(name, modules[name], style, tp)
            found[name] = style
    return {n: s for n, s in found.items() if not isinstance(s, Style) or s.word != "replicate"}


def _parsed(name: str, style: Any) -> Any:
    if isinstance(style, (Style, ParallelStyle)):
        return style
    if style in WORDS:
        return Style(style)
    raise UsageError(
        f"tensor plan: {name}: {style!r} is not a style; use a ParallelStyle of torch or one of"
        f" {', '.join(WORDS)}"
    )


def _matches(name: str, pattern: str) -> bool:
    steps, wanted = name.split("."), pattern.split(".")
    pairs = zip(steps, wanted, strict=False)
    return len(steps) == len(wanted) and all(fnmatchcase(s, w) for s, w in pairs)


def _require(name: str, module: nn.Module, style: Style, tp: int) -> None:
    if cut_class(module, style.word) is None:
        raise UsageError(
            f"tensor plan: {name} is a {type(module).__name__}, which has no style"
            f" {style.word!r}; leave it out, or write 'replicate'"
        )
    bad = indivisible(module, style, tp)
    if bad is not None:
        _refuse(name, *bad, tp)


def _require_torch(name: str, module: nn.Module, style: Any, tp: int) -> None:
    """Refuse uneven pieces, which torch would make: every process must hold as much."""
    attribute = {
        ("ColwiseParallel", nn.Linear): ("out_features", "output features (rows)"),
        ("RowwiseParallel", nn.Linear): ("in_features", "input features (columns)"),
        ("ColwiseParallel", nn.Embedding): ("embedding_dim", "features"),
        ("RowwiseParallel", nn.Embedding): ("num_embeddings", "rows"),
    }.get((type(style).__name__, type(module)))
    if attribute is not None and getattr(module, attribute[0]) % tp:
        _refuse(name, getattr(module, attribute[0]), attribute[1], tp)


def _refuse(name: str, size: int, words: str, tp: int) -> None:
    raise UsageError(
        f"tensor plan: {name} has {size} {words}, which do not divide by the axis tp={tp};"
        f" take a tp that divides {size}, change the model's size, or write 'replicate'"
    )


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
        table.add_row(name, rows[0].style, data_size(before), data_size(after), *_collectives(rows))
    table.add_section()
    for name, wholes in _folded(plan.replicated, lambda row: row.reason):
        num_bytes = sum(one.num_bytes for one in wholes)
        text = f"whole: {wholes[0].reason}"
        table.add_row(name, text, data_size(num_bytes), data_size(num_bytes), "", "")
    table.add_section()
    whole = sum(one.num_bytes for one in plan.replicated)
    before = sum(row.bytes_before for row in plan.rows) + whole
    after = sum(row.bytes_after for row in plan.rows) + whole
    table.add_row("all", "", data_size(before), data_size(after), *_collectives(plan.rows))
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
