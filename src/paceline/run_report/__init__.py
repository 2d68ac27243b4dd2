"""A page about a run, made from its directory: plots and words in one file.

events.jsonl, config.json ── reading.py ── history.py ──┐  headline.py
              trace.json ── tracing.py ────────────────┴─ sections.py ── page.py
                                          the plots: charts.py, rows.py, made of canvas.py
"""
