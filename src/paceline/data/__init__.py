"""Data for the workers: each sample goes to one of them.

shard.py                    pl.shard(loader): one object, which each pass asks for batches
  -> consensus.py           do all ranks mean the same loader and the same epoch?
  -> plan.py                which samples make a step, read from the loader's settings
     order.py               the one order of samples that all workers follow
     warmup.py              pl.data_warmup: the first epochs go over a part of it
     split.py               the arithmetic: whose samples, and what weight
     indexed.py             a loader with an index for each sample: this worker's part of it
  -> stream.py              data that only comes in sequence: striding, and steps in common
  -> pipeline/              data workers make the batches: other processes, in stages, or hosts

Where workers come and go:
     course.py, reading.py  the arithmetic: what is left, and whose it is now
     passage.py, ledger.py  how far every pass is, for those who come later or are behind
  -> recut.py, told.py      a loader with indices begins again in the middle of a pass
  -> reread.py              the same for a stream
     repeatable.py          random numbers that a replacement draws again
     loops.py               pl.steps, pl.epochs: loops that a newcomer enters where the others are
"""
