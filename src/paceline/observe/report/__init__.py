"""`paceline report`: a page about a run, made from its directory, in one file.

events.jsonl, config.json ── reading.py ── history.py, series.py ──┐
              trace.json ── trace_lanes.py ─────────────────────────┴─ sections.py ── page.py
                              the plots: charts.py, row_plots.py, made of canvas.py; report.css
"""
