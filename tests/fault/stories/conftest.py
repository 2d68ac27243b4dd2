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
        told.record(record_property)
