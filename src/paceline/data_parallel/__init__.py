"""Data parallel training: buckets, the reducer, the update, and what runs around them.

    distribute.py, setup.py, training.py   pl.distribute: set up a model, train it
    reducer.py, bucket.py, policy.py       gradients are exchanged while backward runs
    update/        optimizer.step(): replicated, sharded, on servers, model averaging
    checks/        models, inputs and gradients that are refused or reported
    pace_switch/   from one pace to the next, by a schedule or while the job runs
    amp/           16-bit precision, pl.GradScaler
    model_state/   buffers, batch norm, what newcomers and checkpoints receive

Start with distribute.py, then reducer.py: that is where a gradient goes. The average itself is
computed by a pace (pace/). docs/gradient-journey.md follows one gradient through the files.
"""
