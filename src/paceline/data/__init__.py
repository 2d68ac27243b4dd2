"""Data for the workers: `pl.shard(loader)` gives each sample to one worker.

    shard.py       pl.shard: one object that each pass asks for batches
    agreement.py   do all ranks pass the same loader, in the same epoch?
    loops.py       pl.steps, pl.epochs: loops that newcomers enter where the job is
    split/         which samples go to which worker, and their weight
    cursor/        how far a pass is; state for newcomers and checkpoints
    sources/       kinds of data: loaders with indices, streams, other iterables
    workers/       data workers: other processes make the batches

Start with shard.py, then split/modes.py. Imports runtime.job and control/; does not import
data_parallel/.
"""
