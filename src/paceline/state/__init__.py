"""One state protocol: what a joining worker receives and what a checkpoint holds.

    protocol.py        Part, State and Change: what has state, its state, why it is loaded
    serializer.py      nested state as plain data and tensors, or as JSON
    stateful_parts.py  all parts of one worker, by name
    transfer.py        to a peer
    files/             checkpoint files: parts, manifest, hashes
    checkpoint/        pl.Checkpoint: when a running job is saved, and resuming

Start with protocol.py, or with checkpoint/checkpoint.py for pl.Checkpoint. checkpoint/ imports
model_parallel/ and data/; everything else here imports comm/ at most.
"""
