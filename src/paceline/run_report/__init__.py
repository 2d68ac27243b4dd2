"""A page about a run, made from its directory: plots and words in one file.

events.jsonl, config.json ── reading.py ── gathering.py ──┐  headline.py
              trace.json ── tracing.py ── lanes.py ──────┴─ sections.py ── page.py
                                                             plots/: one module for each kind
"""
