"""The gate itself, on a small example: the device finds each removed wait, record and hold."""

from __future__ import annotations

from pathlib import Path

import pytest
from mutation_points import mutants_of

from support.devices import run_alone_on_device
from support.ranks import RanksFailed

EXAMPLE = """
import torch

class Copied:
    def __init__(self, done, memory):
        self.event, self.memory = done, memory

def run():
    side, ready, done = torch.Stream("laggard"), torch.Event("laggard"), torch.Event("laggard")
    x = torch.arange(3000.0, device="laggard") * 2
    host = torch.empty(3000, pin_memory=True)
    ready.record(torch.accelerator.current_stream())
    side.wait_event(ready)
    with side:
        host.copy_(x, non_blocking=True)
        done.record(side)
    copied = Copied(done, (x, None))
    del x
    torch.full((3000,), 7.0, device="laggard")
    copied.event.synchronize()
    return host.sum().item()
"""


def example(tmp_path: Path) -> Path:
    path = tmp_path / "example.py"
    path.write_text(EXAMPLE)
    return path


def run_source(source: str) -> float:
    names: dict[str, object] = {}
    exec(source, names)
    return names["run"]()  # type: ignore[operator]


def test_places_are_found_by_what_they_do(tmp_path):
    found = [(m.kind, m.text) for m in mutants_of(example(tmp_path))]
    assert found == [
        ("record", "ready.record(torch.accelerator.current_stream())"),
        ("stream", "side.wait_event(ready)"),
        ("record", "done.record(side)"),
        ("hold", "x of Copied"),
        ("hold", "None of Copied"),
        ("host", "copied.event.synchronize()"),
    ]
    for mutant in mutants_of(example(tmp_path)):
        changed, original = mutant.source().splitlines(), EXAMPLE.splitlines()
        differing = [i for i, (a, b) in enumerate(zip(changed, original, strict=True)) if a != b]
        assert differing == ([] if mutant.text == "None of Copied" else [mutant.line - 1])


def test_the_device_finds_each_of_them(tmp_path):
    assert run_alone_on_device(run_source, EXAMPLE, schedule="lazy") == 2 * 2999 * 1500
    for mutant in mutants_of(example(tmp_path)):
        if mutant.text == "None of Copied":  # nothing is held there
            assert run_alone_on_device(run_source, mutant.source(), schedule="lazy")
            continue
        with pytest.raises((RanksFailed, AssertionError)):
            value = run_alone_on_device(run_source, mutant.source(), schedule="lazy")
            assert value == 2 * 2999 * 1500
