"""The tables: what has been measured, in Markdown, each with how it was measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pace_runs.figures import Noise, rank, sent_per_step, steps_per_s, target_of
from pace_runs.plans import CHANCE, NUM_WORKERS, SLOW_FACTOR
from pace_runs.table import REFERENCE

_TITLES = {
    "steady": f"One worker always {SLOW_FACTOR:g} x slower",
    "stalls": f"Random stalls: any step {SLOW_FACTOR:g} x as long, probability {CHANCE:.0%}",
}


def render(content: Mapping[str, Any]) -> str:
    """Return the whole report; parts that were not measured are missing."""
    lines = [f"# {content.get('title', 'Paces')}", ""]
    parts = {"loss": _loss, "stragglers": _stragglers, "links": _links, "throughput": _throughput}
    for name, write in parts.items():
        if name in content:
            lines += [*write(content[name]), "", _machine(content[name]["machine"]), ""]
    if notes := content.get("left_out"):
        lines += ["Left out, because this version does not support them:", ""]
        lines += [f"- {note}" for note in notes]
    return "\n".join(lines).rstrip() + "\n"


def _machine(facts: Mapping[str, Any]) -> str:
    words = f"{facts['cores']} cores of {facts['cpu']}, {facts['idle_before']:.0%} idle before"
    return f"*{words}; {facts['date']}, {facts['commit']}{', --quick' * facts['quick']}.*"


def _loss(part: Mapping[str, Any]) -> Iterable[str]:
    yield "## Final loss with the same number of samples"
    yield ""
    yield (
        f"{part['workers']} workers on one host, one thread each; held-out loss in nats. One"
        f" standard deviation (sd) is that of {REFERENCE} over its seeds. All runs use the"
        " optimizer settings of the task, except where noted."
    )
    for task, found in part["tasks"].items():
        steps, batch = part["steps"][task], part["batch"][task]
        noise = _noise(found)
        yield ""
        yield f"### {task}: {steps} steps of {part['workers']} x {batch} samples"
        yield ""
        if noise is None:
            yield f"{REFERENCE} has failed, so there is nothing to compare with."
            continue
        yield f"{REFERENCE}: {noise.mean:.4f}, sd {noise.sd:.4f}."
        yield ""
        yield "| pace | loss (seeds) | compared with allreduce | samples/s | note |"
        yield "|---|---|---|---|---|"
        for label, results in found.items():
            at_once = batch * (part["workers"] if label == "one process" else 1)
            note = part.get("notes", {}).get(label, "")
            yield _loss_row(label, results, noise, at_once, note)


def _noise(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> Noise | None:
    losses = _final(found[REFERENCE])
    return Noise.of(losses) if losses else None


def _final(results: Sequence[Mapping[str, Any]]) -> list[float]:
    return [result["curve"][-1][2] for result in results if "failed" not in result]


def _loss_row(
    label: str, results: Sequence[Mapping[str, Any]], noise: Noise, batch: int, note: str
) -> str:
    losses = _final(results)
    if not losses:
        return f"| `{label}` | failed | | | {note} |"
    done = [result for result in results if "failed" not in result]
    rate = batch * sum(steps_per_s(r["steps"], r["s"]) for r in done) / len(done)
    loss = f"{math.fsum(losses) / len(losses):.4f} ({len(losses)})"
    return f"| `{label}` | {loss} | {noise.compare(losses)} | {rate:.0f} | {note} |"


def _stragglers(part: Mapping[str, Any]) -> Iterable[str]:
    yield "## Time to a loss with slow workers"
    yield ""
    yield (
        f"The book, {NUM_WORKERS} workers on one host, {part['steps'] * NUM_WORKERS} batches in"
        f" all. A step sleeps {part['sleep_s'] * 1e3:g} ms in place of a longer computation, so"
        " that the number of cores is not the limit. Free-running workers take as many of the"
        " batches as their speed allows. One run of each."
    )
    for name, found in part["scenarios"].items():
        yield from _ranking(_TITLES[name], found, with_bytes=False)


def _links(part: Mapping[str, Any]) -> Iterable[str]:
    yield "## Time to a loss on slow links"
    yield ""
    yield (
        f"The book, {NUM_WORKERS} network namespaces with one worker each, connected by a bridge;"
        f" tbf shapes every link in both directions. A step sleeps {part['sleep_s'] * 1e3:g} ms."
        " Paces with servers have one server next to each worker. The model has 0.4 MB and is sent"
        " in one bucket, so no communication overlaps with backward. One run of each."
    )
    for rate, found in part["rates_mbit"].items():
        yield from _ranking(f"{rate} Mbit/s", found, with_bytes=True)


def _ranking(
    title: str, found: Mapping[str, Mapping[str, Any]], *, with_bytes: bool
) -> Iterable[str]:
    yield ""
    yield f"### {title}"
    yield ""
    done = {label: result for label, result in found.items() if "failed" not in result}
    if REFERENCE not in done:
        yield f"{REFERENCE} has failed, so there is no loss to compare at."
        return
    target = target_of(done[REFERENCE]["curve"])
    places = rank({label: result["curve"] for label, result in done.items()}, target)
    reference_s = dict(places)[REFERENCE]
    more = " sent per step, KB |" if with_bytes else ""
    yield f"| rank | pace | s to {target:.2f} | allreduce = 1 | last loss | steps/s of all |{more}"
    yield "|---|---|---|---|---|---|" + "---|" * with_bytes
    for number, (label, at_s) in enumerate(places, 1):
        result = done[label]
        took = f"{at_s:.1f}" if at_s is not None else "not reached"
        ratio = f"{at_s / reference_s:.2f}" if at_s is not None and reference_s else ""
        rate = steps_per_s(result["steps"], result["s"])
        row = f"| {number} | `{label}` | {took} | {ratio} | {result['curve'][-1][2]:.3f} |"
        row += f" {rate:.0f} |"
        if with_bytes:
            row += f" {sent_per_step(result['steps'], result['sent']) / 1e3:.1f} |"
        yield row
    for label in [label for label in found if label not in done]:
        yield f"| | `{label}` | failed | | | |" + " |" * with_bytes


def _throughput(part: Mapping[str, Any]) -> Iterable[str]:
    yield "## Throughput and bytes at 100 Mbit/s"
    yield ""
    yield (
        f"As above, but steps sleep {part['sleep_s'] * 1e3:g} ms. Independent: the same script in"
        " processes that do not communicate. Medians of the rounds."
    )
    yield ""
    yield "| pace | steps/s of all | of independent | sent per step, KB | of allreduce |"
    yield "|---|---|---|---|---|"
    rows = part["rows"]
    alone, reference = rows["independent"], rows[REFERENCE]
    for label, row in rows.items():
        if "failed" in row:
            yield f"| `{label}` | failed | | | |"
            continue
        share = _share(row, alone, "steps_per_s")
        sent = _share(row, reference, "sent_per_step")
        inverse = f" (1/{1 / sent:.1f})" if sent > 1e-4 else ""
        yield (
            f"| `{label}` | {row['steps_per_s']:.0f} | {share:.1%} |"
            f" {row['sent_per_step'] / 1e3:.2f} | {sent:.4f}{inverse} |"
        )


def _share(row: Mapping[str, Any], of: Mapping[str, Any], name: str) -> float:
    return row[name] / of[name] if of.get(name) else math.nan
