"""Data for the workers: each sample goes to one of them.

shard.py                    pl.shard(loader): one object, which each pass asks for batches
  -> consensus.py           do all ranks mean the same loader and the same epoch?
  -> plan.py                which samples make a step, read from the loader's settings
     order.py               the one order of samples that all workers follow
     warmup.py              pl.data_warmup: the first epochs go over a part of it
     split.py               the arithmetic: whose samples, and what weight
  -> modes.py               other ways to share out: partition.py, replicate.py, dynamic.py
     balance.py, costs.py   each global batch is cut by the workers' speed, and by cost
     leased.py, schedule.py  portions of a pass that the coordinator lends to whoever is free
     given.py               a dataset, or a list of files, in place of a loader
  -> pipeline/              data workers make the batches: other processes, in stages, or hosts

How far a pass is, and whose the rest is:
     course.py, reading.py  the arithmetic: what is left, and whose it is now
  -> recut.py, told.py      a pass over a loader with an index for each sample, from any batch on
     indexed.py             the copy of the loader that makes this worker's part
  -> reread.py, in_step.py  the same for data that only comes in sequence
     stream.py              striding over it
     samples.py             which sample could not be made, and where

The ledger: how far everything is, for those who come later, are behind, or resume a run
     passage.py, line.py    every pass over every loader; loop.py: every loop
     ledger.py              all of them, and changes of the membership
     loops.py               pl.steps, pl.epochs: loops that are entered where the others are
     resumption.py          the same as plain data, for checkpoints; saved.py: one pass of it
     repeatable.py          random numbers by the place of a batch; draws.py: as they were
     tally.py               what was handed out; epoch_line.py says it at the end of an epoch
"""
