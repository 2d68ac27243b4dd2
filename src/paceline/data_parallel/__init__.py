"""Data parallel training: buckets, the reducer, the update, and what runs around them.

    distribute.py, setup.py, training.py   pl.distribute: set up a model, train it
    reducer.py, bucket.py, policy.py       gradients are exchanged while backward runs
    update/        optimizer.step(): replicated, sharded, on servers, model averaging
    checks/        errors and warnings about models and gradients
    pace_switch/   changes of the pace, by a schedule or while the job runs
    amp/           16-bit precision, pl.GradScaler
    model_state/   buffers, batch norm, state for newcomers and checkpoints
    probe/         what `paceline compare` and `paceline parity` watch in a worker

Start with distribute.py, then reducer.py: it processes gradients. The average itself is
computed by a pace (pace/). docs/gradient-journey.md follows one gradient through the files.
"""
