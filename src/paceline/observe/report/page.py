"""The page: one file with everything in it, which needs no network and runs no script.

Its Content-Security-Policy allows only the embedded style sheet. If a name from a run ever got past
the escaping, the browser would still neither run nor fetch anything.

The style sheet (report.css) covers light and dark screens, phones and paper. Its colours are the
usual ones for colour-blind readers (Okabe and Ito), a little darker on white and a little lighter
on black. Drawings name CSS classes only.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path
from string import Template

from paceline.errors import UsageError
from paceline.observe.report import sections
from paceline.observe.report.canvas import TEXT_LIMIT, escaped, finite_or_none
from paceline.observe.report.history import KINDS, TimelineEntry, main_loss
from paceline.observe.report.reading import ConfigRow, Run
from paceline.observe.report.row_plots import timeline
from paceline.observe.telemetry.step_times import Bottleneck
from paceline.runtime.formatting import duration, percent, short_number

REPORT_FILE = "report.html"
STYLE_SHEET = Path(__file__).with_name("report.css")
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
    slowest = slowest_sentence(run)
    parts = [
        f"<header>{_head(run)}</header>",
        *(f'<p class="remark">{escaped(remark, TEXT_LIMIT)}</p>' for remark in run.remarks),
        _tiles(run),
        f'<p class="say">{slowest}</p>' if slowest else "",
        sections.learning(run),
        sections.speed(run),
        sections.servers(run),
        _timeline(run),
        _configuration(run),
    ]
    return _PAGE.substitute(
        title=f"{escaped(name, 100)} \u00b7 Paceline",
        style=STYLE_SHEET.read_text(),
        body="\n".join(part for part in parts if part),
        lines=short_number(run.state.num_events),
    )


def _timeline(run: Run) -> str:
    entries = [*run.history.first_entries, *run.history.last_entries]
    if not entries:
        return ""
    between = run.history.num_entries - len(entries)
    rows = [_row(one) for one in run.history.first_entries]
    if between:
        rows.append(f"<tr><td></td><td></td><td>... {short_number(between)} more ...</td></tr>")
    rows += [_row(one) for one in run.history.last_entries]
    drawing = timeline(entries, max(run.wall_s, entries[-1].t))
    figure = sections.figure("When", drawing, "", "", "wide")
    heads = '<th class="num">time</th><th>what</th><th></th>'
    return (
        f'<section><h2>What happened</h2><div class="grid">{figure}'
        f'<div class="table wide"><table><thead><tr>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div></div></section>"
    )


def _row(one: TimelineEntry) -> str:
    return (
        f'<tr><td class="num">{duration(one.t)}</td>'
        f'<td class="kind"><i class="e-{one.kind}"></i>{KINDS[one.kind]}</td>'
        f"<td><bdi>{escaped(one.text, TEXT_LIMIT)}</bdi></td></tr>"
    )


def _configuration(run: Run) -> str:
    if not run.settings:
        return ""
    rows: Iterable[str] = (
        f"<tr><td>{escaped(one.name)}</td><td><bdi>{escaped(one.value, TEXT_LIMIT)}</bdi></td>"
        f"<td>{escaped(one.origin, 80)}</td></tr>"
        for one in run.settings
    )
    return (
        '<section><h2>Configuration</h2><div class="table"><table class="settings">'
        "<thead><tr><th>setting</th><th>value</th><th>from</th></tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def write(page: str, path: Path) -> None:
    """Write a page atomically; raise UsageError if that fails."""
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
            f"cannot write {path}: {why}; name a file in a writable directory with -o FILE"
        ) from None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


# -- the top of the page: the run, its main figures, and the slowest worker --------------------

_VERSIONS = {"paceline_version": "Paceline", "python_version": "Python", "torch_version": "torch"}


def _head(run: Run) -> str:
    """Return the name of the run, its command and facts about it."""
    started = run.state.started
    name = escaped((started.run if started else "") or run.directory.resolve().name, 120)
    pill, css = _state(run)
    parts = [
        '<p class="over">Paceline run report</p>',
        f'<div class="head"><h1>{name}</h1><span class="pill {css}">{pill}</span></div>',
    ]
    if started and started.command:
        parts.append(f'<code class="command">{escaped(started.command, 4 * TEXT_LIMIT)}</code>')
    rows = "".join(f"<div><dt>{what}</dt><dd>{fact}</dd></div>" for what, fact in _facts(run))
    return "".join(parts) + (f'<dl class="facts">{rows}</dl>' if rows else "")


def _state(run: Run) -> tuple[str, str]:
    if run.state.ended is None:
        return "running or killed", "open"
    code = run.state.ended.exit_code
    return ("finished", "good") if code == 0 else (f"exit code {escaped(code, 20)}", "bad-pill")


def _facts(run: Run) -> list[tuple[str, str]]:
    started = run.state.started
    facts = []
    if started:
        facts += [
            ("script", escaped(started.script, 200)),
            ("started", _moment(started.started)),
        ]
    took = duration(run.wall_s)
    facts += [("took", took if run.state.ended else f"{took} recorded so far")]
    if started:
        facts += [
            ("workers", escaped(started.workers)),
            ("servers", escaped(started.servers) if started.servers else ""),
            ("data workers", escaped(started.data_workers) if started.data_workers else ""),
            ("pace", _setting(run, "pace", started.pace) or "chosen by the script"),
            ("mesh", _setting(run, "mesh", started.mesh)),
            ("host", escaped(started.host)),
        ]
    if run.state.ended and run.state.ended.words:
        facts += [("end", escaped(run.state.ended.words.removeprefix("paceline: "), 200))]
    facts += [("versions", _versions(run.settings, started.version if started else ""))]
    return [(what, fact) for what, fact in facts if fact]


def _setting(run: Run, name: str, given: str) -> str:
    """Return the value given to the job; else the script's choice, from config.json."""
    chosen = [one.value for one in run.settings if one.name == name and one.origin == "script"]
    return escaped(given or "".join(value for value in chosen[:1] if value != "none"), 120)


def _moment(iso: str) -> str:
    try:
        moment = datetime.fromisoformat(iso.replace("Z", "+00:00"))
        if moment.tzinfo is not None:
            moment = moment.astimezone(timezone.utc)
        return f"{moment:%Y-%m-%d %H:%M} UTC"
    except (ValueError, OverflowError):
        return escaped(iso)


def _versions(settings: list[ConfigRow], of_paceline: str) -> str:
    found = {one.name: one.value for one in settings if one.name in _VERSIONS}
    if of_paceline:
        found["paceline_version"] = of_paceline
    return ", ".join(
        f"{n} {escaped(found[key], 30)}" for key, n in _VERSIONS.items() if key in found
    )


def _tiles(run: Run) -> str:
    """Return the figures that readers look for first."""
    made = [_speed(run), _final_loss(run), _waiting(run), _steps(run)]
    boxes = [
        f'<div class="tile"><span>{name}</span><b>{value}</b><span>{more}</span></div>'
        for name, value, more in (one for one in made if one is not None)
    ]
    return f'<div class="tiles">{"".join(boxes)}</div>' if boxes else ""


_Tile = tuple[str, str, str] | None


def _speed(run: Run) -> _Tile:
    rate = run.history.rate
    trained_s = rate.end - (rate.end if rate.begin is None else rate.begin)
    if trained_s <= 0:
        return None
    workers = len(run.state.waits.workers)
    if run.state.samples:
        mean = run.state.samples / trained_s
        each = f"{short_number(mean / workers)} per worker, " if workers > 1 else ""
        more = f"{each}{short_number(run.state.samples)} in all"
        return "samples per second", short_number(mean), more
    steps_s = run.state.steps / workers / trained_s
    return "steps per second", short_number(steps_s), "samples were not counted"


def _final_loss(run: Run) -> _Tile:
    name = main_loss(run.history.values)
    if name is None:
        return None
    curve = run.history.values[name]
    label = "final loss" if name.lower() == "loss" else f"final {escaped(name, 24)}"
    final = sum(curve.last.values()) / len(curve.last)
    bins = curve.all.in_order()
    if not bins:
        return label, "not finite", "no value was finite"
    first, low = short_number(bins[0].mean), short_number(min(one.low for one in bins))
    text = short_number(final) if math.isfinite(final) else "not finite"
    return label, text, f"from {first}, lowest {low}"


def _waiting(run: Run) -> _Tile:
    times = run.state.waits.workers.values()
    took_s = sum(one.took_s for one in times)
    if took_s <= 0:
        return None
    input_s = sum(one.input_s for one in times)
    more = f"of the workers' time; {percent(input_s / took_s)} for input"
    share = sum(one.wait_s for one in times) / took_s
    return "waiting for other processes", percent(share), more


def _steps(run: Run) -> _Tile:
    workers = run.state.waits.workers
    if not run.state.steps:
        return None
    most = max(one.steps for one in workers.values())
    least = min(one.steps for one in workers.values())
    took_s = sum(one.took_s for one in workers.values()) / run.state.steps
    mean = f"{duration(took_s)} each"
    if least == most:
        return "steps", short_number(most), mean
    return "steps", short_number(most), f"fewest of a worker: {short_number(least)}; {mean}"


def slowest_sentence(run: Run) -> str:
    """Return which worker (or the network) slowed the run down; "" for a single worker."""
    if len(run.state.waits.workers) < 2:
        return ""
    found = run.state.bottleneck()
    return "No worker slowed down the others." if found is None else _describe(found)


def _describe(found: Bottleneck) -> str:
    lost = f"The workers spent {percent(found.cost)} of their time waiting."
    if found.worker is None:
        return f"No worker is slow: the exchange itself (network, servers) takes the time. {lost}"
    why = {
        "input": "it waits longer for its input",
        "compute": "it computes longer",
    }.get(found.cause, escaped(found.cause))
    times = finite_or_none(found.times)
    factor = short_number(times) if times is not None and times < 1e4 else "very many"
    return (
        f"<strong>Worker {found.worker} is the slowest: {why}.</strong> Without waiting, its steps"
        f" take {factor} times as long as those of the other workers. {lost}"
    )
