"""The figure and the page of `paceline compare`: several runs of one script side by side.

The figure is an SVG file that stands alone; the page contains it, with the table and the commands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from string import Template

from paceline.observe.report.canvas import (
    TEXT_LIMIT,
    AxisScale,
    coordinate,
    escaped,
    line,
    polyline,
    svg,
    text,
)
from paceline.observe.report.family_plot import GRID, INK, LINE_COLOURS, SOFT, styled
from paceline.observe.report.pace_run import PaceRun, Point, common_loss
from paceline.observe.report.page import STYLE_SHEET
from paceline.runtime.formatting import data_size, percent, rate, short_duration, short_number

_WIDTH, _PANEL, _HEIGHT = 1000, 480, 250
_LEFT, _TOP, _BOTTOM, _RIGHT = 58, 40, 196, 460  # inside a panel
_LOG_FROM = 8.0  # the loss axis is logarithmic if the highest is so many times the lowest
_ROW = 22  # of the legend
_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; \
base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>$style</style>
</head>
<body>
<main>
<header><p class="over">Paceline comparison</p><div class="head"><h1>$name</h1></div>
<p class="say">$conditions</p></header>
$body
<footer>Made by <code>paceline compare</code>. The loss of a run is the mean of its last tenth, over
all workers, each with its own model. Bytes are those that a worker sends; what servers send back
does not count.</footer>
</main>
</body>
</html>
""")


def comparison_figure(runs: Sequence[PaceRun], conditions: str) -> str:
    """Return four plots as one SVG file: loss over time and samples, throughput, bytes."""
    shown = [(one, LINE_COLOURS[at % len(LINE_COLOURS)]) for at, one in enumerate(runs)]
    shown = [(one, colour) for one, colour in shown if not one.failure]
    counted = all(one.counts_samples for one, _ in shown)
    unit = "samples" if counted else "steps of all workers"
    legend = _legend(shown)
    top = 34 + _ROW * ((len(shown) + 3) // 4)
    panels = [
        _lines("Loss over time", "s", shown, lambda point: point.t_s),
        _lines(f"Loss over {unit}", unit, shown, lambda point: point.samples),
        _bars(f"Throughput ({unit}/s)", shown, lambda one: one.samples_per_s, rate),
        _bars("Sent by a worker in a step", shown, lambda one: one.sent_per_step, data_size),
    ]
    placed = [
        f'<g transform="translate({(at % 2) * (_WIDTH - _PANEL)},{top + at // 2 * _HEIGHT})">'
        f"{panel}</g>"
        for at, panel in enumerate(panels)
    ]
    heading = styled([text(12, 22, escaped(conditions, 140))], fill=INK, font_size="14")
    font = "system-ui, Helvetica, sans-serif"
    parts = [
        '<rect width="100%" height="100%" fill="#fff"/>',
        styled([heading, *legend, *placed], font_family=font, font_size="12"),
    ]
    height = top + 2 * _HEIGHT
    names = escaped(", ".join(one.label for one in runs), 200)
    drawn = svg(_WIDTH, height, "Paces compared", names, parts)
    size = f'xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
    return drawn.replace("<svg ", f"<svg {size}", 1)


_Shown = Sequence[tuple[PaceRun, str]]


def _legend(shown: _Shown) -> list[str]:
    parts = []
    for at, (one, colour) in enumerate(shown):
        x, y = 12 + at % 4 * 245, 34 + _ROW * (at // 4) + 10
        parts.append(f'<rect x="{x}" y="{y - 9}" width="12" height="10" fill="{colour}"/>')
        parts.append(styled([text(x + 18, y, escaped(one.label, 34))], fill=INK))
    return parts


def _frame(title: str, scale: AxisScale) -> list[str]:
    grid, labels = [], []
    for value, label in scale.ticks(4):
        grid.append(line(_LEFT, scale.at(value), _RIGHT, scale.at(value), "grid"))
        labels.append(text(_LEFT - 6, scale.at(value) + 4, label, "", "end"))
    return [
        styled(
            [text(_LEFT, _TOP - 14, escaped(title))], fill=INK, font_size="13", font_weight="600"
        ),
        styled(grid, stroke=GRID),
        styled([line(_LEFT, _BOTTOM, _RIGHT, _BOTTOM, "axis")], stroke=SOFT),
        styled(labels, fill=SOFT),
    ]


def _lines(title: str, unit: str, shown: _Shown, x_of: Callable[[Point], float]) -> str:
    curves = [
        ([(x_of(one), one.loss) for one in run.curve() if math.isfinite(one.loss)], colour)
        for run, colour in shown
    ]
    every = [point for points, _ in curves for point in points]
    if not every:
        return "".join([*_frame(title, AxisScale(0.0, 1.0, _BOTTOM, _TOP))])
    losses = [loss for _, loss in every]
    low, high = min(losses), max(losses)
    is_log = low > 0 and high / low >= _LOG_FROM
    padding = (high - low) * 0.05 or abs(high) * 0.1 or 1.0
    span = (low / 1.1, high * 1.1) if is_log else (low - padding, high + padding)
    y = AxisScale(*span, _BOTTOM, _TOP, is_log)
    x = AxisScale(0.0, max(at for at, _ in every), _LEFT, _RIGHT)
    parts = _frame(title, y)
    labels = [text(x.at(v), _BOTTOM + 16, label, "", "middle") for v, label in x.ticks(5)]
    labels.append(text(_RIGHT, _BOTTOM + 32, unit, "", "end"))
    parts.append(styled(labels, fill=SOFT))
    for points, colour in curves:
        if points:
            drawn = polyline([(x.at(a), y.at(b)) for a, b in points], "line")
            fill = colour if len(points) == 1 else "none"
            parts.append(styled([drawn], fill=fill, stroke=colour, stroke_width="2"))
    return "".join(parts)


def _bars(
    title: str, shown: _Shown, value_of: Callable[[PaceRun], float], write: Callable[[float], str]
) -> str:
    values = [(value_of(one), colour) for one, colour in shown]
    y = AxisScale(
        0.0, max((value for value, _ in values), default=0.0) * 1.15 or 1.0, _BOTTOM, _TOP
    )
    parts = _frame(title, y)
    room = (_RIGHT - _LEFT) / max(len(values), 1)
    width = min(room * 0.7, 70)
    for at, (value, colour) in enumerate(values):
        left, top = _LEFT + room * at + (room - width) / 2, y.at(value)
        parts.append(
            f'<rect x="{coordinate(left)}" y="{coordinate(top)}" width="{coordinate(width)}"'
            f' height="{coordinate(max(_BOTTOM - top, 0.5))}" fill="{colour}"/>'
        )
        label = text(left + width / 2, top - 5, write(value), "", "middle")
        parts.append(styled([label], fill=INK))
    return "".join(parts)


def comparison_page(runs: Sequence[PaceRun], name: str, conditions: str) -> str:
    """Return the page: the table, the figure and the commands."""
    parts = [
        f'<section><h2>Results</h2><div class="table">{_table(runs)}</div></section>',
        '<section><h2>Curves</h2><div class="grid"><figure class="wide"><div class="scroll">'
        f"{comparison_figure(runs, conditions)}</div></figure></div></section>",
    ]
    commands = "".join(
        f'<code class="command">{escaped(one.command, TEXT_LIMIT)}</code>' for one in runs
    )
    parts.append(f"<section><h2>Commands</h2>{commands}</section>")
    return _PAGE.substitute(
        title=f"{escaped(name, 100)} \u00b7 Paceline comparison",
        name=escaped(name, 120),
        conditions=escaped(conditions, TEXT_LIMIT),
        style=STYLE_SHEET.read_text(),
        body="\n".join(parts),
    )


def _table(runs: Sequence[PaceRun]) -> str:
    good = [one for one in runs if not one.failure]
    shared = common_loss(good)
    names = ["loss", "time to the common loss", "samples/s", "steps/s", "sent/step", "waiting"]
    if not all(one.counts_samples for one in good):
        names[2] = "steps/s of all workers"
    heads = "".join(f'<th class="num">{one}</th>' for one in names)
    rows = []
    for one in runs:
        if one.failure:
            why = escaped(one.failure, TEXT_LIMIT)
            rows.append(f'<tr><td>{escaped(one.label)}</td><td colspan="6">{why}</td></tr>')
            continue
        to = None if shared is None else one.time_to(shared)
        cells = [
            "-" if one.loss is None else short_number(one.loss),
            "-" if to is None else short_duration(to),
            rate(one.samples_per_s),
            rate(one.steps_per_s),
            data_size(one.sent_per_step),
            percent(one.wait_share),
        ]
        values = "".join(f'<td class="num">{cell}</td>' for cell in cells)
        rows.append(f"<tr><td>{escaped(one.label)}</td>{values}</tr>")
    return (
        f"<table><thead><tr><th>pace</th>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )
