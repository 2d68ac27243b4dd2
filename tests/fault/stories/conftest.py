"""The `story` fixture: a job to act on; what it measures goes into the test's report."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from story import Story


@pytest.fixture
def story(tmp_path: Path, record_property) -> Iterator[Story]:
    told = Story(tmp_path)
    try:
        yield told
    finally:
        told.close()
        figures = told.figures
        for name, values in (("detection", figures.detection_s), ("resume", figures.resume_s)):
            for value in values:
                record_property(name, f"{value:.3f}")
        for note in figures.notes:
            record_property("note", note)
