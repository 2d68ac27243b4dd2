"""The page itself: one file with everything in it, which needs no network and runs no script.

Its Content-Security-Policy forbids everything but the style sheet inside of it. So should a name
out of a run ever get past the escaping, it would still be neither run nor fetched.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from string import Template

from paceline.errors import UsageError
from paceline.figures import duration, short_number
from paceline.run_report import sections
from paceline.run_report.happenings import KINDS, Happened
from paceline.run_report.headline import head, slowest_sentence, tiles
from paceline.run_report.page_style import style_sheet
from paceline.run_report.plots.timeline import timeline
from paceline.run_report.reading import Run
from paceline.run_report.words import TEXT_LIMIT, shown

REPORT_FILE = "report.html"
_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; \
base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<title>$title</title>
<style>$style</style>
</head>
<body>
<main>
$body
<footer>Made by <code>paceline report</code> from $lines lines of events. Times count from the start
of the job; point at a plot for its values.</footer>
</main>
</body>
</html>
""")


def render(run: Run) -> str:
    """Return the page about a run."""
    started = run.state.started
    name = (started.run if started else "") or run.directory.resolve().name
    said = slowest_sentence(run)
    parts = [
        f"<header>{head(run)}</header>",
        *(f'<p class="remark">{shown(remark, TEXT_LIMIT)}</p>' for remark in run.remarks),
        tiles(run),
        f'<p class="say">{said}</p>' if said else "",
        sections.learning(run),
        sections.speed(run),
        sections.servers(run),
        _what_happened(run),
        _configuration(run),
    ]
    return _PAGE.substitute(
        title=f"{shown(name, 100)} \u00b7 Paceline",
        style=style_sheet(),
        body="\n".join(part for part in parts if part),
        lines=short_number(run.state.num_events),
    )


def _what_happened(run: Run) -> str:
    told = [*run.history.first_happenings, *run.history.last_happenings]
    if not told:
        return ""
    between = run.history.num_happenings - len(told)
    rows = [_row(one) for one in run.history.first_happenings]
    if between:
        rows.append(f"<tr><td></td><td></td><td>... {short_number(between)} more ...</td></tr>")
    rows += [_row(one) for one in run.history.last_happenings]
    drawing = timeline(told, max(run.wall_s, told[-1].t))
    picture = sections.figure("When", drawing, "", "", "wide")
    heads = '<th class="num">time</th><th>what</th><th></th>'
    return (
        f'<section><h2>What happened</h2><div class="grid">{picture}'
        f'<div class="table wide"><table><thead><tr>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div></div></section>"
    )


def _row(one: Happened) -> str:
    return (
        f'<tr><td class="num">{duration(one.t)}</td>'
        f'<td class="kind"><i class="e-{one.kind}"></i>{KINDS[one.kind]}</td>'
        f"<td><bdi>{shown(one.text, TEXT_LIMIT)}</bdi></td></tr>"
    )


def _configuration(run: Run) -> str:
    if not run.settings:
        return ""
    rows: Iterable[str] = (
        f"<tr><td>{shown(one.name)}</td><td><bdi>{shown(one.value, TEXT_LIMIT)}</bdi></td>"
        f"<td>{shown(one.origin, 80)}</td></tr>"
        for one in run.settings
    )
    return (
        '<section><h2>Configuration</h2><div class="table"><table class="settings">'
        "<thead><tr><th>setting</th><th>value</th><th>from</th></tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def write(page: str, path: Path) -> None:
    """Write a page whole or not at all; UsageError where that cannot be done."""
    target = path.resolve()  # a link stays a link
    if target.exists() and not target.is_file():
        raise UsageError(f"cannot write {path}: it is not a file; name another one with -o FILE")
    unfinished = ""
    try:
        handle, unfinished = tempfile.mkstemp(prefix=".report-", suffix=".html", dir=target.parent)
        with open(handle, "wb") as file:
            file.write(page.encode("utf-8", errors="replace"))
        os.chmod(unfinished, 0o666 & ~_umask())
        os.replace(unfinished, target)
    except OSError as error:
        if unfinished:
            with contextlib.suppress(OSError):
                os.unlink(unfinished)
        why = error.strerror or str(error)
        raise UsageError(
            f"cannot write {path}: {why}; name a file in a directory that can be written to with"
            " -o FILE"
        ) from None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
