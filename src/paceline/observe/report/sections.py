"""The sections of the page with their plots; a section without data is left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paceline.observe.report import row_plots as plots
from paceline.observe.report.canvas import escaped
from paceline.observe.report.charts import COLOURS, XAxis, curve_plot, rate_plot, share_plot
from paceline.observe.report.history import COMPUTE, INPUT, SAMPLES, STEPS, WAIT, main_loss
from paceline.observe.report.reading import Run
from paceline.observe.report.series import Curve
from paceline.observe.report.trace_lanes import LANE_KINDS, timeline_from_times
from paceline.observe.telemetry.events import (
    CODEC_ERROR,
    COPY_SHARE,
    DEVICE_MEMORY,
    DEVICE_TIME,
    LEARNING_RATE,
    STALENESS,
)
from paceline.observe.telemetry.staleness import TableReport, WorkerReport, merge

_MAX_VALUES = 8  # plots of values of the script besides its loss
_MAX_TABLES = 4
_MAX_MARKS = 24
_KNOWN = {  # values that workers report automatically: title, axis, explanation
    LEARNING_RATE: ("Learning rate", "lr", "Of the optimizer."),
    STALENESS: ("Staleness", "versions", "Versions of other workers that an update had not seen."),
    DEVICE_TIME: ("Device time", "ms", "Time of the device from one step to the next."),
    DEVICE_MEMORY: ("Device memory", "MB", "The most that each worker has used so far."),
    COPY_SHARE: ("Copies", "%", "Share of the device's time: copies between host and device."),
    CODEC_ERROR: ("Codec error", "share", "Share of a gradient that is left for a later step."),
}


def figure(title: str, drawing: str, more: str = "", legend: str = "", css: str = "") -> str:
    """Return a plot with its title. `title` and `more` are HTML."""
    about = f"<p>{more}</p>" if more else ""
    classes = f' class="{css}"' if css else ""
    return (
        f"<figure{classes}><figcaption><h3>{title}</h3>{about}</figcaption>"
        f'<div class="scroll">{drawing}</div>{legend}</figure>'
    )


def section(title: str, figures: Iterable[str]) -> str:
    """Return plots under a heading; "" without plots."""
    inside = "".join(figures)
    return f'<section><h2>{title}</h2><div class="grid">{inside}</div></section>' if inside else ""


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    items = "".join(f'<li><i class="{css}"></i>{label}</li>' for css, label in entries)
    return f'<ul class="legend">{items}</ul>' if items else ""


def _lines_legend(curve: Curve, role: str = "worker") -> str:
    if curve.is_crowded:
        return _legend([("k-compute", f"range over all {role}s"), ("stroke ink", "mean")])
    if len(curve.workers) < 2:
        return ""
    names = sorted(curve.workers)
    if len(names) > COLOURS:
        return _legend([("stroke c0", f"each {role}"), ("stroke ink", "mean")])
    lines = [(f"stroke c{at}", f"{role} {name}") for at, name in enumerate(names)]
    return _legend([*lines, ("stroke ink", "mean")] if role == "worker" else lines)


def _kinds_legend(kinds: Iterable[str]) -> str:
    return _legend([(f"k-{kind}", kind) for kind in kinds])


def _marks(run: Run) -> list[float]:
    """Return when the membership changed, for dashed lines in all plots over time."""
    entries = [*run.history.first_entries, *run.history.last_entries]
    return [one.t for one in entries if one.kind in ("lost", "joined")][:_MAX_MARKS]


def _over_time(curve: Curve) -> XAxis:
    bins = curve.all.in_order()
    return XAxis.of_time(curve.all.origin, max(max(one.low_x, one.high_x) for one in bins))


def _about(curve: Curve, text: str, marks: Sequence[float] = ()) -> str:
    """Return an explanation of a plot, with the meaning of its dashed and red lines."""
    if marks:
        text += " Dashed: a worker or server was lost or joined."
    if curve.first_bad is not None:
        values = "1 value was" if curve.num_bad == 1 else f"{curve.num_bad:,} values were"
        text += f" {values} not finite; red: the first one, of worker {curve.first_bad[1]}."
    return text


def _about_lines(curve: Curve) -> str:
    if curve.is_crowded:
        return "Mean and range of all workers."
    return "A line per worker, and their mean." if len(curve.workers) > 1 else "As reported."


def learning(run: Run) -> str:
    """Return the section with loss, learning rate and other values of the script."""
    name = main_loss(run.history.values)
    figures = []
    if name is not None and run.history.values[name].all.bins:
        figures += _losses(run, name)
    others = [one for one in run.history.values if one != name]
    others.sort(key=lambda one: one != LEARNING_RATE)
    drawn = [one for one in others if run.history.values[one].all.bins][:_MAX_VALUES]
    figures += [_value(run, one) for one in drawn]
    made = section("Learning", figures)
    left_out = len(others) - len(drawn) + len(run.history.left_out)
    if left_out and made:
        values = "1 more value was" if left_out == 1 else f"{left_out} more values were"
        made += f'<p class="more">{values} reported.</p>'
    return made


def _losses(run: Run, name: str) -> list[str]:
    curve = run.history.values[name]
    label = escaped(name, 24)
    title = label[:1].upper() + label[1:]
    legend, marks = _lines_legend(curve), _marks(run)
    over_time = curve_plot(
        curve, _over_time(curve), title=f"{title} over time", y_label=label, marks=marks
    )
    figures = [
        figure(f"{title} over time", over_time, _about(curve, _about_lines(curve), marks), legend)
    ]
    unit = "samples" if run.state.samples else "steps"
    other = (run.history.over_samples if run.state.samples else run.history.over_steps)[name]
    bins = other.all.in_order()
    x = XAxis.of_counts(unit, 0.0, max(max(one.low_x, one.high_x) for one in bins))
    title = f"{title} over {unit}"
    drawing = curve_plot(other, x, title=title, y_label=label)
    about = "Samples of all workers together." if run.state.samples else "Steps of each worker."
    return [*figures, figure(title, drawing, about, legend)]


def _value(run: Run, name: str) -> str:
    curve = run.history.values[name]
    title, label, about = _KNOWN.get(name) or (
        escaped(name),
        escaped(name, 24),
        _about_lines(curve),
    )
    if name == LEARNING_RATE:  # it is the same everywhere: one line
        curve.workers, curve.is_crowded = {0: curve.all}, False
    marks = _marks(run)
    drawing = curve_plot(curve, _over_time(curve), title=title, y_label=label, marks=marks)
    return figure(title, drawing, _about(curve, about), _lines_legend(curve))


def speed(run: Run) -> str:
    """Return the section with throughput, shares of time and one step in detail."""
    # With few steps per bin, the plot would show aliasing between steps and bins.
    run.history.rate.coarsen(max(20, run.state.steps // max(len(run.state.waits.workers), 1) // 4))
    stretches = [s for s in run.history.rate.stretches() if s[1] > s[0]]
    figures = []
    if stretches:
        kind, unit = (SAMPLES, "samples/s") if run.state.samples else (STEPS, "worker steps/s")
        x = XAxis.of_time(stretches[0][0], stretches[-1][1])
        rates = [(begin, end, amounts[kind] / (end - begin)) for begin, end, amounts in stretches]
        drawing = rate_plot(rates, x, title="Throughput", y_label=unit, marks=_marks(run))
        figures.append(figure("Throughput", drawing, "All workers together."))
        kinds = ("compute", "input", "wait")
        shares = [(a, b, (s[COMPUTE], s[INPUT], s[WAIT])) for a, b, s in stretches]
        drawing = share_plot(shares, kinds, x, title="Time of all workers")
        legend = _kinds_legend(kinds)
        figures.append(
            figure("How the workers spent their time", drawing, "All workers together.", legend)
        )
    workers = run.state.waits.workers
    if rows := plots.choose_workers(workers):
        more = "The mean step of each worker."
        if len(rows) < len(workers):
            more = f"{len(rows)} of {len(workers)} workers: those that wait least, and most."
        drawing = plots.time_bars(workers, rows)
        legend = _kinds_legend(plots.STEP_PARTS)
        figures.append(figure("Where the time of a step goes", drawing, more, legend))
    figures += _waiting(run)
    figures += _one_step(run)
    return section("Speed", figures)


def _one_step(run: Run) -> list[str]:
    times = run.history.typical.choose()
    rows = plots.choose_workers(run.state.waits.workers)
    step = run.trace or timeline_from_times({one: times[one] for one in rows if one in times})
    if step is None:
        return []
    lanes, more = step.lanes[: plots.MAX_LANES], step.caption
    if len(lanes) < len(step.lanes) or (run.trace is None and len(lanes) < len(times)):
        more += f" {len(lanes)} of {max(len(step.lanes), len(times))} processes."
    there = {bar.kind for lane in lanes for bar in lane.bars}
    legend = _kinds_legend(kind for kind in LANE_KINDS if kind in there)
    drawing = plots.gantt(step, lanes)
    return [
        figure("One step, all workers on one clock", drawing, escaped(more, 300), legend, "wide")
    ]


def _waiting(run: Run) -> list[str]:
    """Return the matrix of waits: counted by servers, else from the times of the steps."""
    matrix = run.state.waited()
    source = "Counted by the servers."
    if not run.state.tables:
        source = (
            "In each step, all workers wait for the one with the longest input and computation."
        )
    if not any(time_s > 0 for waited in matrix.values() for time_s in waited.values()):
        return []
    workers = plots.choose_waiting_workers(matrix)
    if len(workers) >= plots.MAX_SQUARES:
        source += f" The {len(workers)} workers with the longest waits."
    drawing = plots.wait_matrix(matrix, workers)
    return [figure("Waits between workers", drawing, source, "", "natural")]


def _staleness(run: Run) -> list[str]:
    """Return histograms of the staleness of each worker's updates, by table."""
    tables = [table for table in merge(list(run.state.tables.values())) if _counted(table)]
    figures = []
    for table in tables[:_MAX_TABLES]:
        counted = _counted(table)
        stalest = sorted(counted, key=lambda one: -one.mean_staleness)[: plots.MAX_HISTOGRAMS]
        more = "Versions of other workers that an update had not seen."
        if len(stalest) < len(counted):
            more += f" The {len(stalest)} stalest of {len(counted)} workers."
        title = f"Staleness of table {escaped(table.table)}"
        drawing = plots.staleness_rows(sorted(stalest, key=lambda one: one.worker), title)
        figures.append(figure(title, drawing, more))
    return figures


def _counted(table: TableReport) -> list[WorkerReport]:
    return [worker for worker in table.workers if sum(worker.staleness.values())]


def servers(run: Run) -> str:
    """Return the section with staleness, and load and queue of the servers over time."""
    titles = {
        "busy": ("Load", "busy (%)", "Share of the time spent on requests."),
        "queued": ("Queue", "requests", "Longest queue seen."),
        "requests_s": ("Requests", "requests/s", "Answered by each server."),
        "bytes_s": ("Data", "MB/s", "Tensors in the requests."),
    }
    figures = _staleness(run)
    for name, (title, label, about) in titles.items():
        curve = run.history.servers.get(name)
        if curve is None or not curve.all.bins:
            continue
        x = _over_time(curve)
        drawing = curve_plot(curve, x, title=title, y_label=label, is_load=True)
        figures.append(figure(title, drawing, about, _lines_legend(curve, "server")))
    return section("Servers", figures)
