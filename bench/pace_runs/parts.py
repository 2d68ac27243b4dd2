"""Runs the parts that were asked for, and keeps what comes of them beside what was there before."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.namespaces import can_shape
from harness.report import machine

from pace_runs.measure import Part
from pace_runs.report import render

WITH_LINKS = ("links", "throughput")
Measure = Callable[[Path], Part]  # with a directory that is gone afterwards


def carry_out(
    parts: Mapping[str, Measure], kept: Path, about: Mapping[str, Any], *, quick: bool
) -> None:
    """Measure the parts; write JSON and Markdown after each, where it replaces its former self."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    content = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    for name, measure in parts.items():
        if name in WITH_LINKS and (why := can_shape()):
            print(f"{name}: left out: {why}")
            continue
        content[name] = _measured(name, measure, quick=quick)
        content |= about
        kept.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        kept.with_suffix(".md").write_text(render(content), encoding="utf-8")
    print(f"\n{render(content)}\nwritten to {kept} and {kept.with_suffix('.md')}")


def _measured(name: str, measure: Measure, *, quick: bool) -> Part:
    """Run one part; say when it began, how busy the machine was, and how long it took."""
    facts = machine()
    print(f"\n{name}: machine {facts['idle_before']:.0%} idle, {facts['commit']}", flush=True)
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="paceline-paces-") as directory:
        found = measure(Path(directory))
    print(f"{name}: {time.monotonic() - started_s:.0f} s", flush=True)
    return {**found, "machine": {**facts, "quick": quick}}


def chosen(parts: Mapping[str, Measure], names: Sequence[str] | None) -> dict[str, Measure]:
    """Return the parts that were asked for; all by default."""
    return {name: parts[name] for name in names or parts}
