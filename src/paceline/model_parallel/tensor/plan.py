"""TensorPlan: which modules are sharded, and how; its table, with the reasons for what is not.

A plan is made automatically or by hand. It is a mapping from names of modules to styles, which can
be edited and passed back:

    plan = tensor_plan(model, tp=2, example=(tokens,))
    plan["blocks.0.mix"] = "replicate"
    parallelize(model, device_mesh, plan)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from paceline.errors import UsageError
from paceline.model_parallel.sharding.layout import SliceSpec
from paceline.model_parallel.tensor.example_input import Run
from paceline.model_parallel.tensor.layers import BATCH_NORMS
from paceline.model_parallel.tensor.styles import (
    KINDS,
    Style,
    indivisible,
    shard_dims,
    sharded_class,
)
from paceline.model_parallel.tensor.tracing import TraceResult
from paceline.runtime.formatting import data_size


@dataclass(frozen=True)
class PlanRow:
    """How one module is sharded; collectives are those of one training step."""

    module: str
    style: str
    bytes_before: int
    bytes_after: int  # on each process
    num_forward: int | None  # None: of torch's styles they are not counted
    num_backward: int | None


@dataclass(frozen=True)
class ReplicatedModule:
    """A module whose parameters every process holds in full, and why."""

    module: str
    num_bytes: int
    reason: str


@dataclass
class TensorPlan(MutableMapping[str, Any]):
    """Styles by module. Rows and parts describe the plan as it was made or applied."""

    tp: int
    styles: dict[str, Any] = field(default_factory=dict)  # Style, or a ParallelStyle of torch
    rows: list[PlanRow] = field(default_factory=list)
    replicated: list[ReplicatedModule] = field(default_factory=list)
    parts: dict[str, SliceSpec] = field(
        default_factory=dict
    )  # of sharded parameters, by their names
    buffer_parts: dict[str, SliceSpec] = field(default_factory=dict)  # of sharded buffers
    note: str = ""  # about how it was made

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
        return _format_table(self)

    def __str__(self) -> str:
        return self.table()


def resolve(model: nn.Module, plan: Mapping[str, Any], tp: int) -> dict[str, Any]:
    """Return the style of each named module; a `*` in a pattern matches one step of the name."""
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
            if isinstance(style, Style) and style.kind != "replicate":
                _require(name, modules[name], style, tp)
            _require_torch(name, modules[name], style, tp)
            found[name] = style
    return {n: s for n, s in found.items() if not isinstance(s, Style) or s.kind != "replicate"}


def _parsed(name: str, style: Any) -> Any:
    if isinstance(style, (Style, ParallelStyle)):
        return style
    if style in KINDS:
        return Style(style)
    raise UsageError(
        f"tensor plan: {name}: {style!r} is not a style; use a ParallelStyle of torch or one of"
        f" {', '.join(KINDS)}"
    )


def _matches(name: str, pattern: str) -> bool:
    steps, wanted = name.split("."), pattern.split(".")
    pairs = zip(steps, wanted, strict=False)
    return len(steps) == len(wanted) and all(fnmatchcase(s, w) for s, w in pairs)


def _require(name: str, module: nn.Module, style: Style, tp: int) -> None:
    if sharded_class(module, style.kind) is None:
        raise UsageError(
            f"tensor plan: {name} is a {type(module).__name__}, which has no style"
            f" {style.kind!r}; leave it out, or write 'replicate'"
        )
    bad = indivisible(module, style, tp)
    if bad is not None:
        _refuse(name, *bad, tp)


def _require_torch(name: str, module: nn.Module, style: Any, tp: int) -> None:
    """Raise UsageError for uneven shards, which torch would make: all must have the same size."""
    attribute = {
        ("ColwiseParallel", nn.Linear): ("out_features", "output features (rows)"),
        ("RowwiseParallel", nn.Linear): ("in_features", "input features (columns)"),
        ("ColwiseParallel", nn.Embedding): ("embedding_dim", "features"),
        ("RowwiseParallel", nn.Embedding): ("num_embeddings", "rows"),
    }.get((type(style).__name__, type(module)))
    if attribute is not None and getattr(module, attribute[0]) % tp:
        _refuse(name, getattr(module, attribute[0]), attribute[1], tp)


def _refuse(name: str, size: int, what: str, tp: int) -> None:
    raise UsageError(
        f"tensor plan: {name} has {size} {what}, which do not divide by the axis tp={tp};"
        f" take a tp that divides {size}, change the model's size, or write 'replicate'"
    )


WIDTH = 100
AnyRow = TypeVar("AnyRow", PlanRow, ReplicatedModule)


def _format_table(plan: TensorPlan) -> str:
    """Return a table: sharded modules, replicated ones, sums. Equal layers share a line."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, title=f"tensor parallel, tp={plan.tp}", title_justify="left")
    table.add_column("module", overflow="fold", ratio=3)
    table.add_column("style", overflow="fold", ratio=4)
    for head in ("full", "per rank", "forward", "backward"):
        table.add_column(head, justify="right", no_wrap=True)
    for name, rows in _folded(plan.rows, lambda row: row.style):
        before, after = sum(r.bytes_before for r in rows), sum(r.bytes_after for r in rows)
        table.add_row(name, rows[0].style, data_size(before), data_size(after), *_collectives(rows))
    table.add_section()
    for name, modules in _folded(plan.replicated, lambda row: row.reason):
        num_bytes = sum(one.num_bytes for one in modules)
        text = f"replicated: {modules[0].reason}"
        table.add_row(name, text, data_size(num_bytes), data_size(num_bytes), "", "")
    table.add_section()
    replicated = sum(one.num_bytes for one in plan.replicated)
    before = sum(row.bytes_before for row in plan.rows) + replicated
    after = sum(row.bytes_after for row in plan.rows) + replicated
    table.add_row("all", "", data_size(before), data_size(after), *_collectives(plan.rows))
    console = Console(width=WIDTH, color_system=None, force_terminal=False, markup=False)
    with console.capture() as captured:
        console.print(table)
    lines = [line.rstrip() for line in captured.get().splitlines()]
    note = "forward, backward: collectives in one training step; sizes: parameters alone."
    return "\n".join([*lines, note, *([plan.note] if plan.note else [])])


def _collectives(rows: list[PlanRow]) -> list[str]:
    """Return the sums, forward and backward; "?" if one is unknown."""
    columns = ([row.num_forward for row in rows], [row.num_backward for row in rows])
    return ["?" if None in column else str(sum(n or 0 for n in column)) for column in columns]


def _folded(rows: Sequence[AnyRow], key: Callable[[AnyRow], str]) -> list[tuple[str, list[AnyRow]]]:
    folded: dict[tuple[str, str], list[AnyRow]] = {}
    for row in rows:
        folded.setdefault((_pattern_of_layer(row.module), key(row)), []).append(row)
    return [(_title(name, [r.module for r in same]), same) for (name, _), same in folded.items()]


def _pattern_of_layer(name: str) -> str:
    """Return the name with `*` for its first number: the number of the layer."""
    steps = name.split(".")
    for place, step in enumerate(steps[:-1]):
        if step.isdigit():
            return ".".join([*steps[:place], "*", *steps[place + 1 :]])
    return name


def _title(key: str, names: list[str]) -> str:
    if len(names) == 1:
        return names[0] or "(the model itself)"
    return f"{key} (x{len(names)})"


def make_rows(
    model: nn.Module,
    styles: Mapping[str, Any],
    counts: Mapping[str, tuple[int, int]],
    parts: Mapping[str, SliceSpec] | None,
    tp: int = 1,
) -> list[PlanRow]:
    """Return a row for each sharded module. Without parts the model is not sharded yet."""
    rows, seen = [], dict[int, str]()
    for name, module in model.named_modules():
        style = styles.get(name)
        if style is None:
            continue
        before = after = 0
        is_ours = isinstance(style, Style)
        text = str(style) if is_ours else type(style).__name__
        for own, param in module.named_parameters(recurse=_has_inner(style)):
            if id(param) in seen:
                text += f", {own} is {seen[id(param)]}'s"
                continue
            seen[id(param)] = name
            if parts is None:
                is_sharded = is_ours and own in shard_dims(module, style)
                full = param.numel()
                local = full // tp if is_sharded else full
            else:
                part = parts.get(f"{name}.{own}" if name else own)
                full = param.numel() if part is None else math.prod(part.shape)
                local = param.numel()
            before += full * param.element_size()
            after += local * param.element_size()
        rows.append(PlanRow(name, text, before, after, *counts.get(name, (None, None))))
    return rows


def replicated_modules(
    model: nn.Module, found: TraceResult, was_run: bool
) -> list[ReplicatedModule]:
    """Return the modules with parameters of their own that are not sharded."""
    result, seen = [], set[int]()
    with_inner = [name for name, style in found.styles.items() if _has_inner(style)]
    for name, module in model.named_modules():
        inside = name in found.styles or any(name.startswith(f"{one}.") for one in with_inner)
        own = [p for p in module.parameters(recurse=False) if id(p) not in seen]
        seen.update(map(id, own))
        if not own or inside:
            continue
        num_bytes = sum(param.nbytes for param in own)
        result.append(ReplicatedModule(name, num_bytes, _reason(name, module, found, was_run)))
    return result


def missing_input_note(model: nn.Module, runs: list[Run]) -> str:
    """Return a note if no example was passed and no guessed input fits; else an empty one."""
    if any(module is model for module, _ in runs):
        return ""
    traced = "only submodules were traced" if runs else "nothing was traced"
    return f"No guessed input fits the model, {traced}: pass example= for a better plan."


def _reason(name: str, module: nn.Module, found: TraceResult, was_run: bool) -> str:
    if name in found.refused:
        return found.refused[name]
    if not was_run:
        return "no guessed input fits the model: pass example="
    kind = type(module).__name__
    if found.called and name not in found.called:
        return f"this {kind} is not called as a module"
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, *BATCH_NORMS)):
        return "norm of full input"
    return f"no style for {kind}"


def _has_inner(style: Any) -> bool:
    """Return whether a style also shards the modules inside."""
    return isinstance(style, Style) and style.kind == "attention"
