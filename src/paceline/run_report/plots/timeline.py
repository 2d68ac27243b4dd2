"""When things happened: a mark for each, in a row for each kind."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.figures import short_duration
from paceline.run_report.happenings import KINDS, Happened
from paceline.run_report.plots.canvas import WIDE, Scale, line, place, svg, text
from paceline.run_report.words import shown, time_unit

_LEFT, _RIGHT, _TOP, _ROW = 110, WIDE - 16, 6, 24


def timeline(happenings: Sequence[Happened], end_s: float) -> str:
    """Draw when things happened between the start of the run and its end."""
    kinds = [kind for kind in KINDS if any(one.kind == kind for one in happenings)]
    unit_s, unit = time_unit(end_s)
    x = Scale(0.0, max(end_s / unit_s, 1e-6), _LEFT, _RIGHT)
    bottom = _TOP + _ROW * len(kinds)
    parts = []
    for value, words in x.ticks(6):
        parts += [line(x.at(value), _TOP, x.at(value), bottom, "grid")]
        parts += [text(x.at(value), bottom + 16, words, "tick", "middle")]
    for at, kind in enumerate(kinds):
        middle = _TOP + (at + 0.5) * _ROW
        parts += [text(_LEFT - 10, middle + 4, KINDS[kind], "tick", "end")]
        parts += [line(_LEFT, middle, _RIGHT, middle, "grid")]
        for one in (one for one in happenings if one.kind == kind):
            tip = f"{short_duration(one.t)}: {shown(one.text, 160)}"
            parts.append(
                f'<circle cx="{place(x.at(one.t / unit_s))}" cy="{place(middle)}" r="5"'
                f' class="e-{kind}"><title>{tip}</title></circle>'
            )
    parts += [text((_LEFT + _RIGHT) / 2, bottom + 36, f"time ({unit})", "name", "middle")]
    description = "A mark for each loss, joining, epoch and note, over the time of the run"
    return svg(WIDE, bottom + 44, "What happened when", description, parts)
