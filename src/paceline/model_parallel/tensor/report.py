"""What a plan has come to: the rows of its table, and what stays whole, with reasons."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from paceline.model_parallel.parts.layout import Part
from paceline.model_parallel.tensor.example_input import Run
from paceline.model_parallel.tensor.layers import BATCH_NORMS
from paceline.model_parallel.tensor.plan import Replicated, Row
from paceline.model_parallel.tensor.styles import Style, cut_dims
from paceline.model_parallel.tensor.tracing import Findings


def rows_of(
    model: nn.Module,
    styles: Mapping[str, Any],
    counts: Mapping[str, tuple[int, int]],
    parts: Mapping[str, Part] | None,
    tp: int = 1,
) -> list[Row]:
    """Return a row for each cut module. Without parts the model is whole still, to be cut by tp."""
    rows, seen = [], dict[int, str]()
    for name, module in model.named_modules():
        style = styles.get(name)
        if style is None:
            continue
        before = after = 0
        is_ours = isinstance(style, Style)
        words = str(style) if is_ours else type(style).__name__
        for own, param in module.named_parameters(recurse=_has_inner(style)):
            if id(param) in seen:
                words += f", {own} is {seen[id(param)]}'s"
                continue
            seen[id(param)] = name
            if parts is None:
                is_cut = is_ours and own in cut_dims(module, style)
                whole = param.numel()
                local = whole // tp if is_cut else whole
            else:
                part = parts.get(f"{name}.{own}" if name else own)
                whole = param.numel() if part is None else _product(part.shape)
                local = param.numel()
            before += whole * param.element_size()
            after += local * param.element_size()
        rows.append(Row(name, words, before, after, *counts.get(name, (None, None))))
    return rows


def replicated(model: nn.Module, findings: Findings, was_run: bool) -> list[Replicated]:
    """Return the modules with parameters of their own that stay whole."""
    result, seen = [], set[int]()
    whole_of = [name for name, style in findings.styles.items() if _has_inner(style)]
    for name, module in model.named_modules():
        inside = name in findings.styles or any(name.startswith(f"{one}.") for one in whole_of)
        own = [p for p in module.parameters(recurse=False) if id(p) not in seen]
        seen.update(map(id, own))
        if not own or inside:
            continue
        num_bytes = sum(map(_bytes, own))
        result.append(Replicated(name, num_bytes, _reason(name, module, findings, was_run)))
    return result


def note_of(model: nn.Module, runs: list[Run]) -> str:
    """Return what to say about inputs that were not given."""
    if any(module is model for module, _ in runs):
        return ""
    seen = "parts of it were looked at alone" if runs else "nothing was looked at"
    return f"No guessed input fits the model, {seen}: give example= for a better plan."


def _reason(name: str, module: nn.Module, findings: Findings, was_run: bool) -> str:
    if name in findings.refused:
        return findings.refused[name]
    if not was_run:
        return "no guessed input fits the model: give example="
    kind = type(module).__name__
    if findings.called and name not in findings.called:
        return f"this {kind} is not called as a module"
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, *BATCH_NORMS)):
        return "a norm of whole tensors"
    return f"no style for {kind}"


def _has_inner(style: Any) -> bool:
    """Whether a style is also about the modules inside."""
    return isinstance(style, Style) and style.word == "attention"


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _product(shape: tuple[int, ...]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result
