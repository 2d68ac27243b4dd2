"""The top of the page: what was run, how it went, and who held the others up."""

from __future__ import annotations

import math
from datetime import datetime, timezone

from paceline.observe.report.canvas import TEXT_LIMIT, shown, usable
from paceline.observe.report.history import is_loss
from paceline.observe.report.reading import Run, Setting
from paceline.observe.report.series import Curve
from paceline.observe.telemetry.step_times import Slowest
from paceline.runtime.formatting import duration, percent, short_number

_VERSIONS = {"paceline_version": "Paceline", "python_version": "Python", "torch_version": "torch"}


def head(run: Run) -> str:
    """Write the name of the run, its command and the facts about it."""
    started = run.state.started
    name = shown((started.run if started else "") or run.directory.resolve().name, 120)
    pill, css = _state(run)
    parts = [
        '<p class="over">Paceline run report</p>',
        f'<div class="head"><h1>{name}</h1><span class="pill {css}">{pill}</span></div>',
    ]
    if started and started.command:
        parts.append(f'<code class="command">{shown(started.command, 4 * TEXT_LIMIT)}</code>')
    rows = "".join(f"<div><dt>{what}</dt><dd>{fact}</dd></div>" for what, fact in _facts(run))
    return "".join(parts) + (f'<dl class="facts">{rows}</dl>' if rows else "")


def _state(run: Run) -> tuple[str, str]:
    if run.state.ended is None:
        return "running or killed", "open"
    code = run.state.ended.exit_code
    return ("finished", "good") if code == 0 else (f"exit code {shown(code, 20)}", "bad-pill")


def _facts(run: Run) -> list[tuple[str, str]]:
    started = run.state.started
    facts = []
    if started:
        facts += [
            ("script", shown(started.script, 200)),
            ("started", _moment(started.started)),
        ]
    took = duration(run.wall_s)
    facts += [("took", took if run.state.ended else f"{took} so far recorded")]
    if started:
        facts += [
            ("workers", shown(started.workers)),
            ("servers", shown(started.servers) if started.servers else ""),
            ("data workers", shown(started.data_workers) if started.data_workers else ""),
            ("pace", _settled(run, "pace", started.pace) or "chosen by the script"),
            ("mesh", _settled(run, "mesh", started.mesh)),
            ("host", shown(started.host)),
        ]
    if run.state.ended and run.state.ended.words:
        facts += [("end", shown(run.state.ended.words.removeprefix("paceline: "), 200))]
    facts += [("versions", _versions(run.settings, started.version if started else ""))]
    return [(what, fact) for what, fact in facts if fact]


def _settled(run: Run, name: str, told: str) -> str:
    """Return what the job was told; else what its script has chosen, as config.json has it."""
    chosen = [one.value for one in run.settings if one.name == name and one.origin == "script"]
    return shown(told or "".join(value for value in chosen[:1] if value != "none"), 120)


def _moment(iso: str) -> str:
    try:
        moment = datetime.fromisoformat(iso.replace("Z", "+00:00"))
        if moment.tzinfo is not None:
            moment = moment.astimezone(timezone.utc)
        return f"{moment:%Y-%m-%d %H:%M} UTC"
    except (ValueError, OverflowError):
        return shown(iso)


def _versions(settings: list[Setting], of_paceline: str) -> str:
    found = {one.name: one.value for one in settings if one.name in _VERSIONS}
    if of_paceline:
        found["paceline_version"] = of_paceline
    told = [f"{name} {shown(found[key], 30)}" for key, name in _VERSIONS.items() if key in found]
    return ", ".join(told)


def tiles(run: Run) -> str:
    """Write the numbers that people look for first."""
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
        return (
            "samples per second",
            short_number(mean),
            f"{each}{short_number(run.state.samples)} in all",
        )
    steps_s = run.state.steps / workers / trained_s
    return "steps per second", short_number(steps_s), "samples were not counted"


def main_loss(curves: dict[str, Curve]) -> str | None:
    """Choose which value is the loss: the one of that name, else the first that has it in it."""
    losses = [name for name in curves if is_loss(name)]
    exact = [name for name in losses if name.lower() == "loss"]
    return next(iter(exact or losses), None)


def _final_loss(run: Run) -> _Tile:
    name = main_loss(run.history.values)
    if name is None:
        return None
    curve = run.history.values[name]
    label = "final loss" if name.lower() == "loss" else f"final {shown(name, 24)}"
    final = sum(curve.last.values()) / len(curve.last)
    bins = curve.all.in_order()
    if not bins:
        return label, "not finite", "no value was finite"
    first, low = short_number(bins[0].mean), short_number(min(one.low for one in bins))
    if not math.isfinite(final):
        return label, "not finite", f"from {first}, lowest {low}"
    return label, short_number(final), f"from {first}, lowest {low}"


def _waiting(run: Run) -> _Tile:
    times = run.state.waits.workers.values()
    took_s = sum(one.took_s for one in times)
    if took_s <= 0:
        return None
    input_s = sum(one.input_s for one in times)
    more = f"of the workers' time; {percent(input_s / took_s)} for input"
    share = sum(one.wait_s for one in times) / took_s
    return "waiting for others", percent(share), more


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
    """Name who or what held the workers up; "" where there is nobody to compare."""
    if len(run.state.waits.workers) < 2:
        return ""
    slowest = run.state.slowest()
    if slowest is None:
        return "No worker held the others up."
    return _accusation(slowest)


def _accusation(slowest: Slowest) -> str:
    lost = f"{percent(slowest.cost)} of all workers' time went into waiting."
    if slowest.worker is None:
        return (
            f"No worker stands out; it is the exchange itself (network, servers) that takes: {lost}"
        )
    why = {
        "input": "it waits longer for its input",
        "compute": "it computes longer",
    }.get(slowest.cause, shown(slowest.cause))
    times = usable(slowest.times)
    factor = short_number(times) if times is not None and times < 1e4 else "very many"
    return (
        f"<strong>Worker {slowest.worker} is the slowest: {why}.</strong> Without waiting, its"
        f" steps take {factor} times as long as those of the others; {lost}"
    )
