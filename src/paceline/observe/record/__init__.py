"""Recording of a run: its directory, TensorBoard files, and an optional Prometheus endpoint.

    launcher's loop ── events, output ──► RunRecorder ── a thread ──► files.py  *.log, events.jsonl
                                                      │
                                                      └ sampling.py: a sample per second
                                                             ├► tensorboard.py
                                                             └► prometheus.py

Start with recorder.py. The launcher's loop only puts things into a queue. If the disk is full,
read-only or hangs, recording stops with a warning; training continues.
"""
