"""Data for the workers: each sample goes to one of them.

shard.py                    pl.shard(loader): one object, which each pass asks for batches
  -> consensus.py           do all ranks mean the same loader and the same epoch?
  -> plan.py                which samples make a step, read from the loader's settings
     order.py               the one order of samples that all workers follow
     split.py               the arithmetic: whose samples, and what weight
     indexed.py             a loader with an index for each sample: this worker's part of it
  -> stream.py              data that only comes in sequence: striding, and steps in common
"""
