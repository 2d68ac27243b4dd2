"""Fuzz targets: every decoder of bytes that come from a socket or a file.

    target.py            what a target is, and where its corpus is kept
    control_targets.py   handshake, control frames, messages of the coordinator, its journal
    tls_targets.py       the first bytes of TLS on control connections, and changed ones
    server_targets.py    frames, requests and replies of parameter servers, packets, replication
    data_targets.py      batches of data workers, state for a joining worker, returned values
    file_targets.py      checkpoints, records of runs, traces, facts about jobs
    mutation.py          changes messages as trees, so that most of them can still be decoded
    search.py            one Python target under atheris
    native.py            the C++ targets (cpp/fuzz) under libFuzzer
    record.py            makes seeds from the messages of running jobs

`make fuzz` runs all of them; CONTRIBUTING.md describes how to add one.
"""
