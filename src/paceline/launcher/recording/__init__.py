"""What is kept of a run: its directory, TensorBoard files, and a Prometheus endpoint on request.

    launcher's loop ── events, output ──► Recorder ── a thread ──► files.py  *.log, events.jsonl
                                                      │
                                                      └ sampling.py: a sample per second
                                                             ├► tensorboard.py
                                                             └► prometheus.py

The launcher's loop only puts things into a queue. A disk that is full, read-only or hangs costs the
record of the run, never the run.
"""
