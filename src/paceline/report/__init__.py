"""A page about a run, made from its directory: plots and words in one file.

    events.jsonl, config.json ── reading.py ── gathering.py ──┐  headline.py
                  trace.json ── tracing.py ── lanes.py ──────┴─ sections.py ── page.py
                                                                 plots/: one module for each kind

The package has the name of a function of its parent, `pl.report`, and Python puts a package that
was imported over such a name. So it can be called, and then is that function.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _AlsoTheFunction(ModuleType):
    def __call__(self, *step: Any, **values: Any) -> None:
        from paceline.job import report  # needs torch, which making pages does not

        report(*step, **values)


sys.modules[__name__].__class__ = _AlsoTheFunction
