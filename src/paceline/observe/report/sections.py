"""The parts of the page, each with its plots; a part without data is left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paceline.observe.report import rows as plots
from paceline.observe.report.canvas import shown
from paceline.observe.report.charts import COLOURS, XAxis, curve_plot, rate_plot, share_plot
from paceline.observe.report.headline import main_loss
from paceline.observe.report.history import COMPUTE, INPUT, SAMPLES, STEPS, WAIT
from paceline.observe.report.reading import Run
from paceline.observe.report.series import Curve
from paceline.observe.report.trace_lanes import LANE_KINDS, picture_of
from paceline.observe.telemetry.events import CODEC_ERROR, LEARNING_RATE, STALENESS
from paceline.observe.telemetry.staleness import TableReport, WorkerReport, merge

_MAX_VALUES = 8  # plots of what a script reports beside its loss
_MAX_TABLES = 4
_MAX_MARKS = 24
_KNOWN = {  # values that workers report by themselves: title, axis, and what it is
    LEARNING_RATE: ("Learning rate", "lr", "Of the optimizer."),
    STALENESS: ("Staleness", "versions", "By others, that an update had not seen."),
    CODEC_ERROR: ("Error of the codec", "share", "Of a gradient, left for a later step."),
}


def figure(title: str, drawing: str, more: str = "", legend: str = "", css: str = "") -> str:
    """Frame a plot. `title` and `more` are HTML."""
    about = f"<p>{more}</p>" if more else ""
    classes = f' class="{css}"' if css else ""
    return (
        f"<figure{classes}><figcaption><h3>{title}</h3>{about}</figcaption>"
        f'<div class="scroll">{drawing}</div>{legend}</figure>'
    )


def section(title: str, figures: Iterable[str]) -> str:
    """Put plots under a heading; "" without plots."""
    inside = "".join(figures)
    return f'<section><h2>{title}</h2><div class="grid">{inside}</div></section>' if inside else ""


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    items = "".join(f'<li><i class="{css}"></i>{words}</li>' for css, words in entries)
    return f'<ul class="legend">{items}</ul>' if items else ""


def _lines_legend(curve: Curve, who: str = "worker") -> str:
    if curve.is_crowded:
        return _legend([("k-compute", f"range over all {who}s"), ("stroke ink", "mean")])
    if len(curve.workers) < 2:
        return ""
    names = sorted(curve.workers)
    if len(names) > COLOURS:
        return _legend([("stroke c0", f"each {who}"), ("stroke ink", "mean")])
    told = [(f"stroke c{at}", f"{who} {name}") for at, name in enumerate(names)]
    return _legend([*told, ("stroke ink", "mean")] if who == "worker" else told)


def _kinds_legend(kinds: Iterable[str]) -> str:
    return _legend([(f"k-{kind}", kind) for kind in kinds])


def _marks(run: Run) -> list[float]:
    """Return when the membership changed, for lines in all plots over time."""
    told = [*run.history.first_happenings, *run.history.last_happenings]
    return [one.t for one in told if one.kind in ("lost", "joined")][:_MAX_MARKS]


def _over_time(curve: Curve) -> XAxis:
    bins = curve.all.in_order()
    return XAxis.of_time(curve.all.origin, max(max(one.low_x, one.high_x) for one in bins))


def _about(curve: Curve, words: str, marks: Sequence[float] = ()) -> str:
    """Say what a plot shows, and what its dashed and red lines mean."""
    if marks:
        words += " Dashed: one was lost, or joined."
    if curve.first_bad is not None:
        values = "1 value was" if curve.num_bad == 1 else f"{curve.num_bad:,} values were"
        words += f" {values} not finite; red: the first one, of worker {curve.first_bad[1]}."
    return words


def _who(curve: Curve) -> str:
    if curve.is_crowded:
        return "Mean and range of all workers."
    return "A line per worker, and their mean." if len(curve.workers) > 1 else "As reported."


def learning(run: Run) -> str:
    """Loss, learning rate, and whatever else the script reports."""
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
    label = shown(name, 24)
    title = label[:1].upper() + label[1:]
    legend, marks = _lines_legend(curve), _marks(run)
    over_time = curve_plot(
        curve, _over_time(curve), title=f"{title} over time", y_label=label, marks=marks
    )
    figures = [figure(f"{title} over time", over_time, _about(curve, _who(curve), marks), legend)]
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
    title, label, about = _KNOWN.get(name) or (shown(name), shown(name, 24), _who(curve))
    if name == LEARNING_RATE:  # it is the same everywhere: one line
        curve.workers, curve.is_crowded = {0: curve.all}, False
    marks = _marks(run)
    drawing = curve_plot(curve, _over_time(curve), title=title, y_label=label, marks=marks)
    return figure(title, drawing, _about(curve, about), _lines_legend(curve))


def speed(run: Run) -> str:
    """Throughput, where the time went, and one step in detail."""
    # With less than some steps in each bin, the plot would show how steps and bins meet.
    run.history.rate.coarsen(max(20, run.state.steps // max(len(run.state.waits.workers), 1) // 4))
    stretches = [s for s in run.history.rate.stretches() if s[1] > s[0]]
    figures = []
    if stretches:
        kind, unit = (SAMPLES, "samples/s") if run.state.samples else (STEPS, "worker steps/s")
        x = XAxis.of_time(stretches[0][0], stretches[-1][1])
        rates = [(begin, end, told[kind] / (end - begin)) for begin, end, told in stretches]
        drawing = rate_plot(rates, x, title="Throughput", y_label=unit, marks=_marks(run))
        figures.append(figure("Throughput", drawing, "Of all workers together."))
        kinds = ("compute", "input", "wait")
        shares = [(a, b, (told[COMPUTE], told[INPUT], told[WAIT])) for a, b, told in stretches]
        drawing = share_plot(shares, kinds, x, title="Time of all workers")
        legend = _kinds_legend(kinds)
        figures.append(figure("What the workers did", drawing, "All of them together.", legend))
    workers = run.state.waits.workers
    if rows := plots.chosen(workers):
        more = "A mean step of each worker."
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
    rows = plots.chosen(run.state.waits.workers)
    picture = run.trace or picture_of({who: times[who] for who in rows if who in times})
    if picture is None:
        return []
    lanes, more = picture.lanes[: plots.MOST_LANES], picture.words
    if len(lanes) < len(picture.lanes) or (run.trace is None and len(lanes) < len(times)):
        more += f" {len(lanes)} of {max(len(picture.lanes), len(times))} processes."
    there = {bar.kind for lane in lanes for bar in lane.bars}
    legend = _kinds_legend(kind for kind in LANE_KINDS if kind in there)
    drawing = plots.gantt(picture, lanes)
    return [figure("One step, all workers on one clock", drawing, shown(more, 300), legend, "wide")]


def _waiting(run: Run) -> list[str]:
    """Who waited for whom: as servers counted it, else as the times of the steps tell it."""
    matrix = run.state.waited()
    source = "As the servers counted it."
    if not run.state.tables:
        source = "In each step, all wait for the worker that needed longest for its own part."
    if not any(time_s > 0 for waited in matrix.values() for time_s in waited.values()):
        return []
    workers = plots.busiest(matrix)
    if len(workers) >= plots.MOST_SQUARES:
        source += f" The {len(workers)} workers with most of it."
    drawing = plots.wait_matrix(matrix, workers)
    return [figure("Who waited for whom", drawing, source, "", "natural")]


def _staleness(run: Run) -> list[str]:
    """How stale the updates of each worker were, table by table."""
    tables = [table for table in merge(list(run.state.tables.values())) if _counted(table)]
    figures = []
    for table in tables[:_MAX_TABLES]:
        counted = _counted(table)
        stalest = sorted(counted, key=lambda one: -one.mean_staleness)[: plots.MOST_HISTOGRAMS]
        more = "Versions by others that an update had not seen."
        if len(stalest) < len(counted):
            more += f" The {len(stalest)} stalest of {len(counted)} workers."
        title = f"Staleness of table {shown(table.table)}"
        drawing = plots.staleness_rows(sorted(stalest, key=lambda one: one.worker), title)
        figures.append(figure(title, drawing, more))
    return figures


def _counted(table: TableReport) -> list[WorkerReport]:
    return [worker for worker in table.workers if sum(worker.staleness.values())]


def servers(run: Run) -> str:
    """How stale updates were, and load and queue of the servers over time."""
    titles = {
        "busy": ("Load", "busy (%)", "Share of the time that went into requests."),
        "queued": ("Queue", "requests", "Most that were found waiting at one time."),
        "requests_s": ("Requests", "requests/s", "That each server answered."),
        "bytes_s": ("Data", "MB/s", "Tensors that came with the requests."),
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
