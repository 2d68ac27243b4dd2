"""`paceline report RUN_DIR`: make a page about a run, one file to open in any browser."""

from __future__ import annotations

import sys
from pathlib import Path

from paceline.observe.report.page import REPORT_FILE, render, write
from paceline.observe.report.reading import read_run


def report(directory: Path, output: Path | None) -> int:
    """Write the page and print where it is; UsageError when there is no run, or no place for it."""
    page = render(read_run(directory))
    path = directory / REPORT_FILE if output is None else output
    write(page, path)
    sys.stdout.write(f"{path}\n")
    return 0
