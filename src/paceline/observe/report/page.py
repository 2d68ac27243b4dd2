"""The page itself: one file with everything in it, which needs no network and runs no script.

Its Content-Security-Policy forbids everything but the style sheet inside of it. So should a name
out of a run ever get past the escaping, it would still be neither run nor fetched.

The style sheet is for light and dark, phones and paper. Colours are the field's usual ones for
people who see colours differently (Okabe and Ito), a little darker on white and a little lighter on
black. Drawings name classes only.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from string import Template

from paceline.errors import UsageError
from paceline.observe.report import sections
from paceline.observe.report.canvas import TEXT_LIMIT, shown
from paceline.observe.report.headline import head, slowest_sentence, tiles
from paceline.observe.report.history import KINDS, Happened
from paceline.observe.report.reading import Run
from paceline.observe.report.rows import SHADES, timeline
from paceline.runtime.formatting import duration, short_number

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


_LIGHT = """
color-scheme:light;--bg:#f5f6f8;--card:#fff;--ink:#1b2130;--soft:#5a6376;--line:#e4e7ed;
--code:#fff;--accent:#0b66b7;--good:#0a7a55;--warn:#8a5a00;--warn-bg:#fff6e0;--bad:#b3261e;
--compute:#2f78bd;--on-compute:#fff;--input:#eba51a;--on-input:#2b1d00;--wait:#c6ccd6;
--on-wait:#333b49;--exchange:#0f9a73;--on-exchange:#fff;--other:#b08bc4;--on-other:#1d1226;
--heat:#b5480c;--on-heat:#fff;
--c0:#0072b2;--c1:#d55e00;--c2:#009e73;--c3:#c2609a;--c4:#c98a00;--c5:#3ba3df;--c6:#7c5cb5;
--c7:#707784;
"""
_DARK = """
color-scheme:dark;--bg:#11141a;--card:#191e27;--ink:#e7eaf0;--soft:#9ca6b8;--line:#2c3340;
--code:#222935;--accent:#6cb4f5;--good:#4cc99b;--warn:#f0c15c;--warn-bg:#2d2617;--bad:#ff8a80;
--compute:#4f9be0;--on-compute:#06131f;--input:#f0b43c;--on-input:#221700;--wait:#4b5566;
--on-wait:#e4e8ef;--exchange:#35b88f;--on-exchange:#03150f;--other:#b795cf;--on-other:#150b1c;
--heat:#ff9b57;--on-heat:#241000;
--c0:#56a8e8;--c1:#ff8a3d;--c2:#2ec497;--c3:#e58fbf;--c4:#e8b23a;--c5:#8fd0ff;--c6:#b39ae8;
--c7:#a3abb9;
"""
_CSS = """
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);line-height:1.5;font-size:15px;
font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;
font-variant-numeric:tabular-nums;-webkit-text-size-adjust:100%}
main{max-width:1148px;margin:0 auto;padding:28px 16px 56px}
h1{font-size:26px;line-height:1.25;margin:2px 0 0;overflow-wrap:anywhere}
h2{font-size:19px;margin:40px 0 12px}
h3{font-size:15px;margin:0}
p{margin:0}
.over{color:var(--soft);font-size:13px}
.head{display:flex;flex-wrap:wrap;gap:8px 16px;align-items:center}
.pill{font-size:13px;font-weight:600;padding:2px 12px;border-radius:99px;border:1.5px solid}
.good{color:var(--good)}.bad-pill{color:var(--bad)}.open{color:var(--warn)}
.command{display:block;margin:14px 0 0;padding:9px 12px;background:var(--code);border-radius:8px;
border:1px solid var(--line);overflow-wrap:anywhere;
font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.facts{display:grid;grid-template-columns:repeat(auto-fill,minmax(172px,1fr));gap:10px 20px;
margin:16px 0 0}
.facts div{min-width:0}
dt{color:var(--soft);font-size:12.5px}
dd{margin:0;overflow-wrap:anywhere}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(180px,1fr));gap:14px;
margin:24px 0 0}
.tile,figure,.table{background:var(--card);border:1px solid var(--line);border-radius:12px}
.tile{padding:14px 18px}
.tile b{display:block;font-size:30px;line-height:1.2;font-weight:650;overflow-wrap:anywhere}
.tile span{color:var(--soft);font-size:13px}
.say{margin:14px 0 0;padding:12px 18px;border-left:4px solid var(--accent);background:var(--card);
border-radius:0 10px 10px 0}
.remark{margin:14px 0 0;padding:10px 18px;border-left:4px solid var(--warn);
background:var(--warn-bg);border-radius:0 10px 10px 0}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,430px),1fr));gap:16px}
figure{margin:0;padding:14px 16px 12px;min-width:0;break-inside:avoid}
figcaption{margin:0 0 6px}
figcaption p,.more{color:var(--soft);font-size:13.5px}
.wide{grid-column:1/-1}
.scroll{overflow-x:auto}
.wide svg{min-width:680px}
svg{display:block;width:100%;height:auto;overflow:visible}
.natural svg{margin:0 auto}
.legend{display:flex;flex-wrap:wrap;gap:2px 16px;margin:6px 0 0;padding:0;list-style:none;
font-size:13px;color:var(--soft)}
.legend i{display:inline-block;width:12px;height:12px;border-radius:3px;margin-right:6px;
vertical-align:-1px}
.legend i.stroke{height:0;border-radius:0;border-style:solid;border-width:3px 0 0;
vertical-align:4px;width:16px}
.legend i.ink{border-color:var(--ink)}
.table{overflow-x:auto;padding:4px 0}
table{border-collapse:collapse;width:100%;font-size:14px}
th{text-align:left;color:var(--soft);font-weight:500;font-size:12.5px}
th,td{padding:6px 16px;vertical-align:top;overflow-wrap:anywhere}
tbody tr{border-top:1px solid var(--line)}
td:first-child{white-space:nowrap}
.settings td:first-child{font-family:ui-monospace,Menlo,Consolas,monospace;font-size:13px}
.settings td{min-width:90px}
.num{text-align:right}
.kind{white-space:nowrap}
.kind i{display:inline-block;width:10px;height:10px;border-radius:50%;margin-right:8px}
footer{margin:44px 0 0;color:var(--soft);font-size:13px}
"""
_DRAWINGS = """
svg text{font-size:12px;fill:var(--ink);unicode-bidi:isolate;direction:ltr}
svg .tick,svg .name{fill:var(--soft)}
svg .small{font-size:11px}
line.grid{stroke:var(--line);stroke-width:1}
line.axis{stroke:var(--soft);stroke-width:1;opacity:.7}
line.mark{stroke:var(--bad);stroke-width:1;stroke-dasharray:3 3;opacity:.75}
line.bad{stroke:var(--bad);stroke-width:2}
polyline{fill:none;stroke-linejoin:round;stroke-linecap:round}
.worker{stroke-width:1;opacity:.55}
.load{stroke-width:1.5;opacity:.9}
.many{stroke:var(--c0);opacity:.35}
.mean{stroke:var(--ink);stroke-width:2}
.only{stroke:var(--c0);stroke-width:1.75}
.dot{stroke:none}.dot.mean{fill:var(--ink)}.dot.only,.dot.many{fill:var(--c0)}
.band{fill:var(--c0);opacity:.22}
.area{fill:var(--c0);opacity:.14}
.tip{fill:transparent}
.tip:hover{fill:var(--soft);fill-opacity:.16}
rect.bar{stroke:var(--card);stroke-width:.5}
.h0{fill:var(--line);fill-opacity:.55}
svg .on-dark{fill:var(--on-heat)}
"""
_SMALL_AND_PAPER = """
@media (max-width:600px){
main{padding:18px 12px 40px}
h1{font-size:21px}
.tiles{grid-template-columns:1fr 1fr;gap:10px}
.tile{padding:10px 14px}.tile b{font-size:23px}
.facts{grid-template-columns:1fr 1fr}
figure{padding:12px 10px 10px}
svg text{font-size:15px}
.wide svg text{font-size:13px}
.natural svg .small{font-size:13px}
th,td{padding:6px 10px}
}
@media print{
:root{--bg:#fff}
body{font-size:12px}
main{max-width:none;padding:0}
h2{break-after:avoid}
.tile,figure,.table{border-color:#ccc}
.grid{grid-template-columns:1fr 1fr}
.wide svg{min-width:0}
*{print-color-adjust:exact;-webkit-print-color-adjust:exact}
}
"""
_MARKS = {
    "lost": "bad",
    "joined": "good",
    "resumed": "c5",
    "servers": "c6",
    "epoch": "c0",
    "note": "soft",
}


def style_sheet() -> str:
    """Return all of it, in one line for each rule or less."""
    kinds = ("input", "compute", "exchange", "wait", "other")
    rules = [f".k-{kind}{{fill:var(--{kind});background:var(--{kind})}}" for kind in kinds]
    rules += [f"svg .in-{kind}{{fill:var(--on-{kind})}}" for kind in kinds]
    rules += [
        f".c{at}{{stroke:var(--c{at});border-color:var(--c{at})}}.dot.c{at}{{fill:var(--c{at})}}"
        for at in range(8)
    ]
    rules += [
        f".h{shade}{{fill:var(--heat);fill-opacity:{shade / SHADES:.2f}}}"
        for shade in range(1, SHADES + 1)
    ]
    rules += [
        f".e-{kind}{{fill:var(--{colour});background:var(--{colour})}}"
        for kind, colour in _MARKS.items()
    ]
    dark = f"@media screen and (prefers-color-scheme:dark){{:root{{{_DARK}}}}}"
    parts = (f":root{{{_LIGHT}}}", dark, _CSS, _DRAWINGS, "\n".join(rules), _SMALL_AND_PAPER)
    return "\n".join(parts)
