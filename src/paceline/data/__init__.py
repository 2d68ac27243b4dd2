"""Data for the workers: `pl.shard(loader)` gives each sample to one worker.

    shard.py       pl.shard: one object whose iterations are passes over the data
    data_pass.py   the context of one pass; do all ranks pass the same loader?
    pass_report.py what a pass reports: input time, samples of the epoch
    loops.py       pl.steps, pl.epochs: loops that newcomers enter where the job is
    randomness.py  seeds by batch; states of random generators
    split/         which samples go to which worker, and their weight
    cursor/        the progress of passes; state for newcomers and checkpoints
    sources/       kinds of data: loaders with indices, streams, other iterables
    workers/       data workers: other processes make the batches

Start with shard.py, then split/modes.py. Imports runtime.job and control/; does not import
data_parallel/.
"""
