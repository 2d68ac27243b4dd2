"""`paceline report`: a page about a run, made from its directory, in one file.

events.jsonl, config.json ── reading.py ── history.py ──┐  headline.py
              trace.json ── trace_lanes.py ────────────┴─ sections.py ── page.py
                                          the plots: charts.py, rows.py, made of canvas.py
"""
